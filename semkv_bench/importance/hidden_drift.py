"""How much the layers turn a token's hidden state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from semkv_bench.importance.hidden import HiddenMetric
from semkv_bench.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["HiddenDrift"]


@dataclass(frozen=True)
class HiddenDrift(HiddenMetric):
    """1 - cosine between the hidden states before and after a layer, averaged over all layers: [1, tokens].

    The residual stream itself is compared; the model's final norm is not a layer.
    """

    name = "hidden_drift"
    averaged = True

    def score(self, before: Tensor, after: Tensor) -> Tensor:
        """See ``HiddenMetric``; from 0 (same direction) to 2 (opposite)."""
        before, after = before.float(), after.float()
        norms = torch.linalg.vector_norm(before, dim=-1) * torch.linalg.vector_norm(after, dim=-1)
        return 1 - torch.linalg.vecdot(before, after) / norms.clamp_min(torch.finfo(torch.float32).tiny)
