"""Size of a token's hidden state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from semkv_bench.importance.hidden import HiddenMetric
from semkv_bench.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["HiddenNorm"]


@dataclass(frozen=True)
class HiddenNorm(HiddenMetric):
    """Euclidean norm of the hidden state that enters the layer, the one its keys and values are made of."""

    name = "hidden_norm"

    def score(self, before: Tensor, after: Tensor) -> Tensor:
        """See ``HiddenMetric``."""
        return torch.linalg.vector_norm(before, dim=-1, dtype=torch.float32)
