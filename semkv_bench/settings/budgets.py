"""How the tokens that a deletion keeps are shared among layers and heads."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from semkv_bench.checks import whole
from semkv_bench.config.choices import did_you_mean
from semkv_bench.errors import UsageError

__all__ = ["BUDGETS", "Budget", "budget"]


class Budget(ABC):
    """Chooses what is kept by scores; subclasses are frozen dataclasses. No head is ever left empty.

    uneven: may heads of one layer keep different numbers of tokens? asks: is it told how many to keep?
    """

    name: ClassVar[str]
    uneven: ClassVar[bool] = False
    asks: ClassVar[bool] = True

    @property
    def label(self) -> str:
        """The text that ``budget`` reads back."""
        return self.name

    @classmethod
    def with_option(cls, option: float) -> "Budget":
        """The budget with the number that follows a dash in its label; UsageError if it takes none."""
        raise UsageError(f"allocation.budget={cls.name}-{option:g}: {cls.name} has no option")

    @abstractmethod
    def kept(self, scores: Tensor, count: int) -> Tensor:
        """What stays, bool, of scores float32 [layers, heads, tokens]; infinite ones always stay.

        count: tokens that each head keeps, as a mean over layers and heads. Ties go to the earlier token.
        """

    def check(self, tokens: int, count: int) -> None:  # noqa: B027, most take any
        """Raise UsageError if it cannot keep ``count`` of ``tokens`` tokens."""


@dataclass(frozen=True)
class PerHead(Budget):
    """Every head of every layer keeps as many."""

    name = "head"

    def kept(self, scores: Tensor, count: int) -> Tensor:
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
    def with_option(cls, option: float) -> "AdaKV":
        """See ``Budget``; the option is the safe share."""
        return cls(option)

    def kept(self, scores: Tensor, count: int) -> Tensor:
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
    def with_option(cls, option: float) -> "Pyramid":
        """See ``Budget``; the option is the steepness."""
        return cls(option)

    def counts(self, layers: int, tokens: int, count: int, always: int = 0) -> list[int]:
        """Tokens that a head keeps in each layer, of ``tokens`` of which ``always`` must stay."""
        least = max(count / self.steepness, always, 1)
        most = min(2 * count - least, tokens)
        least = 2 * count - most
        step = (most - least) / max(1, layers - 1)
        return [round(most - layer * step) if layers > 1 else count for layer in range(layers)]

    def kept(self, scores: Tensor, count: int) -> Tensor:
        """See ``Budget``."""
        always = int(scores[0, 0].isposinf().sum())
        counts = self.counts(len(scores), scores.shape[-1], count, always)
        return torch.stack([_top(layer, own) for layer, own in zip(scores, counts, strict=True)])


@dataclass(frozen=True)
class Global(Budget):
    """All heads of all layers compete by their scores as they are, as in KVzip; each keeps at least one token."""

    name = "global"
    uneven = True

    def kept(self, scores: Tensor, count: int) -> Tensor:
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
    def with_option(cls, option: float) -> "Chunks":
        """See ``Budget``; the option is the length of a chunk."""
        return cls(int(option) if option == int(option) else option)

    def check(self, tokens: int, count: int) -> None:
        """See ``Budget``."""
        if tokens < 2 * self.length:
            raise UsageError(
                f"allocation.budget={self.label} deletes whole chunks of {self.length} tokens, and {tokens} hold "
                "fewer than two: use chunk-N with a smaller N or longer prompts"
            )

    def kept(self, scores: Tensor, count: int) -> Tensor:
        """See ``Budget``."""
        tokens = scores.shape[-1]
        chunk = torch.arange(tokens, device=scores.device) // self.length
        chunks = int(chunk[-1]) + 1
        sums = scores.new_zeros(len(scores), chunks).index_add_(1, chunk, scores.sum(1))
        means = sums / chunk.bincount(minlength=chunks)
        wanted = max(1, round(chunks * count / tokens), int(means[0].isposinf().sum()))
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
    def with_option(cls, option: float) -> "Threshold":
        """See ``Budget``; the option is the least score that stays."""
        return cls(option)

    def kept(self, scores: Tensor, count: int) -> Tensor:
        """See ``Budget``."""
        return (scores >= self.least) | _top(scores, 1)


BUDGETS: dict[str, type[Budget]] = {
    kind.name: kind for kind in (PerHead, AdaKV, Pyramid, Global, Chunks, Threshold)
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
    try:
        number = float(option)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(f"allocation.budget={label}: {option!r} is not a number")
    return BUDGETS[name].with_option(number)


def _top(scores: Tensor, count: int) -> Tensor:
    """Mask of the ``count`` highest scores along the last dimension; ties go to the earlier place."""
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    mask = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    return mask.scatter_(-1, order[..., :count], True)
