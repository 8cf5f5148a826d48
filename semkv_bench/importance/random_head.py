"""A ranking by chance, another one in every head."""

from dataclasses import dataclass

import torch
from torch import Tensor

from semkv_bench.importance.heads import HeadCacheMetric

__all__ = ["RandomHead"]


@dataclass(frozen=True)
class RandomHead(HeadCacheMetric):
    """Uniform random numbers for every layer, head and token, drawn anew for every seed and every prompt.

    Far milder than ``random``, which deletes a token from all layers and heads at once.
    """

    name = "random_head"
    seeded = True

    def score(self, keys: Tensor, values: Tensor, seed: int) -> Tensor:
        """See ``HeadCacheMetric``."""
        return torch.rand(keys.shape[:2], generator=torch.Generator().manual_seed(seed))
