"""How unexpected a token is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from semkv_bench.importance.logits import LogitMetric

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["Surprisal"]


@dataclass(frozen=True)
class Surprisal(LogitMetric):
    """Negative log-likelihood of the token given those before it, in nats: [1, tokens].

    The first token has nothing before it; it gets ln(vocabulary), the surprisal under a uniform guess.
    """

    name = "surprisal"

    def score(self, surprisal: Tensor, entropy: Tensor) -> Tensor:
        """See ``LogitMetric``."""
        return surprisal
