"""The newest tokens first."""

from dataclasses import dataclass

import torch
from torch import Tensor

from semkv_bench.importance.controls import ControlMetric

__all__ = ["Recency"]


@dataclass(frozen=True)
class Recency(ControlMetric):
    """A token's position: what a sliding window keeps."""

    name = "recency"

    def score(self, ids: Tensor, seed: int) -> Tensor:
        """See ``ControlMetric``."""
        return torch.arange(len(ids), dtype=torch.float32)
