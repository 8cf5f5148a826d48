"""What a group of values becomes: the code of a method.

A ``ValueCode`` is a frozen dataclass with ``encode(grouped, levels)``, from float32 [..., groups, members] to a code
for each value and what is stored with each group, ``decode``, the way back, and ``metadata_bits``, per group. A plain
``Code`` is only simulated: it has ``quantize_dequantize`` instead, and cannot be packed. To add one: write the class,
name it by ``_target_``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from semkv_bench.checks import choice
from semkv_bench.errors import UsageError
from semkv_bench.grid.levels import code_bits, packing_plan
from semkv_bench.kernels.numerics import to_float16
from semkv_bench.lazy import torch
from semkv_bench.quantizers.parts import Part

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["Code", "PolarCode", "Uniform", "ValueCode", "VectorCode"]


class Code(Part, ABC):
    """How the values of a group are coded."""

    @abstractmethod
    def quantize_dequantize(self, grouped: Tensor, levels: int) -> Tensor:
        """What is read back of float32 [..., members], each last axis one group."""

    @property
    @abstractmethod
    def metadata_bits(self) -> float:
        """Bits stored with each group."""

    @property
    def fixed_levels(self) -> int | None:
        """The one level count of a format that has no grid; None: any."""
        return None

    @property
    def packs(self) -> bool:
        """Does it give codes that a cache can store, by ``encode`` and ``decode``?"""
        return False

    @property
    def unpackable(self) -> str:
        """Why it does not, in a few words."""
        return f"{type(self).__name__} is simulated and gives no codes to store"

    @property
    def attended_element(self) -> str | None:
        """The ``element`` of ``PackedVectors`` that its codes are, where kernels attend to them; None: they do not."""
        return None

    @property
    def attended_whole(self) -> float:
        """What kernels multiply all values by, beside their scales."""
        return 1.0

    def attended_scale(self, scale: Tensor) -> Tensor:
        """The ``scale`` of ``PackedVectors`` of the one that is stored."""
        return scale

    @property
    def weighted(self) -> bool:
        """Does its calibration weigh values by the loss's gradient?"""
        return getattr(self, "weights", None) == "fisher"

    @property
    def sequence_bits(self) -> float:
        """Bits that one side of one layer keeps once a sequence."""
        return 0

    def of_prompt(self, prompt: Tensor) -> Code:
        """The code with what the prompt, float32 [heads, tokens, channels], decides; nothing, for most."""
        return self

    def check_levels(self, levels: int) -> None:
        """Raise UsageError if there is no such code with ``levels`` levels."""

    def check_members(self, members: float) -> None:
        """Raise UsageError if groups of so many values cannot be coded."""

    def bits(self, levels: int) -> tuple[float, float]:
        """Entropy of a code, and its packed bits, per value."""
        return code_bits(levels), packing_plan(levels).packed_bits


