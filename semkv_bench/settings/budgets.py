"""How the tokens that a deletion keeps are shared among layers and heads."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from semkv_bench.checks import whole
from semkv_bench.config.choices import did_you_mean
from semkv_bench.errors import UsageError
from semkv_bench.importance import WindowEntropy, WindowVariance, metric
from semkv_bench.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["BUDGETS", "Budget", "budget"]


class Budget(ABC):
    """Chooses what is kept by scores; subclasses are frozen dataclasses. No head is ever left empty.

    uneven: may heads of one layer keep different numbers of tokens? asks: is it told how many to keep? profiled: does
    it read scores of heads from a file?
    """

    name: ClassVar[str]
    uneven: ClassVar[bool] = False
    asks: ClassVar[bool] = True
    profiled: ClassVar[bool] = False

    @property
    def label(self) -> str:
        """The text that ``budget`` reads back."""
        return self.name

    @classmethod
    def with_option(cls, *options: float) -> Budget:
        """The budget with the numbers that follow dashes in its label; UsageError if it takes not so many."""
        told = "-".join(f"{option:g}" for option in options)
        raise UsageError(f"allocation.budget={cls.name}-{told}: {cls.name} has no option")

    def evidence(self, score: str) -> tuple[str, ...]:
        """Labels of the metrics whose scores tell layers apart, beside the ``score`` that ranks tokens."""
        return ()

    @abstractmethod
    def kept(self, scores: Tensor, count: int, evidence: Sequence[Tensor] = ()) -> Tensor:
        """What stays, bool, of scores float32 [layers, heads, tokens]; infinite ones always stay.

        count: tokens that each head keeps, as a mean over layers and heads. Ties go to the earlier token. evidence: of
        the metrics of that name, each [layers, heads, tokens], or of the file, [layers, heads].
        """

    def check(self, tokens: int, count: int, always: int = 0) -> None:  # noqa: B027, most take any
        """Raise UsageError if it cannot keep ``count`` of ``tokens`` tokens, of which ``always`` must stay."""


@dataclass(frozen=True)
class PerHead(Budget):
    """Every head of every layer keeps as many."""

    name = "head"

    def kept(self, scores: Tensor, count: int, evidence: Sequence[Tensor] = ()) -> Tensor:
        """See ``Budget``."""
        return _top(scores, count)


@dataclass(frozen=True)
class AdaKV(Budget):
    """The heads of a layer compete; each is sure of a share of its equal part (Feng et al., 2024, arXiv 2407.11550)."""

    name = "adakv"
    uneven = True
    safe: float = 0.2

    def __post_init__(self) -> None:
        if not 0 <= self.safe <= 1:
            raise UsageError(f"allocation.budget=adakv-{self.safe:g}: the safe share must be from 0 to 1")

    @property
    def label(self) -> str:
        """See ``Budget``."""
        return self.name if self.safe == 0.2 else f"{self.name}-{self.safe:g}"

    @classmethod
    def with_option(cls, option: float, *more: float) -> AdaKV:
        """See ``Budget``; the option is the safe share."""
        _only(cls, more)
        return cls(option)

    def kept(self, scores: Tensor, count: int, evidence: Sequence[Tensor] = ()) -> Tensor:
        """See ``Budget``."""
        scores = scores.masked_fill(_top(scores, max(1, int(self.safe * count))), math.inf)
        heads = scores.shape[1]
        return _top(scores.flatten(1), heads * count).unflatten(1, (heads, -1))


@dataclass(frozen=True)
class Pyramid(Budget):
    """Counts fall in a straight line from the first layer to the last (PyramidKV; arXiv 2406.02069).

    The last layer keeps a ``1 / steepness`` part of the mean, but all that must stay; the first the more.
    """

    name = "pyramid"
    steepness: float = 20

    def __post_init__(self) -> None:
        if self.steepness < 1:
            raise UsageError(
                f"allocation.budget=pyramid-{self.steepness:g}: the steepness must be at least 1"
            )

    @property
    def label(self) -> str:
        """See ``Budget``."""
        return self.name if self.steepness == 20 else f"{self.name}-{self.steepness:g}"

    @classmethod
    def with_option(cls, option: float, *more: float) -> Pyramid:
        """See ``Budget``; the option is the steepness."""
        _only(cls, more)
        return cls(option)

    def counts(self, layers: int, tokens: int, count: int, always: int = 0) -> list[int]:
        """Tokens that a head keeps in each layer, of ``tokens`` of which ``always`` must stay."""
        least = max(count / self.steepness, always, 1)
        most = min(2 * count - least, tokens)
        least = 2 * count - most
        step = (most - least) / max(1, layers - 1)
        return [round(most - layer * step) if layers > 1 else count for layer in range(layers)]

    def kept(self, scores: Tensor, count: int, evidence: Sequence[Tensor] = ()) -> Tensor:
        """See ``Budget``."""
        always = int(scores[0, 0].isposinf().sum())
        counts = self.counts(len(scores), scores.shape[-1], count, always)
        return torch.stack([_top(layer, own) for layer, own in zip(scores, counts, strict=True)])


@dataclass(frozen=True)
class Global(Budget):
    """All heads of all layers compete by their scores as they are, as in KVzip; each keeps at least one token."""

    name = "global"
    uneven = True

    def kept(self, scores: Tensor, count: int, evidence: Sequence[Tensor] = ()) -> Tensor:
        """See ``Budget``."""
        scores = scores.masked_fill(_top(scores, 1), math.inf)
        total = scores.shape[0] * scores.shape[1] * count
        return _top(scores.flatten(), total).reshape(scores.shape)


@dataclass(frozen=True)
class Chunks(Budget):
    """Whole stretches of ``length`` tokens stay or go, in all heads of a layer (ChunkKV; arXiv 2502.00299).

    By their mean score, summed over heads. A stretch that holds a token which must stay does.
    """

    name = "chunk"
    length: int = 20

    def __post_init__(self) -> None:
        whole("allocation.budget=chunk-N: N", self.length, 1)

    @property
    def label(self) -> str:
        """See ``Budget``."""
        return self.name if self.length == 20 else f"{self.name}-{self.length:g}"

    @classmethod
    def with_option(cls, option: float, *more: float) -> Chunks:
        """See ``Budget``; the option is the length of a chunk."""
        _only(cls, more)
        return cls(int(option) if option == int(option) else option)

    def check(self, tokens: int, count: int, always: int = 0) -> None:
        """See ``Budget``."""
        if tokens < 2 * self.length:
            raise UsageError(
                f"allocation.budget={self.label} deletes whole chunks of {self.length} tokens, and {tokens} hold "
                "fewer than two: use chunk-N with a smaller N or longer prompts"
            )
        if count < tokens and self._wanted(tokens, count) >= math.ceil(tokens / self.length):
            raise UsageError(
                f"allocation.budget={self.label} deletes no whole chunk of {self.length} tokens where {count} of "
                f"{tokens} are to stay: use chunk-N with a smaller N, smaller keep or longer prompts"
            )

    def _wanted(self, tokens: int, count: int) -> int:
        """Chunks that stay of ``tokens`` tokens, ``count`` of which are to."""
        return max(1, round(math.ceil(tokens / self.length) * count / tokens))

    def kept(self, scores: Tensor, count: int, evidence: Sequence[Tensor] = ()) -> Tensor:
        """See ``Budget``."""
        tokens = scores.shape[-1]
        chunk = torch.arange(tokens, device=scores.device) // self.length
        chunks = int(chunk[-1]) + 1
        sums = scores.new_zeros(len(scores), chunks).index_add_(1, chunk, scores.sum(1))
        means = sums / chunk.bincount(minlength=chunks)
        wanted = max(self._wanted(tokens, count), int(means[0].isposinf().sum()))
        return _top(means, wanted)[:, chunk].unsqueeze(1).expand_as(scores)


@dataclass(frozen=True)
class Threshold(Budget):
    """Every token that scores at least ``least`` stays, and the best of each head; how many is an outcome."""

    name = "threshold"
    uneven = True
    asks = False
    least: float = math.nan

    def __post_init__(self) -> None:
        if math.isnan(self.least):
            raise UsageError("allocation.budget=threshold needs its score, as in threshold-0.001")

    @property
    def label(self) -> str:
        """See ``Budget``."""
        return f"{self.name}-{self.least:g}"

    @classmethod
    def with_option(cls, option: float, *more: float) -> Threshold:
        """See ``Budget``; the option is the least score that stays."""
        _only(cls, more)
        return cls(option)

    def kept(self, scores: Tensor, count: int, evidence: Sequence[Tensor] = ()) -> Tensor:
        """See ``Budget``."""
        return (scores >= self.least) | _top(scores, 1)


@dataclass(frozen=True)
class Cake(Budget):
    """Layers share by ``entropy ** (1 / tau1) * variance ** (1 / tau2)`` of their attention (arXiv 2503.12491).

    Both from the last queries, summed over heads and over the tokens before them. What must stay is no part of what is
    shared, and a layer that would keep more than all gives the rest to the others. ``cake-1.6-0.4`` names both
    exponents; the paper's differ by model, from 0.4 to 2.3, and 1 is taken without them.
    """

    name = "cake"
    tau1: float = 1
    tau2: float = 1

    def __post_init__(self) -> None:
        if min(self.tau1, self.tau2) <= 0:
            raise UsageError(f"allocation.budget={self.label}: tau1 and tau2 must be above 0")

    @property
    def label(self) -> str:
        """See ``Budget``."""
        same = self.tau1 == self.tau2 == 1
        return self.name if same else f"{self.name}-{self.tau1:g}-{self.tau2:g}"

    @classmethod
    def with_option(cls, *options: float) -> Cake:
        """See ``Budget``; the options are tau1 and tau2."""
        if len(options) != 2:
            raise UsageError("allocation.budget=cake-TAU1-TAU2 needs both numbers, as in cake-1.6-0.4")
        return cls(*options)

    def evidence(self, score: str) -> tuple[str, ...]:
        """See ``Budget``; from as many queries as the score counts, where it has a window."""
        window = getattr(metric(score), "window", WindowEntropy().window)
        return WindowEntropy(window).label, WindowVariance(window).label

    def kept(self, scores: Tensor, count: int, evidence: Sequence[Tensor] = ()) -> Tensor:
        """See ``Budget``."""
        layers, tokens = len(scores), scores.shape[-1]
        always = scores[0, 0].isposinf()
        entropy, variance = (each[..., ~always].double().sum((1, 2)) for each in evidence)
        weights = entropy ** (1 / self.tau1) * variance ** (1 / self.tau2)
        must = max(1, int(always.sum()))
        counts = _divided(layers * max(0, count - must), weights.tolist(), tokens - must)
        return torch.stack([_top(layer, must + own) for layer, own in zip(scores, counts, strict=True)])


@dataclass(frozen=True)
class Profile(Budget):
    """Heads that a file marks keep all, as many as there is room for; the others keep ``least`` tokens.

    The file of DuoAttention (arXiv 2410.10819) has a score for each head, a line a layer. With the score ``streaming``
    the others keep sinks and the newest. One head lies between, so that the mean is what is asked for.
    ``profile-128`` names the tokens; 64 is the default.
    """

    name = "profile"
    uneven = True
    profiled = True
    least: int = 64

    def __post_init__(self) -> None:
        whole("allocation.budget=profile-N: N", self.least, 1)

    @property
    def label(self) -> str:
        """See ``Budget``."""
        return self.name if self.least == 64 else f"{self.name}-{self.least:g}"

    @classmethod
    def with_option(cls, option: float, *more: float) -> Profile:
        """See ``Budget``; the option is what other heads keep."""
        _only(cls, more)
        return cls(int(option) if option == int(option) else option)

    def check(self, tokens: int, count: int, always: int = 0) -> None:
        """See ``Budget``."""
        if count < self.least:
            raise UsageError(
                f"allocation.budget={self.label}: heads are to keep {count} of {tokens} tokens as a mean, fewer than "
                f"the {self.least} of a head that is not marked: use profile-N with a smaller N or larger keep"
            )
        if always > self.least:
            raise UsageError(
                f"allocation.budget={self.label}: {always} tokens must stay in every head, more than {self.least} of "
                "one that is not marked: use profile-N with a larger N, or allocation.score=streaming"
            )

    def kept(self, scores: Tensor, count: int, evidence: Sequence[Tensor] = ()) -> Tensor:
        """See ``Budget``."""
        (marked,) = evidence
        layers, heads, tokens = scores.shape
        left = layers * heads * (count - self.least)
        order = torch.sort(marked.flatten(), descending=True, stable=True).indices.tolist()
        counts = dict.fromkeys(order, self.least)
        for head in order:
            more = min(left, tokens - self.least)
            counts[head] += more
            left -= more
        rows = scores.flatten(0, 1)
        return torch.stack([_top(rows[head], counts[head]) for head in range(len(rows))]).view_as(scores)


def _divided(total: int, weights: Sequence[float], most: int) -> list[int]:
    """Whole numbers of sum ``total``, none above ``most``, as near to the weights as may be; earlier ones first."""
    parts = [0] * len(weights)
    free = list(range(len(weights)))
    left = min(total, most * len(weights))
    while left and free:
        whole = sum(weights[i] for i in free)
        shares = {i: left * (weights[i] / whole if whole > 0 else 1 / len(free)) for i in free}
        full = [i for i in free if parts[i] + shares[i] >= most]
        if not full:
            for i in free:
                parts[i] += int(shares[i])
            rest = left - sum(int(share) for share in shares.values())
            by_rest = sorted(free, key=lambda i: int(shares[i]) - shares[i])
            for i in by_rest[:rest]:
                parts[i] += 1
            return parts
        for i in full:
            left -= most - parts[i]
            parts[i] = most
        free = [i for i in free if i not in full]
    return parts


BUDGETS: dict[str, type[Budget]] = {
    kind.name: kind for kind in (PerHead, AdaKV, Pyramid, Global, Chunks, Threshold, Cake, Profile)
}


def budget(label: str) -> Budget:
    """The budget that ``label`` names: ``head``, ``adakv``, ``chunk-10``.

    Raises:
        UsageError: there is no such budget (the message lists the choices), or its option is none.
    """
    name, dash, option = str(label).partition("-")
    if name not in BUDGETS:
        raise UsageError(
            f"no allocation.budget {label!r}{did_you_mean(name, list(BUDGETS))}; choose from {', '.join(BUDGETS)}"
        )
    if not dash:
        return BUDGETS[name]()
    return BUDGETS[name].with_option(*(_number(label, each) for each in re.split(r"(?<=[\d.])-", option)))


def _number(label: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(f"allocation.budget={label}: {text!r} is not a number")
    return number


def _only(kind: type[Budget], more: Sequence[float]) -> None:
    if more:
        raise UsageError(f"allocation.budget={kind.name} takes one number, as in {kind.name}-N")


def _top(scores: Tensor, count: int) -> Tensor:
    """Mask of the ``count`` highest scores along the last dimension; ties go to the earlier place."""
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    mask = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    return mask.scatter_(-1, order[..., :count], True)
