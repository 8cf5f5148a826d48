"""The newest tokens first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from semkv_bench.importance.model_free import ControlMetric
from semkv_bench.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["Recency"]


@dataclass(frozen=True)
class Recency(ControlMetric):
    """A token's position: what a sliding window keeps."""

    name = "recency"

    def score(self, ids: Tensor, seed: int) -> Tensor:
        """See ``ControlMetric``."""
        return torch.arange(len(ids), dtype=torch.float32)
