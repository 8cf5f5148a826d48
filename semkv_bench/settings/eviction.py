"""Deletion as methods that evict tokens do it: a score for every layer and head, and a budget."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from semkv_bench.checks import choice, is_number, whole
from semkv_bench.errors import UsageError
from semkv_bench.files import read_text
from semkv_bench.grid.levels import DELETED, FULL_PRECISION, Storage, check_levels, mix
from semkv_bench.importance.choice import metric
from semkv_bench.lazy import torch
from semkv_bench.quantizers.base import Quantizer, pair_label
from semkv_bench.settings.allocation import PER_LAYER, Uniform
from semkv_bench.settings.budgets import budget
from semkv_bench.settings.sets import TwoLevelMixes, check_tokenwise, listed
from semkv_bench.settings.setting import Coded, Setting

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["POSITIONS", "QUESTIONS", "Evict", "Evictions", "read_profile"]

QUESTIONS = ("seen", "unseen")
POSITIONS = ("true", "renumbered")
_KEEP = (0.75, 0.5, 0.25, 0.125)


@dataclass(frozen=True)
class Evict:
    """What of a prompt is deleted, in every layer and key-value head by itself.

    score: label of the metric that ranks tokens; budget: label of how those kept are shared among heads; keep: share
    of the tokens that stays, or tokens: how many at most; question: is what the prompt asks in sight of the score,
    or (``unseen``) is the context alone scored, before the question comes, which then is kept whole? positions: do
    tokens keep their positions (``true``), or are those that stay ``renumbered``, as in StreamingLLM? heads: of a
    budget that reads them from a file, a score for each head of each layer.
    """

    kind: ClassVar[str] = "prune"
    per_head: ClassVar[bool] = True
    score: str
    budget: str = "head"
    keep: float | None = None
    tokens: int | None = None
    question: str = "seen"
    positions: str = "true"
    heads: tuple[tuple[float, ...], ...] | None = None

    def __post_init__(self) -> None:
        metric(self.score)
        choice("allocation.positions", self.positions, POSITIONS)
        if self.renumbered and (metric(self.score).name, self.budget) != ("streaming", "head"):
            raise UsageError(
                "allocation.positions=renumbered needs heads that keep the same tokens: use allocation.score=streaming "
                "and allocation.budget=head"
            )
        if budget(self.budget).profiled != (self.heads is not None):
            raise UsageError(
                f"allocation.budget={self.budget} needs allocation.profile=FILE, scores of heads, a line a layer"
                if self.heads is None
                else f"allocation.profile is read by allocation.budget=profile alone, not by {self.budget}"
            )
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
    def metrics(self) -> set[str]:
        """Labels of all metrics whose scores say what is deleted."""
        return {self.score, *budget(self.budget).evidence(self.score)}

    @property
    def renumbered(self) -> bool:
        """Do the tokens that stay get positions without gaps?"""
        return self.positions == "renumbered"

    @property
    def scope(self) -> str:
        """Budget and question, the file's digest behind a budget that reads one, and other positions than the true."""
        digest = ""
        if self.heads is not None:
            digest = "/" + hashlib.sha256(json.dumps(self.heads).encode()).hexdigest()[:8]
        return f"{self.budget}{digest}:{self.question}" + (":renumbered" if self.renumbered else "")

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
        shares = budget(self.budget)
        evidence = [scores(label, self.question).float() for label in shares.evidence(self.score)]
        if self.heads is not None:
            evidence.append(torch.tensor(self.heads))
        kept = shares.kept(found.masked_fill(always, torch.inf), count, evidence)
        return torch.nn.functional.pad(~kept, (0, tokens - scored))

    def check(self, tokens: int) -> None:
        """Raise UsageError if the method says or deletes nothing of ``tokens`` scored tokens."""
        scored, count = metric(self.score), self.kept(tokens)
        name = f"evict@{self.label}"
        for label in sorted(self.metrics):
            least = metric(label).least_tokens
            if tokens < least:
                raise UsageError(
                    f"{name}: {label} needs prompts of at least {least} tokens to rank, and one has {tokens}: choose a "
                    f"smaller window or stretch ({self.score.partition('-')[0]}-N) or longer prompts"
                )
        asks = budget(self.budget).asks
        always = int(scored.always_kept(tokens, count if asks else 0).sum())
        if asks and count < always:
            raise UsageError(
                f"{name}: {count} of {tokens} tokens are to stay, but {self.score} always keeps {always}: choose a "
                f"smaller window or stretch ({self.score.partition('-')[0]}-N), larger keep or longer prompts"
            )
        # All of them kept by name, ``keep=1``, is what was asked for.
        if asks and self.keep != 1 and count >= tokens:
            asked = "tokens" if self.keep is None else "keep"
            raise UsageError(
                f"{name} deletes nothing of a prompt of {tokens} tokens: lower allocation.{asked} or give longer "
                "prompts"
            )
        budget(self.budget).check(tokens, count, always)

    def check_shape(self, layers: int, heads: int) -> None:
        """Raise UsageError if scores of heads, read from a file, are not ``layers`` times ``heads``."""
        found = [len(layer) for layer in self.heads or ()]
        if self.heads is not None and found != [heads] * layers:
            raise UsageError(
                f"allocation.profile has {len(found)} lines of {' or '.join(map(str, sorted(set(found))))} numbers; "
                f"this model has {layers} layers of {heads} key-value heads"
            )

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

    A score may name its own budget, as in ``kvzip/global``, and is then crossed with no other.

    levels: what stays is quantized too, at one setting per entry; null: it stays in 16 bits. positions: see ``Evict``;
    profile: file of the scores of heads that ``budget=profile`` reads. retain: no token is deleted besides, and those
    that score best have more levels than the rest, one setting per entry (``16/4@0.25``) and score; null: none.
    """

    score: Any = "snapkv"
    budget: Any = "head"
    keep: Any = None
    tokens: Any = None
    question: Any = "seen"
    levels: Any = None
    positions: Any = True
    profile: str | None = None
    retain: Any = None

    def settings(self, keys: Quantizer, values: Quantizer) -> list[Setting]:
        """One setting per combination."""
        made = []
        heads = None if self.profile is None else read_profile(self.profile)
        options = (self.score, self.budget, self.question, self.positions, self.levels)
        for named, shares, question, positions, levels in itertools.product(*map(listed, options)):
            score, own, its = str(named).partition("/")
            if own and shares != listed(self.budget)[0]:
                continue
            shares = its or shares
            keeps, counts = self.keep, self.tokens
            if own and not budget(shares).asks:
                keeps = counts = None
            elif keeps is None and counts is None and budget(shares).asks:
                keeps = _KEEP
            for keep, tokens in itertools.product(listed(keeps), listed(counts)):
                where = "true" if positions is True else positions
                evict = Evict(score, shares, keep, tokens, question, where, heads)
                made.append(_setting(evict, levels, keys, values))
        if self.retain is not None:
            scores = dict.fromkeys(str(named).partition("/")[0] for named in listed(self.score))
            for score, text in itertools.product(scores, listed(self.retain)):
                high, low, share = _retained(text)
                made += TwoLevelMixes(high, low, share, score, PER_LAYER).settings(keys, values)
        return made


def _retained(text: Any) -> tuple[int, int, float]:
    """High and low levels and the share of tokens at high, of ``16/4@0.25``."""
    found = re.fullmatch(r"(\d+)/(\d+)@(0?\.\d+|[01](?:\.\d+)?)", str(text))
    if found is None:
        raise UsageError(f"allocation.retain={text} must be spelled HIGH/LOW@SHARE, as in 16/4@0.25")
    return int(found[1]), int(found[2]), float(found[3])


def read_profile(path: str) -> tuple[tuple[float, ...], ...]:
    """Scores of heads, a line a layer, numbers apart by tabs, spaces or commas; DuoAttention publishes such files.

    Raises:
        MissingError: there is no such file.
        UsageError: it holds something else.
    """
    lines = [
        line
        for line in read_text(Path(path).expanduser(), f"allocation.profile={path}").splitlines()
        if line.strip()
    ]
    try:
        found = tuple(tuple(float(each) for each in re.split(r"[\s,]+", line.strip())) for line in lines)
    except ValueError:
        found = ()
    if not found or len({len(layer) for layer in found}) > 1 or not all(map(math.isfinite, sum(found, ()))):
        raise UsageError(f"{path}: a profile has a line for each layer, with a finite number for each head")
    return found


def _setting(evict: Evict, levels: int | None, keys: Quantizer, values: Quantizer) -> Setting:
    name = f"evict@{evict.label}"
    if levels is None:
        return Setting(name, evict.kind, prune=evict)
    check_levels([levels])
    check_tokenwise(name, keys, values, "stored depends on what is deleted")
    label = pair_label(keys, values)
    sides = (Coded(side, Uniform(levels)) for side in (keys, values))
    return Setting(f"{label}-L{levels}-{name}", evict.kind, label, *sides, prune=evict)
