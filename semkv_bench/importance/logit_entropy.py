"""How open the continuation is after a token."""

from dataclasses import dataclass

from torch import Tensor

from semkv_bench.importance.logits import LogitMetric

__all__ = ["LogitEntropy"]


@dataclass(frozen=True)
class LogitEntropy(LogitMetric):
    """Entropy of the next-token distribution that the model computes at the token, in nats: [1, tokens]."""

    name = "logit_entropy"

    def score(self, surprisal: Tensor, entropy: Tensor) -> Tensor:
        """See ``LogitMetric``."""
        return entropy
