"""Size of a token's values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from semkv_bench.importance.key_value import CacheMetric
from semkv_bench.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["ValueNorm"]


@dataclass(frozen=True)
class ValueNorm(CacheMetric):
    """Euclidean norm of a token's value, averaged over the layer's value heads."""

    name = "value_norm"

    def score(self, keys: Tensor, values: Tensor) -> Tensor:
        """See ``CacheMetric``."""
        return torch.linalg.vector_norm(values, dim=-1, dtype=torch.float32).mean(0)
