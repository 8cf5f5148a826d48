"""A ranking by chance, another one in every head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from semkv_bench.importance.heads import HeadCacheMetric
from semkv_bench.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


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
