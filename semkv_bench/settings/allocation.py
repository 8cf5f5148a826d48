"""Which token gets which levels: the same for all, two levels by importance, or pruning."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from semkv_bench.checks import number
from semkv_bench.errors import UsageError
from semkv_bench.grid.levels import DELETED, FULL_PRECISION, Storage, check_levels, mix
from semkv_bench.importance.choice import metric

if TYPE_CHECKING:  # what storage costs can be told without torch
    from torch import Tensor

    from semkv_bench.quantizers import Quantizer

SHARED, PER_LAYER = "shared", "layer"
KEPT, GONE = 1, 0
"""What stands for a token's levels where it is kept in 16 bits, and where it is deleted."""

__all__ = ["GONE", "KEPT", "PER_LAYER", "SHARED", "Allocation", "Prune", "TwoLevel", "Uniform", "top_tokens"]


def top_tokens(importance: Tensor, fraction: float) -> Tensor:
    """Mask of the ``round(fraction * n)`` most important tokens; ties go to the earlier position.

    importance [..., n], result bool [..., n].
    """
    import torch

    n = importance.shape[-1]
    count = round(fraction * n)
    order = torch.sort(importance, dim=-1, descending=True, stable=True).indices
    mask = torch.zeros(importance.shape, dtype=torch.bool, device=importance.device)
    return mask.scatter_(-1, order[..., :count], True)


class Allocation(ABC):
    """How the tokens of one prompt share the levels; subclasses are frozen dataclasses."""

    kind: ClassVar[str]
    metric: str | None = None
    scope: str = SHARED

    @property
    def metrics(self) -> set[str]:
        """Labels of the metrics that rank tokens."""
        return set() if self.metric is None else {self.metric}

    @property
    def grid_point(self) -> int | None:
        """The level count that the grid names it by."""
        return None

    @property
    @abstractmethod
    def label(self) -> str:
        """Short name that follows the quantizer's in a setting's name."""

    @abstractmethod
    def levels(self, tokens: int, importance: Tensor | None = None) -> Tensor:
        """Levels int64 [tokens], or [1] where all tokens have the same; importance [tokens].

        At least 2 where a token is coded, else ``KEPT`` or ``GONE``.
        """

    @abstractmethod
    def parts(self, tokens: int) -> list[tuple[int, int]]:
        """(levels, how many) of ``tokens`` tokens that are coded together."""

    @abstractmethod
    def storage(self, quantizer: Quantizer, head_dim: int, heads: int = 1) -> Storage:
        """Average cost of a coded value, where ``heads`` share metadata."""


@dataclass(frozen=True)
class Uniform(Allocation):
    """Every token at the same levels."""

    kind: ClassVar[str] = "uniform"
    count: int

    def __post_init__(self) -> None:
        check_levels([self.count])

    @property
    def grid_point(self) -> int:
        """See ``Allocation``."""
        return self.count

    @property
    def label(self) -> str:
        """``L5``."""
        return f"L{self.count}"

    def levels(self, tokens: int, importance: Tensor | None = None) -> Tensor:
        """See ``Allocation``."""
        import torch

        return torch.tensor([self.count])

    def parts(self, tokens: int) -> list[tuple[int, int]]:
        """See ``Allocation``."""
        return [(self.count, tokens)]

    def storage(self, quantizer: Quantizer, head_dim: int, heads: int = 1) -> Storage:
        """See ``Allocation``."""
        return quantizer.storage(self.count, head_dim, heads)


@dataclass(frozen=True)
class TwoLevel(Allocation):
    """The ``fraction`` most important tokens at ``high`` levels, the rest at ``low``; no token is dropped.

    scope: ``shared`` ranks a token once for all layers, ``layer`` ranks tokens in every layer anew.
    """

    kind: ClassVar[str] = "mixed"
    high: int
    low: int
    fraction: float
    metric: str = "key_norm"
    scope: str = SHARED

    def __post_init__(self) -> None:
        check_levels([self.high, self.low])
        _check_metric(self.metric, self.scope)
        if self.low >= self.high:
            raise UsageError(f"allocation.low={self.low} must be below allocation.high={self.high}")
        number("allocation.fraction", self.fraction, 0, 1)

    @property
    def grid_point(self) -> int:
        """See ``Allocation``: the levels of most tokens."""
        return self.low

    @property
    def label(self) -> str:
        """``L6/5@0.25:key_norm``."""
        return f"L{self.high}/{self.low}@{self.fraction:g}:{_by(self.metric, self.scope)}"

    def levels(self, tokens: int, importance: Tensor | None = None) -> Tensor:
        """See ``Allocation``."""
        import torch

        if importance is None or importance.shape[-1] != tokens:
            raise ValueError(f"a two-level allocation needs the importance of {tokens} tokens")
        return torch.where(top_tokens(importance, self.fraction), self.high, self.low)

    def parts(self, tokens: int) -> list[tuple[int, int]]:
        """See ``Allocation``."""
        high = round(self.fraction * tokens)
        return [(self.high, high), (self.low, tokens - high)]

    def storage(self, quantizer: Quantizer, head_dim: int, heads: int = 1) -> Storage:
        """See ``Allocation``."""
        high, low = (quantizer.storage(levels, head_dim, heads) for levels in (self.high, self.low))
        return mix([(self.fraction, high), (1 - self.fraction, low)])


@dataclass(frozen=True)
class Prune(Allocation):
    """The ``keep`` most important tokens stay in 16 bits, at their positions; all others are deleted."""

    kind: ClassVar[str] = "prune"
    keep: float
    metric: str = "key_norm"
    scope: str = SHARED

    def __post_init__(self) -> None:
        _check_metric(self.metric, self.scope)
        number("allocation.keep", self.keep, 0, 1)
        if not self.keep:
            raise UsageError("allocation.keep=0 deletes the whole cache; keep a share above 0")

    @property
    def label(self) -> str:
        """``0.25:key_norm`` behind ``prune@``."""
        return f"{self.keep:g}:{_by(self.metric, self.scope)}"

    per_head: ClassVar[bool] = False
    uneven: ClassVar[bool] = False
    renumbered: ClassVar[bool] = False

    def kept(self, tokens: int) -> int:
        """How many of ``tokens`` tokens stay: one at least."""
        return max(1, round(self.keep * tokens))

    def levels(self, tokens: int, importance: Tensor | None = None) -> Tensor:
        """See ``Allocation``; nothing is coded."""
        import torch

        if importance is None or importance.shape[-1] != tokens:
            raise ValueError(f"pruning needs the importance of {tokens} tokens")
        return torch.where(top_tokens(importance, self.kept(tokens) / tokens), KEPT, GONE)

    def parts(self, tokens: int) -> list[tuple[int, int]]:
        """Nothing is coded."""
        return []

    def storage(self, coded: Storage | None = None, head_dim: int = 0, heads: int = 1) -> Storage:
        """Cost per value of the unpruned cache where what stays costs ``coded``, None for 16 bits.

        At keep=0.25 and 16 bits, 4 bits.
        """
        stays = FULL_PRECISION if coded is None else coded
        return mix([(self.keep, stays), (1 - self.keep, DELETED)])


def _by(metric_label: str, scope: str) -> str:
    return metric_label if scope == SHARED else f"{metric_label}:{scope}"


def _check_metric(label: str, scope: str) -> None:
    metric(label)
    if scope not in (SHARED, PER_LAYER):
        raise UsageError(f"allocation.scope={scope} must be {SHARED} or {PER_LAYER}")
