"""How open the continuation is after a token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from semkv_bench.importance.logits import LogitMetric

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["LogitEntropy"]


@dataclass(frozen=True)
class LogitEntropy(LogitMetric):
    """Entropy of the next-token distribution that the model computes at the token, in nats: [1, tokens]."""

    name = "logit_entropy"

    def score(self, surprisal: Tensor, entropy: Tensor) -> Tensor:
        """See ``LogitMetric``."""
        return entropy
