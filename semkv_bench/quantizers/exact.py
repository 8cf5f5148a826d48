"""What a method keeps beside its codes: outliers, tokens and channels that are coded better, a low-rank residual."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from semkv_bench.checks import choice, number, whole
from semkv_bench.errors import UsageError
from semkv_bench.grid.levels import MAX_LEVELS, packing_plan
from semkv_bench.kernels.numerics import to_float16
from semkv_bench.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["Budget", "Channels", "LowRank", "Mix", "Outliers", "Pivots"]

Coding = Callable[["Tensor", int], "Tensor"]


@dataclass(frozen=True)
class Outliers:
    """The ``share`` of extreme values of a vector, half of it at either end, in 16 bits (GEAR, QAQ, KVQuant).

    over: what a vector is: ``channel``, one channel over the tokens of the piece; ``token``, all heads of one token;
    ``head``, one head of one token. ``thresholds``: values of a token beyond -1..1, to which a step before has scaled
    them, the farthest first and at most ``share`` of all heads' values, one at least. While the rest is coded their
    places are filled with the vector's mean, or by ``fill``: its median, the end that they are beyond. Each costs a
    float16 and a 16-bit index.
    """

    share: float = 0.02
    over: str = "channel"
    fill: str = "mean"

    def __post_init__(self) -> None:
        number("outliers.share", self.share, 0, 1, ends=False)
        for name, known in (
            ("over", ("channel", "token", "head", "thresholds")),
            ("fill", ("mean", "median", "end")),
        ):
            choice(f"outliers.{name}", getattr(self, name), known)

    def lines(self, y: Tensor) -> Tensor:
        """y [units, heads, tokens, channels] with a vector on the last axis; a view or a copy."""
        if self.over == "channel":
            return y.transpose(2, 3)
        return y if self.over == "head" else y.transpose(1, 2).flatten(2)

    def back(self, lines: Tensor, heads: int) -> Tensor:
        """Inverse of ``lines``."""
        if self.over == "channel":
            return lines.transpose(2, 3)
        return lines if self.over == "head" else lines.unflatten(-1, (heads, -1)).transpose(1, 2)

    def take(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """y with its outliers replaced, and a mask of them."""
        lines = self.lines(y)
        mask = self._beyond(lines) if self.over == "thresholds" else self._extreme(lines)
        filled = torch.where(mask, self._filling(lines), lines)
        return self.back(filled, y.shape[1]), self.back(mask, y.shape[1])

    def _extreme(self, lines: Tensor) -> Tensor:
        count = self._count(lines.shape[-1]) // 2
        order = lines.argsort(dim=-1, stable=True)
        places = torch.cat([order[..., :count], order[..., lines.shape[-1] - count :]], dim=-1)
        return torch.zeros_like(lines, dtype=torch.bool).scatter_(-1, places, True)

    def _beyond(self, lines: Tensor) -> Tensor:
        size = lines.abs()
        farthest = size.argsort(dim=-1, descending=True, stable=True)[..., : self._count(lines.shape[-1])]
        return torch.zeros_like(lines, dtype=torch.bool).scatter_(-1, farthest, True) & (size > 1)

    def _filling(self, lines: Tensor) -> Tensor:
        if self.fill == "end":
            return lines.sign()
        return (
            lines.median(-1, keepdim=True).values if self.fill == "median" else lines.mean(-1, keepdim=True)
        )

    def _count(self, size: int) -> int:
        """Outliers of a vector of ``size`` values at most."""
        return (
            max(1, round(self.share * size))
            if self.over == "thresholds"
            else 2 * round(self.share / 2 * size)
        )

    def bits(self, head_dim: int, heads: int) -> float:
        """Bits per coded value; of a token, where its values are few, those of the whole numbers of outliers."""
        if self.over == "channel":
            return 32 * self.share
        size = head_dim if self.over == "head" else head_dim * heads
        return 32 * max(self.share, self._count(size) / size)


@dataclass(frozen=True)
class Channels:
    """The ``share`` of channels of largest mean magnitude, per head and unit, at ``levels`` levels (Kitty)."""

    share: float = 0.1
    levels: int = 16

    def __post_init__(self) -> None:
        number("channels.share", self.share, 0, 1, ends=False)

    def count(self, head_dim: int) -> int:
        """How many channels."""
        return int(self.share * head_dim)

    def mask(self, y: Tensor) -> Tensor:
        """The channels of y [units, heads, tokens, channels], bool [units, heads, 1, channels]; ties to the lower."""
        size = y.abs().mean(2, keepdim=True)
        order = size.argsort(dim=-1, descending=True, stable=True)[..., : self.count(y.shape[-1])]
        return torch.zeros_like(size, dtype=torch.bool).scatter_(-1, order, True)


@dataclass(frozen=True)
class Pivots:
    """Tokens that stay in 16 bits because of what they are.

    by: ``key_l1``, the ``per_group`` tokens of smallest L1 norm of each unit, left out of the ranges of their group
    (OTT; of the method's pool only the tokens of the side itself are kept). ``hidden_max``, tokens of the prompt that
    hold the ``entries`` largest entries of the layer's hidden states (RotateKV); as many tokens are priced, which is
    the most that there can be.
    """

    per_group: int = 1
    by: str = "key_l1"
    entries: int = 20

    def __post_init__(self) -> None:
        choice("pivots.by", self.by, ("key_l1", "hidden_max"))
        for name in ("per_group", "entries"):
            whole(f"pivots.{name}", getattr(self, name), 1)

    @property
    def metric(self) -> str | None:
        """The importance metric whose scores above 0 mark the pivots of a prompt; None: keys tell."""
        return None if self.by == "key_l1" else f"{self.by}-{self.entries}"

    def mask(self, y: Tensor) -> Tensor:
        """The pivots of y [units, heads, tokens, channels] by their keys, bool [units, heads, tokens, 1]."""
        size = y.abs().sum(-1, keepdim=True)
        order = size.argsort(dim=2, stable=True)[:, :, : self.per_group]
        return torch.zeros_like(size, dtype=torch.bool).scatter_(2, order, True)


@dataclass(frozen=True)
class LowRank:
    """A low-rank term of what coding misses, per head and piece, factors in float16 (GEAR).

    rank: of a piece longer than the method's block, ``tail_rank`` of others; found by ``iterations`` rounds of power
    iteration from a seeded start.
    """

    rank: int = 4
    tail_rank: int = 2
    iterations: int = 3

    def of(self, tokens: int, block: int) -> int:
        """The rank of a piece of ``tokens`` tokens."""
        return self.rank if tokens > block else self.tail_rank

    def term(self, missed: Tensor, rank: int) -> Tensor:
        """The term for ``missed`` [units, heads, tokens, channels]."""
        generator = torch.Generator().manual_seed(missed.shape[-1])
        right = torch.rand(missed.shape[-1], rank, generator=generator).to(missed)
        right = right.expand(*missed.shape[:2], -1, -1)
        for _ in range(self.iterations):
            left = torch.linalg.qr(missed @ right).Q
            right = missed.transpose(2, 3) @ left
        return to_float16(left).float() @ to_float16(right).float().transpose(2, 3)

    def bits(self, tokens: int, head_dim: int, block: int) -> float:
        """Bits per coded value of a piece of ``tokens`` tokens."""
        return 16 * self.of(tokens, block) * (1 / head_dim + 1 / tokens) if tokens else 0.0


@dataclass(frozen=True)
class Mix:
    """A method's own allocation: the ``fraction`` of tokens that ``metric`` ranks first has ``high`` levels.

    A grid point then is the level count of the others, where it is below ``high``; else all tokens have it.
    """

    high: int = 16
    fraction: float = 0.6
    metric: str = "attention_window"
    scope: str = "layer"


_COUNT_BITS, _HALVINGS = 8, 40


@dataclass(frozen=True)
class Budget:
    """A level count for every vector, by the error that it may have (QAQ).

    A vector of range r that may be off by e has ceil(r / (2 e) + 1) levels, from ``floor`` to ``ceiling``. Keys may all
    be off by as much. Values may be off by as much as the inverse of the attention that their token has from the last
    ``window`` tokens of the prompt; the last window - 1 tokens, which too few have seen, have most levels. A grid point
    is the budget: e is the least for which the vectors of a stretch take no more bits on average than codes of that
    many levels, so that what a setting costs is known before. Each vector's level count takes 8 bits.
    """

    floor: int = 2
    ceiling: int = MAX_LEVELS
    window: int = 5

    def __post_init__(self) -> None:
        whole("budget.floor", self.floor, 2, MAX_LEVELS)
        whole("budget.ceiling", self.ceiling, self.floor, MAX_LEVELS)
        whole("budget.window", self.window, 1)

    @property
    def metric(self) -> str:
        """The importance metric that tells the attention which tokens have from the last ones."""
        return f"attention_window-{self.window}"

    def check_levels(self, levels: int) -> None:
        """Raise UsageError where no vectors can have ``levels`` levels on average."""
        if not self.floor <= levels <= self.ceiling:
            raise UsageError(
                f"a budget of {levels} levels is not within budget.floor={self.floor} and "
                f"budget.ceiling={self.ceiling}"
            )

    def levels(self, y: Tensor, budget: int, attention: Tensor | None) -> Tensor:
        """Levels int64 [units, heads, tokens, 1] of the vectors y [units, heads, tokens, channels].

        attention: of the tokens, float32 [tokens], for values of a prompt; None: all may be off by as much.
        """
        span = y.amax(-1, keepdim=True) - y.amin(-1, keepdim=True)
        first = torch.zeros_like(span, dtype=torch.bool)
        if attention is not None:
            span = span * attention.to(span).view(-1, 1)
            first[:, :, max(0, y.shape[2] - self.window + 1) :] = True
        price = _packed().to(span.device)
        allowed = packing_plan(budget).packed_bits * span.numel() * (1 + 1e-9)

        def counts(log_error: float) -> Tensor:
            told = (span.double() / (2 * math.exp(log_error)) + 1).ceil().clamp(self.floor, self.ceiling)
            return torch.where(first, self.ceiling, told.long())

        if not bool((span > 0).any()):
            return torch.full_like(span, budget, dtype=torch.int64)
        if float(price[counts(math.inf)].sum()) > allowed:
            first[:] = False  # too short for that many at the most levels
        low, high = (math.log(float(part)) for part in (span[span > 0].min() / 1e3, span.max()))
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if float(price[counts(middle)].sum()) <= allowed else (middle, high)
        return counts(high)

    def bits(self, head_dim: int) -> float:
        """Bits per coded value."""
        return _COUNT_BITS / head_dim


@cache
def _packed() -> Tensor:
    """Packed bits of a code by its number of levels, float64 [MAX_LEVELS + 1]; what has none is never asked for."""
    return torch.tensor([0.0, 0.0, *(packing_plan(n).packed_bits for n in range(2, MAX_LEVELS + 1))]).double()
