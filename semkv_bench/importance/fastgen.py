"""Policies by head: special tokens, punctuation, what gets much attention, what is near."""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import TYPE_CHECKING

from semkv_bench.importance.base import Prompt
from semkv_bench.importance.heads import HeadAttentionMetric, shared_keys
from semkv_bench.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["FastGen"]

_SHARE = 0.3


@dataclass(frozen=True)
class FastGen(HeadAttentionMetric):
    """Attention that a head still lacks when the policies cheaper than a token's own are used (arXiv 2310.01801).

    Policies add up: special tokens; punctuation; the 30% of the tokens that get most attention; the nearest 30%; all.
    With ``budget=threshold-0.05`` each head gets the first policy that recovers 95% of its prompt's attention. Tokens
    of one policy score alike.
    """

    name = "fastgen"
    sums = 2

    def first_query(self, tokens: int) -> int:
        """See ``HeadAttentionMetric``."""
        return 0

    def summed(self, weights: Tensor, position: int, tokens: int) -> Tensor:
        """See ``HeadAttentionMetric``: all attention, and that from queries near by."""
        queries = torch.arange(position, position + weights.shape[1], device=weights.device)[:, None]
        keys = torch.arange(weights.shape[2], device=weights.device)
        near = keys > queries - round(_SHARE * tokens)
        return torch.stack([weights.sum(1), (weights * near).sum(1)])

    def score(self, sums: Tensor, keys: Tensor, prompt: Prompt) -> Tensor:
        """See ``HeadAttentionMetric``."""
        received, near = (shared_keys(each, len(keys)) / prompt.tokens for each in sums)
        count = round(_SHARE * prompt.tokens)
        special, punctuation = (mark.to(received.device) for mark in _marks(prompt))
        best = received.sort(dim=-1, descending=True, stable=True).indices[:, :count]
        frequent = torch.zeros_like(received, dtype=torch.bool).scatter_(-1, best, True)
        local = torch.arange(prompt.tokens, device=received.device) >= prompt.tokens - count
        kept = special.expand_as(frequent)
        scores, lacking = kept.float(), 1 - (received * kept).sum(-1, keepdim=True)
        for policy in (punctuation, frequent, local):
            new = policy & ~kept
            scores = torch.where(new, lacking, scores)
            # The nearest tokens are others for every query, so what they add is what queries near by gave.
            gained = near * ~kept if policy is local else received * new
            lacking, kept = (lacking - gained.sum(-1, keepdim=True)).clamp_min(0), kept | new
        return torch.where(kept, scores, lacking)


def _marks(prompt: Prompt) -> tuple[Tensor, Tensor]:
    """Which tokens are special, and which spell nothing but punctuation, bool [tokens]."""
    tokenizer, ids = prompt.loaded.tokenizer, prompt.ids.tolist()
    special = set(getattr(tokenizer, "all_special_ids", ()))
    spelled = {each: tokenizer.decode([each], skip_special_tokens=False).strip() for each in set(ids)}
    marks = {each for each, text in spelled.items() if text and not set(text) - set(string.punctuation)}
    return tuple(torch.tensor([each in chosen for each in ids]) for chosen in (special, marks - special))
