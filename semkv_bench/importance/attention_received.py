"""Attention that a token gets from the whole prompt."""

from dataclasses import dataclass

from semkv_bench.importance.attention import AttentionMetric

__all__ = ["AttentionReceived"]


@dataclass(frozen=True)
class AttentionReceived(AttentionMetric):
    """Attention weights that all queries of the prompt give to a token, summed; a layer's scores add up to ``tokens``.

    The accumulated score of H2O (Zhang et al., 2023). Early tokens are seen by more queries and lead.
    """

    name = "attention_received"

    def first_query(self, tokens: int) -> int:
        """See ``AttentionMetric``."""
        return 0