class ValueCode(Code):
    """A code for each value and 16-bit metadata with each group, which can be packed."""

    @property
    def packs(self) -> bool:
        """See ``Code``."""
        return True

    @abstractmethod
    def encode(self, grouped: Tensor, levels: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Whole codes 0..levels-1, float32 [..., members], each last axis one group, and 16-bit metadata [..., 1]."""

    @abstractmethod
    def decode(self, codes: Tensor, stored: tuple[Tensor, ...], levels: int | Tensor) -> Tensor:
        """Values float32 [..., members]; levels: of all, or of every group, [..., 1]."""

    def quantize_dequantize(self, grouped: Tensor, levels: int) -> Tensor:
        """See ``Code``."""
        return self.decode(*self.encode(grouped, levels), levels)


_INT16, _E4M3_MAX, _FLOAT16_MAX = 32767, 448.0, 65504.0
_ZEROS, _MOMENTS, _HALVES = ("float", "int", "mean"), ("before", "after"), ("even", "up")


@dataclass(frozen=True)
class Uniform(ValueCode):
    """Evenly spaced levels between a group's minimum and maximum, as KIVI, QuaRot, Atom, QServe and others have them.

    zero: ``float``: x' = code * scale + min. ``int``: x' = scale * (code - z) with a whole z. ``mean`` (QAQ): signed
    codes around the group's mean, steps of range/L. clip: share of the range that is covered. cover_zero: the range
    holds 0. eps: least scale; None: a constant group is exact. round_scale: metadata are rounded to float16 ``before``
    coding (KIVI, optimum-quanto) or ``after`` it (KVarN). half: where a code between two goes, to the ``even`` one or
    ``up``. metadata: what scale and zero are stored as, ``float16`` or ``e4m3`` (SKVQ), whose least value is
    2 ** -9. arithmetic: all in ``float32``, or every operation rounded to ``float16``, as in KIVI's and quanto's code.
    """

    zero: str = "float"
    clip: float = 1.0
    cover_zero: bool = False
    eps: float | None = None
    round_scale: str = "before"
    half: str = "even"
    metadata: str = "float16"
    arithmetic: str = "float32"

    def __post_init__(self) -> None:
        known_values = {
            "zero": _ZEROS,
            "round_scale": _MOMENTS,
            "half": _HALVES,
            "metadata": ("float16", "e4m3"),
            "arithmetic": ("float32", "float16"),
        }
        for name, known in known_values.items():
            choice(f"code.{name}", getattr(self, name), known)
        if not 0 < self.clip <= 1:
            raise UsageError(f"code.clip={self.clip} must be above 0 and at most 1")
        if self.arithmetic == "float16" and (self.zero, self.metadata, self.clip) != ("float", "float16", 1):
            raise UsageError("code.arithmetic=float16 is for zero=float, metadata=float16 and clip=1")

    @property
    def metadata_bits(self) -> float:
        """See ``Code``."""
        return 16 if self.metadata == "e4m3" else 32

    def _stored(self, x: Tensor) -> Tensor:
        """x as it is stored; what e4m3 holds, float16 holds too."""
        if self.metadata == "float16":
            return to_float16(x)
        return x.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).to(torch.float16)

    def encode(self, grouped: Tensor, levels: int | Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See ``Code``: with each group its scale and its zero, mean or whole zero point."""
        if self.arithmetic == "float16":
            return _in_half(grouped, levels)
        low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
        if self.zero == "mean":
            codes, scale, offset = self._around_mean(grouped, high - low, levels)
        else:
            codes, scale, offset = self._ranged(grouped, low * self.clip, high * self.clip, levels)
        # A constant group is its own offset, or of a whole zero point -1 its own scale.
        constant, exact = low == high, self._stored(low)
        scale = torch.where(constant, exact if self.zero == "int" else 0, scale)
        offset = torch.where(constant, -1 if self.zero == "int" else exact, offset)
        return codes.masked_fill(constant, 0), (scale, offset)

    def decode(self, codes: Tensor, stored: tuple[Tensor, ...], levels: int | Tensor) -> Tensor:
        """See ``Code``."""
        if self.arithmetic == "float16":
            scale, low = stored
            return (codes.half() * scale + low).float().clamp(-_FLOAT16_MAX, _FLOAT16_MAX)
        scale, offset = (part.float() for part in stored)
        if self.zero == "int":
            return scale * (codes - offset)
        if self.zero == "mean":
            # Signed codes; those of a constant group are none.
            return (codes - levels // 2) * scale + offset
        return codes * scale + offset

    def _ranged(self, x: Tensor, low: Tensor, high: Tensor, levels: int) -> tuple[Tensor, Tensor, Tensor]:
        if self.cover_zero:
            low, high = low.clamp(max=0), high.clamp(min=0)
        top = levels - 1
        exact = (high - low) / top
        if self.eps is not None:
            exact = exact.clamp(min=self.eps)
        scale, zero = self._stored(exact), self._stored(low)
        step, start = (scale.float(), zero.float()) if self.round_scale == "before" else (exact, low)
        divisor = step.masked_fill(step == 0, math.inf)
        if self.zero == "int":
            whole = (-low / divisor).round().clamp(-_INT16, _INT16)
            codes = ((x / divisor).round() + whole).clamp(0, top)
            return codes, scale, whole.to(torch.int16)
        places = (x - start) / divisor
        codes = places.clamp(0, top).round() if self.half == "even" else (places + 0.5).floor().clamp(0, top)
        return codes, scale, zero

    def _around_mean(self, x: Tensor, span: Tensor, levels: int | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        middle, step = self._stored(x.mean(-1, keepdim=True)), self._stored(span / levels)
        lowest = -(levels // 2)
        divisor = step.float().masked_fill(step == 0, math.inf)
        codes = ((x - middle.float()) / divisor).round() - lowest
        return codes.clamp(min=0).clamp(max=levels - 1), step, middle


def _in_half(x: Tensor, levels: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Codes, step and minimum as models in float16 compute them, every operation rounded."""
    x = to_float16(x)
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale = ((high - low) / (levels - 1)).clamp(max=_FLOAT16_MAX)
    codes = ((x - low) / scale.masked_fill(scale == 0, math.inf)).clamp(0, levels - 1).round()
    return codes.float(), (scale, low)


@dataclass(frozen=True)
class PolarCode(ValueCode):
    """Cells of equal width, read at their middle (PolarQuant): radius and angle have ranges of their own."""

    metadata_bits: float = 32

    def encode(self, grouped: Tensor, levels: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See ``Code``: with each group its step and its least value."""
        low, high = to_float16(grouped.amin(-1, keepdim=True)), grouped.amax(-1, keepdim=True)
        step = to_float16((high - low.float()) / levels)
        divisor = step.float().masked_fill(step == 0, math.inf)
        return ((grouped - low.float()) / divisor).floor().clamp(0, levels - 1), (step, low)

    def decode(self, codes: Tensor, stored: tuple[Tensor, ...], levels: int | Tensor) -> Tensor:
        """See ``Code``."""
        step, low = (part.float() for part in stored)
        return low + (codes + 0.5 * (step > 0)) * step


@dataclass(frozen=True)
class VectorCode(Code):
    """``dim`` neighbouring values of unit variance by the nearest of a fixed set of points (NSNQuant).

    The points are a k-means of normal samples, so they are those of the paper in spirit only. With L levels
    there are L**dim of them for ``dim`` values; above two levels ``signs`` are coded apart, unless that is false, and
    (L/2)**dim points are magnitudes. Nothing is stored with a group.
    """

    dim: int = 8
    most: int = 4
    signs: bool = True
    metadata_bits: float = 0

    def check_levels(self, levels: int) -> None:
        """See ``Code``."""
        if levels > self.most:
            raise UsageError(
                f"a vector code of {self.dim} values has at most {self.most} levels, not {levels}: "
                f"grid.levels=[{','.join(map(str, range(self.most, 1, -1)))}]"
            )

    def check_members(self, members: float) -> None:
        """See ``Code``."""
        if members % self.dim:
            raise UsageError(f"code.dim={self.dim} does not divide the {members:g} channels of a group")

    def bits(self, levels: int) -> tuple[float, float]:
        """See ``Code``."""
        points, signs = self._points(levels)
        exact = math.log2(points) / self.dim + signs
        return exact, math.ceil(math.log2(points)) / self.dim + signs

    def quantize_dequantize(self, grouped: Tensor, levels: int) -> Tensor:
        """See ``Code``."""
        points, signs = self._points(levels)
        book = (
            _pairs(points) if self.dim == 2 and not signs else _normal_points(points, self.dim, bool(signs))
        )
        book = book.to(grouped.device)
        vectors = grouped.reshape(-1, self.dim)
        target = vectors.abs() if signs else vectors
        found = torch.empty_like(vectors)
        for part, out in zip(target.split(4096), found.split(4096), strict=True):
            out.copy_(book[torch.cdist(part, book).argmin(-1)])
        found = torch.where(vectors < 0, -found, found) if signs else found
        return found.view(grouped.shape)

    def _points(self, levels: int) -> tuple[int, int]:
        signs = self.signs and levels > 2
        return round((levels / 2 if signs else levels) ** self.dim), int(signs)


_QUANTILES, _ROUNDS = 181, 25


@lru_cache(maxsize=16)
def _pairs(points: int) -> Tensor:
    """float32 [points, 2]: k-means of pairs of normal values, from a start whose points lie as dense as the best do.

    The best points of a plane have the density of a normal distribution of twice the variance; a spiral in equal steps
    of that distribution has it. The pairs are all of so many quantiles with each other, so that nothing is drawn.
    """
    place = (torch.arange(points).double() + 0.5) / points
    radius, angle = (
        (-4 * torch.log1p(-place)).sqrt(),
        torch.arange(points).double() * math.pi * (3 - math.sqrt(5)),
    )
    book = torch.stack([radius * angle.cos(), radius * angle.sin()], 1).float()
    line = torch.special.ndtri((torch.arange(_QUANTILES).double() + 0.5) / _QUANTILES).float()
    return _moved_to_means(book, torch.cartesian_prod(line, line), _ROUNDS)


def _moved_to_means(book: Tensor, samples: Tensor, rounds: int) -> Tensor:
    """Lloyd's iteration: every point of ``book`` where the samples that it is nearest to have their mean."""
    for _ in range(rounds):
        nearest = torch.cat([torch.cdist(part, book).argmin(-1) for part in samples.split(4096)])
        count = torch.bincount(nearest, minlength=len(book))
        sums = torch.zeros_like(book).index_add_(0, nearest, samples)
        book = torch.where((count > 0)[:, None], sums / count.clamp(min=1)[:, None], book)
    return book


@lru_cache(maxsize=16)
def _normal_points(points: int, dim: int, magnitudes: bool) -> Tensor:
    """float32 [points, dim]: k-means of seeded normal samples, or of their magnitudes."""
    generator = torch.Generator().manual_seed(points * 1000 + dim)
    samples = torch.randn(max(64 * points, 4096), dim, generator=generator)
    samples = samples.abs() if magnitudes else samples
    return _moved_to_means(samples[:points].clone(), samples, 15)
