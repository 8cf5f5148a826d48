"""Attention that a token gets from the whole prompt, in every head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from semkv_bench.importance.base import Prompt
from semkv_bench.importance.heads import HeadAttentionMetric, shared_keys
from semkv_bench.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["H2O", "H2OMean"]


@dataclass(frozen=True)
class H2O(HeadAttentionMetric):
    """Sum of the attention from all queries (Zhang et al., 2023, arXiv 2306.14048).

    Half of what is kept are the newest tokens, as in the paper. Early tokens are seen by more queries and lead.
    Taken from the whole prompt at once; the paper evicts step by step.
    """

    name = "h2o"

    def always_kept(self, tokens: int, count: int) -> Tensor:
        """See ``Metric``."""
        return torch.arange(tokens) >= tokens - count // 2

    def first_query(self, tokens: int) -> int:
        """See ``HeadAttentionMetric``."""
        return 0

    def score(self, sums: Tensor, keys: Tensor, prompt: Prompt) -> Tensor:
        """See ``HeadAttentionMetric``."""
        return shared_keys(sums[0], len(keys))


@dataclass(frozen=True)
class H2OMean(HeadAttentionMetric):
    """Mean attention from the queries that can see the token; the newest tokens have no place of their own.

    The score that kvpress calls observed attention.
    """

    name = "h2o_mean"

    def first_query(self, tokens: int) -> int:
        """See ``HeadAttentionMetric``."""
        return 0

    def score(self, sums: Tensor, keys: Tensor, prompt: Prompt) -> Tensor:
        """See ``HeadAttentionMetric``."""
        seen_by = torch.arange(sums.shape[-1], 0, -1, device=sums.device)
        return shared_keys(sums[0], len(keys)) / seen_by
