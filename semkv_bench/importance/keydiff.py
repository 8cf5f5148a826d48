"""Keys unlike all others first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from semkv_bench.importance.heads import HeadCacheMetric
from semkv_bench.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["KeyDiff"]


@dataclass(frozen=True)
class KeyDiff(HeadCacheMetric):
    """Minus the cosine between a key and the mean direction of its head's keys (Park et al., 2025, arXiv 2504.15364).

    Taken once over the whole prompt; the paper evicts block by block.
    """

    name = "keydiff"

    def score(self, keys: Tensor, values: Tensor, seed: int) -> Tensor:
        """See ``HeadCacheMetric``."""
        anchor = torch.nn.functional.normalize(keys, dim=-1).mean(1, keepdim=True)
        return -torch.nn.functional.cosine_similarity(keys, anchor, dim=-1)
