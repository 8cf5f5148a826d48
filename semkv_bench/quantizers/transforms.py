"""Invertible steps before a code: rotations, scaling, other coordinates.

A step is a frozen dataclass whose ``apply`` takes float32 [units, heads, tokens, channels] and returns the changed
values and what must be kept to ``undo`` it, which is priced by ``bits``. A unit is what is coded together. To add one:
write the class, name it by ``_target_`` in a method's ``transform``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from semkv_bench.checks import choice, whole
from semkv_bench.errors import UsageError
from semkv_bench.kernels.numerics import to_float16
from semkv_bench.lazy import scipy, torch
from semkv_bench.quantizers.parts import Part

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["Balance", "Hadamard", "Normalise", "Polar", "Shift", "Smooth", "Step", "UnitNorm"]

Kept = tuple["Tensor", ...]


class Step(Part, ABC):
    """One invertible step; those that a model's calibration decides are in calibrated.py."""

    per_token: ClassVar[bool] = True  # is a token's result its own affair?
    tiled: ClassVar[bool] = False  # does it work on tiles of the method's block, and not on whole pieces?
    keeps: ClassVar[int] = 0  # how many tensors are kept to undo it
    positional: ClassVar[bool] = False  # does it hang on where in the sequence a token is?
    predicts: ClassVar[bool] = False  # does it hang on what the cache gives back of the layer below?

    @property
    def unpackable(self) -> str | None:
        """Why a packed cache cannot keep what undoes it; None: it can."""
        return None

    @abstractmethod
    def apply(self, y: Tensor, prompt: Tensor | None = None) -> tuple[Tensor, Kept]:
        """Changed values, and what is stored to undo it: float16 [units, heads or 1, tokens or 1, ...].

        prompt: float32 [heads, tokens, channels] of the whole prompt, if known.
        """

    @abstractmethod
    def undo(self, values: Tensor, kept: Kept) -> Tensor:
        """The way back, of values float32 [units, heads, tokens, channels]."""

    def placed(self, start: int) -> Self:
        """The step for a stretch of tokens that begins at position ``start``."""
        return self

    def beside(self, below: Sequence[Tensor]) -> Self:
        """The step for a stretch of tokens of one row; ``below`` as of ``Coder.beside``."""
        return self

    def check(self, head_dim: int) -> None:
        """Raise UsageError if vectors of ``head_dim`` values cannot be changed so."""

    def check_heads(self, heads: int, head_dim: int) -> None:
        """Raise UsageError if the vectors of ``heads`` heads cannot be changed together."""

    def bits(self, head_dim: int, heads: int, tokens: int | None, tile: int) -> float:
        """Metadata bits per coded value; tokens: of the sequence (None: many), tile: of a tile."""
        return 0.0


LARGEST, ALL = "largest", "all"
_LEAST_LARGEST = 64


