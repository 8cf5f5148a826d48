"""Deletion as methods that evict tokens do it: a score for every layer and head, and a budget."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from semkv_bench.checks import choice, is_number, whole
from semkv_bench.errors import UsageError
from semkv_bench.grid.levels import DELETED, FULL_PRECISION, Storage, check_levels, mix
from semkv_bench.importance.choice import metric
from semkv_bench.quantizers.base import Quantizer, pair_label
from semkv_bench.settings.allocation import Uniform
from semkv_bench.settings.budgets import budget
from semkv_bench.settings.setting import Coded, Setting, listed

__all__ = ["QUESTIONS", "Evict", "Evictions"]

QUESTIONS = ("seen", "unseen")
_KEEP = (0.75, 0.5, 0.25, 0.125)


@dataclass(frozen=True)
class Evict:
    """What of a prompt is deleted, in every layer and key-value head by itself.

    score: label of the metric that ranks tokens; budget: label of how those kept are shared among heads; keep: share
    of the tokens that stays, or tokens: how many at most; question: is what the prompt asks in sight of the score,
    or (``unseen``) is the context alone scored, before the question comes, which then is kept whole?
    """

    kind: ClassVar[str] = "prune"
    per_head: ClassVar[bool] = True
    score: str
    budget: str = "head"
    keep: float | None = None
    tokens: int | None = None
    question: str = "seen"

    def __post_init__(self) -> None:
        metric(self.score)
        asks = budget(self.budget).asks
        given = [name for name in ("keep", "tokens") if getattr(self, name) is not None]
        if len(given) != int(asks):
            raise UsageError(
                "allocation.keep and allocation.tokens are two ways to say one thing: give one"
                if asks
                else f"allocation.budget={self.budget} finds out how many tokens stay: leave allocation.{given[0]} null"
            )
        share, count = self.keep, self.tokens
        if share is not None and not (is_number(share) and 0 < share <= 1):
            raise UsageError(f"allocation.keep={share} must be a share above 0, at most 1")
        whole("allocation.tokens", count, 1, or_null=True)
        choice("allocation.question", self.question, QUESTIONS)

    @property
    def metric(self) -> str:
        """Label of the metric that ranks tokens."""
        return self.score

    @property
    def scope(self) -> str:
        """Budget and question."""
        return f"{self.budget}:{self.question}"

    @property
    def label(self) -> str:
        """``0.25:snapkv:head:seen``, or ``1024t:..`` behind ``evict@``."""
        asked = (
            f"{self.keep:g}" if self.keep is not None else "" if self.tokens is None else f"{self.tokens}t"
        )
        return f"{asked or 'any'}:{self.score}:{self.scope}"

    @property
    def uneven(self) -> bool:
        """May heads of one layer keep different numbers of tokens?"""
        return budget(self.budget).uneven

    def kept(self, tokens: int) -> int:
        """How many of ``tokens`` scored tokens a head keeps, as a mean; all where only the scores can tell."""
        if self.keep is not None:
            return max(1, round(self.keep * tokens))
        return tokens if self.tokens is None else min(tokens, int(self.tokens))

    def deleted(self, scores: Callable[[str, str], Tensor], shape: tuple[int, int], tokens: int) -> Tensor:
        """What goes of ``tokens`` tokens, bool [layers, heads, tokens].

        scores: a metric's scores by its label and question, of the first tokens; shape: layers and heads.
        """
        found = scores(self.score, self.question)
        if found.dim() == 2:
            found = found.unsqueeze(1)
        scored = found.shape[-1]
        found = found.float().expand(*shape, scored)
        count = self.kept(scored)
        always = metric(self.score).always_kept(scored, count if budget(self.budget).asks else 0)
        kept = budget(self.budget).kept(found.masked_fill(always, torch.inf), count)
        return torch.nn.functional.pad(~kept, (0, tokens - scored))

    def check(self, tokens: int) -> None:
        """Raise UsageError if the method says or deletes nothing of ``tokens`` scored tokens."""
        scored, count = metric(self.score), self.kept(tokens)
        name = f"evict@{self.label}"
        if tokens < scored.least_tokens:
            raise UsageError(
                f"{name}: {self.score} needs prompts of at least {scored.least_tokens} tokens to rank, and one has "
                f"{tokens}: choose a smaller window or stretch ({self.score.partition('-')[0]}-N) or longer prompts"
            )
        asks = budget(self.budget).asks
        always = int(scored.always_kept(tokens, count if asks else 0).sum())
        if asks and count < always:
            raise UsageError(
                f"{name}: {count} of {tokens} tokens are to stay, but {self.score} always keeps {always}: choose a "
                f"smaller window or stretch ({self.score.partition('-')[0]}-N), larger keep or longer prompts"
            )
        if self.tokens is not None and count >= tokens:
            raise UsageError(
                f"{name} deletes nothing of a prompt of {tokens} tokens: lower allocation.tokens or give longer prompts"
            )
        budget(self.budget).check(tokens, count)

    def storage(self, coded: Storage = FULL_PRECISION) -> Storage:
        """Cost per value of the unpruned cache where what stays costs ``coded``.

        Without a share, of a value that stays: what the cache costs then is measured alone.
        """
        if self.keep is None:
            return coded
        return mix([(self.keep, coded), (1 - self.keep, DELETED)])


@dataclass(frozen=True)
class Evictions:
    """Every combination of ``score``, ``budget``, ``question`` and ``keep`` or ``tokens``; each may be a list.

    levels: what stays is quantized too, at one setting per entry; null: it stays in 16 bits.
    """

    score: Any = "snapkv"
    budget: Any = "head"
    keep: Any = None
    tokens: Any = None
    question: Any = "seen"
    levels: Any = None

    def settings(self, keys: Quantizer, values: Quantizer) -> list[Setting]:
        """One setting per combination."""
        made = []
        for score, shares, question, levels in itertools.product(
            *map(listed, (self.score, self.budget, self.question, self.levels))
        ):
            keeps = self.keep
            if keeps is None and self.tokens is None and budget(shares).asks:
                keeps = _KEEP
            for keep, tokens in itertools.product(listed(keeps), listed(self.tokens)):
                made.append(_setting(Evict(score, shares, keep, tokens, question), levels, keys, values))
        return made


def _setting(evict: Evict, levels: int | None, keys: Quantizer, values: Quantizer) -> Setting:
    name = f"evict@{evict.label}"
    if levels is None:
        return Setting(name, evict.kind, prune=evict)
    check_levels([levels])
    for side in (keys, values):
        if not side.granularity.mixed or side.keep.windowed or side.keep.sinks:
            raise UsageError(
                f"{name}: {side.name} codes tokens together or leaves some in 16 bits, so what is stored depends on "
                "what is deleted; quantize the rest by a method that codes each token by itself, such as affine"
            )
    label = pair_label(keys, values)
    sides = (Coded(side, Uniform(levels)) for side in (keys, values))
    return Setting(f"{label}-L{levels}-{name}", evict.kind, label, *sides, prune=evict)
