"""Attention from the last token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from semkv_bench.importance.base import Prompt
from semkv_bench.importance.heads import HeadAttentionMetric, lifted
from semkv_bench.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["Tova"]


@dataclass(frozen=True)
class Tova(HeadAttentionMetric):
    """Attention from the last token, averaged over all heads of a layer (Oren et al., 2024, arXiv 2401.06104).

    All heads of a layer keep the same tokens, the last one always. Taken at the end of the prompt; the paper evicts
    step by step.
    """

    name = "tova"

    def always_kept(self, tokens: int, count: int) -> Tensor:
        """See ``Metric``."""
        return torch.arange(tokens) == tokens - 1

    def first_query(self, tokens: int) -> int:
        """See ``HeadAttentionMetric``."""
        return tokens - 1

    def score(self, sums: Tensor, keys: Tensor, prompt: Prompt) -> Tensor:
        """See ``HeadAttentionMetric``."""
        scores = sums[0].mean(0).expand(len(keys), -1)
        return lifted(scores, self.always_kept(scores.shape[-1], 0).to(scores.device))