@dataclass(frozen=True)
class Hadamard(Step):
    """The normalised Sylvester matrix along head_dim, in blocks of ``size`` channels (None: the whole head).

    size: ``largest`` is the largest power of two that divides head_dim, at least 64 (llama.cpp's keys). signs: seed of
    random signs of the channels before it, drawn as vLLM does; None: no signs. normalised: false leaves the values
    sqrt(size) times as large for the code. heads: so many neighbouring heads are one vector (RotateKV's 4), or ``all``.
    """

    size: int | str | None = None
    signs: int | None = None
    normalised: bool = True
    heads: int | str = 1

    def __post_init__(self) -> None:
        if self.heads != ALL:
            whole("hadamard.heads", self.heads, 1)

    def check_heads(self, heads: int, head_dim: int) -> None:
        """See ``Step``."""
        if self.heads == ALL:
            self._check_width(head_dim * heads)
        elif heads % self.heads:
            legal = [n for n in range(1, heads + 1) if heads % n == 0 and n & (n - 1) == 0]
            raise UsageError(
                f"the Hadamard step joins {self.heads} heads, which do not divide this model's {heads} key-value "
                f"heads; legal are {', '.join(map(str, legal))}"
            )

    def check(self, head_dim: int) -> None:
        """See ``Step``."""
        if self.heads != ALL:
            self._check_width(head_dim * self.heads)

    def _check_width(self, head_dim: int) -> None:
        size = self._size(head_dim)
        if self.size == LARGEST and size < _LEAST_LARGEST:
            raise UsageError(
                f"the rotation is for head_dim that {_LEAST_LARGEST} divides, not {head_dim}; use the format without it"
            )
        if isinstance(size, str) or size & (size - 1) or head_dim % size:
            legal = [n for n in (16, 32, 64, 128, 256) if head_dim % n == 0]
            raise UsageError(
                f"a Hadamard step of size {size} does not fit head_dim {head_dim}; "
                f"legal sizes are {', '.join(map(str, legal)) or 'none'}"
            )

    def _size(self, head_dim: int) -> int:
        return head_dim & -head_dim if self.size == LARGEST else self.size or head_dim

    def apply(self, y: Tensor, prompt: Tensor | None = None) -> tuple[Tensor, Kept]:
        """See ``Step``."""
        heads, y = y.shape[1], self._joined(y)
        scale = math.sqrt(self._size(y.shape[-1])) if self.normalised else 1
        return self._parted(self._turned(y.double() * self._signs(y), scale).float(), heads), ()

    def undo(self, values: Tensor, kept: Kept) -> Tensor:
        """See ``Step``; the matrix is symmetric: but for its scale its own inverse."""
        heads, values = values.shape[1], self._joined(values)
        size = self._size(values.shape[-1])
        back = 1 if self.normalised else size
        turned = self._turned(values.double(), math.sqrt(size) if self.normalised else 1)
        return self._parted((turned * self._signs(values) / back).float(), heads)

    def _joined(self, y: Tensor) -> Tensor:
        """[units, heads, tokens, channels] with ``heads`` heads' channels one behind the other."""
        if self.heads == 1:
            return y
        return (
            y.unflatten(1, (-1, y.shape[1] if self.heads == ALL else self.heads)).transpose(2, 3).flatten(3)
        )

    def _parted(self, y: Tensor, heads: int) -> Tensor:
        """Inverse of ``_joined``, of ``heads`` heads in all."""
        if self.heads == 1:
            return y
        return y.unflatten(3, (heads // y.shape[1], -1)).transpose(2, 3).flatten(1, 2)

    def _turned(self, values: Tensor, scale: float) -> Tensor:
        # In float64: no code should hang on how a machine orders a sum.
        size = self._size(values.shape[-1])
        matrix = torch.from_numpy(scipy.linalg.hadamard(size) / scale).to(values.device)
        return (values.unflatten(-1, (-1, size)) @ matrix).flatten(-2)

    def _signs(self, values: Tensor) -> Tensor | int:
        return 1 if self.signs is None else _signs(values.shape[-1], self.signs).to(values.device)


def _signs(channels: int, seed: int) -> Tensor:
    """float64 [channels] of 1 and -1."""
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.bernoulli(torch.full((channels,), 0.5), generator=generator).double() - 1


@dataclass(frozen=True)
class Smooth(Step):
    """Channels divided by max|x| ** alpha, per head, over the tokens of the piece, of the prompt or of a calibration.

    tie_rope: channels c and c + head_dim/2 share the larger factor, so that it commutes with the rotary embedding
    (QServe). Factors of the prompt belong to the sequence and are kept in float16, those of a calibration to the model.
    """

    keeps: ClassVar[int] = 1
    alpha: float = 0.5
    source: str = "piece"
    tie_rope: bool = False

    def __post_init__(self) -> None:
        choice("smooth.source", self.source, ("piece", "prompt", "calibration"))

    @property
    def calibrated(self) -> bool:
        """See ``Part``."""
        return self.source == "calibration"

    @property
    def per_token(self) -> bool:
        """See ``Step``."""
        return self.calibrated

    def fit(self, y: Tensor, weights: Tensor | None) -> dict[str, Tensor]:
        """See ``Part``."""
        return {"factor": self._factor(y)} if self.calibrated else {}

    @property
    def unpackable(self) -> str | None:
        """See ``Step``."""
        return "it smooths by the whole prompt, which is simulated" if self.source == "prompt" else None

    def apply(self, y: Tensor, prompt: Tensor | None = None) -> tuple[Tensor, Kept]:
        """See ``Step``."""
        if self.source == "prompt" and prompt is None:
            raise UsageError("smoothing from the prompt needs the prompt's keys and values")
        if self.calibrated:
            factor = self.fitted("factor").to(y.device)
        else:
            factor = self._factor(y if self.source == "piece" else prompt[None])
        return y / factor.float(), (factor,)

    def _factor(self, x: Tensor) -> Tensor:
        """Float16 [units, heads, 1, channels] of x [units, heads, tokens, channels]."""
        largest = x.abs().amax(2, keepdim=True)
        if self.tie_rope:
            half = largest.unflatten(-1, (2, -1)).amax(-2, keepdim=True)
            largest = half.expand(*half.shape[:-2], 2, half.shape[-1]).flatten(-2)
        factor = to_float16(largest**self.alpha)
        return factor.masked_fill(factor == 0, 1)

    def undo(self, values: Tensor, kept: Kept) -> Tensor:
        """See ``Step``."""
        return values * kept[0].float()

    def bits(self, head_dim: int, heads: int, tokens: int | None, tile: int) -> float:
        """See ``Step``."""
        return 0.0 if tokens is None or self.calibrated else 16 / tokens


@dataclass(frozen=True)
class Shift(Step):
    """The mean of every channel over the piece is taken away, and kept in float16."""

    per_token: ClassVar[bool] = False
    tiled: ClassVar[bool] = True
    keeps: ClassVar[int] = 1

    def apply(self, y: Tensor, prompt: Tensor | None = None) -> tuple[Tensor, Kept]:
        """See ``Step``."""
        mean = to_float16(y.mean(2, keepdim=True))
        return y - mean.float(), (mean,)

    def undo(self, values: Tensor, kept: Kept) -> Tensor:
        """See ``Step``."""
        return values + kept[0].float()

    def bits(self, head_dim: int, heads: int, tokens: int | None, tile: int) -> float:
        """See ``Step``."""
        return 16 / tile


@dataclass(frozen=True)
class Normalise(Step):
    """Every vector scaled to a mean square of 1; the factor is kept in float16.

    heads: a vector is that of ``each`` head, or those of ``all`` heads of a token one behind the other (AQUA-KV).
    """

    keeps: ClassVar[int] = 1
    heads: str = "each"

    def __post_init__(self) -> None:
        choice("normalise.heads", self.heads, ("each", ALL))

    def apply(self, y: Tensor, prompt: Tensor | None = None) -> tuple[Tensor, Kept]:
        """See ``Step``."""
        over, members = ((1, 3), y.shape[1] * y.shape[3]) if self.heads == ALL else (-1, y.shape[3])
        size = torch.linalg.vector_norm(y, dim=over, keepdim=True) / math.sqrt(members)
        scale = to_float16(size)
        return y / scale.float().masked_fill(scale == 0, math.inf), (scale,)

    def undo(self, values: Tensor, kept: Kept) -> Tensor:
        """See ``Step``."""
        return values * kept[0].float()

    def bits(self, head_dim: int, heads: int, tokens: int | None, tile: int) -> float:
        """See ``Step``."""
        return 16 / (head_dim * heads if self.heads == ALL else head_dim)


@dataclass(frozen=True)
class UnitNorm(Step):
    """Every vector divided by its norm, which is rounded to float16 only to be stored (vLLM's TurboQuant)."""

    keeps: ClassVar[int] = 1

    def apply(self, y: Tensor, prompt: Tensor | None = None) -> tuple[Tensor, Kept]:
        """See ``Step``."""
        norm = torch.linalg.vector_norm(y, dim=-1, keepdim=True)
        return y / (norm + 1e-8), (to_float16(norm),)

    def undo(self, values: Tensor, kept: Kept) -> Tensor:
        """See ``Step``."""
        return values * kept[0].float()

    def bits(self, head_dim: int, heads: int, tokens: int | None, tile: int) -> float:
        """See ``Step``."""
        return 16 / head_dim


_LOG_RANGE = (-0.3, 10.0)


@dataclass(frozen=True)
class Balance(Step):
    """KVarN's variance normalisation of a tile, in log space: of the best of ``iterations`` rounds.

    rows: what the code's groups run along: ``channel`` for keys, ``token`` for values. A row's factor is folded into
    its group's scale and zero and costs nothing; a column's is kept in float16.
    """

    per_token: ClassVar[bool] = False
    tiled: ClassVar[bool] = True
    keeps: ClassVar[int] = 2
    iterations: int = 16
    rows: str = "channel"

    def __post_init__(self) -> None:
        choice("balance.rows", self.rows, ("channel", "token"))

    @property
    def unpackable(self) -> str | None:
        """See ``Step``."""
        return "factors that balance its variance are folded into its scales, which is simulated"

    def apply(self, y: Tensor, prompt: Tensor | None = None) -> tuple[Tensor, Kept]:
        """See ``Step``."""
        tile = y.transpose(2, 3) if self.rows == "channel" else y  # [units, heads, rows, columns]
        column, row = self._factors(tile)
        kept = (to_float16(column.exp()), row.exp())
        return y / self._factor(kept), kept

    def undo(self, values: Tensor, kept: Kept) -> Tensor:
        """See ``Step``."""
        return values * self._factor(kept)

    def _factor(self, kept: Kept) -> Tensor:
        column, row = kept
        factor = column.float() * row
        return factor.transpose(2, 3) if self.rows == "channel" else factor

    def _factors(self, tile: Tensor) -> tuple[Tensor, Tensor]:
        """Logarithms of the column and row factors, [units, heads, 1, columns] and [units, heads, rows, 1]."""
        column, row = torch.zeros_like(tile[..., :1, :]), torch.zeros_like(tile[..., :1])
        best, found = _imbalance(tile), (column, row)
        for _ in range(self.iterations):
            column = (column + _log_std(tile / (column + row).exp(), -2)).clamp(*_LOG_RANGE)
            row = (row + _log_std(tile / (column + row).exp(), -1)).clamp(*_LOG_RANGE)
            now = _imbalance(tile / (column + row).exp())
            better = now <= best
            best = torch.where(better, now, best)
            found = tuple(
                torch.where(better, new, old) for new, old in zip((column, row), found, strict=True)
            )
        return found

    def bits(self, head_dim: int, heads: int, tokens: int | None, tile: int) -> float:
        """See ``Step``."""
        return 16 / (head_dim if self.rows == "channel" else tile)


def _log_std(tile: Tensor, dim: int) -> Tensor:
    return tile.std(dim, keepdim=True).clamp(1e-3, 1e3).log()


def _imbalance(tile: Tensor) -> Tensor:
    spread = 0
    for dim in (-2, -1):
        std = tile.std(dim, keepdim=True)
        other = -1 if dim == -2 else -2
        spread = spread + std.amax(other, keepdim=True) / std.amin(other, keepdim=True).clamp(min=1e-8)
    return spread


@dataclass(frozen=True)
class Polar(Step):
    """Pairs of channels (c, c + head_dim/2) as radius and angle in [0, 2 pi), radii first (PolarQuant)."""

    def check(self, head_dim: int) -> None:
        """See ``Step``."""
        if head_dim % 2:
            raise UsageError(f"polar coordinates pair channels; head_dim {head_dim} is odd")

    def apply(self, y: Tensor, prompt: Tensor | None = None) -> tuple[Tensor, Kept]:
        """See ``Step``."""
        first, second = y.chunk(2, dim=-1)
        angle = torch.atan2(second, first)
        angle = torch.where(angle < 0, angle + 2 * math.pi, angle)
        return torch.cat([torch.hypot(first, second), angle], dim=-1), ()

    def undo(self, values: Tensor, kept: Kept) -> Tensor:
        """See ``Step``."""
        radius, turn = values.chunk(2, dim=-1)
        return torch.cat([radius * turn.cos(), radius * turn.sin()], dim=-1)
