"""Small keys first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from semkv_bench.importance.heads import HeadCacheMetric
from semkv_bench.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["Knorm"]


@dataclass(frozen=True)
class Knorm(HeadCacheMetric):
    """Minus the Euclidean norm of a token's key in a head (Devoto et al., 2024, arXiv 2406.11430).

    The other way round than ``key_norm``: keys of small norm tend to get much attention.
    """

    name = "knorm"

    def score(self, keys: Tensor, values: Tensor, seed: int) -> Tensor:
        """See ``HeadCacheMetric``."""
        return -torch.linalg.vector_norm(keys, dim=-1)
