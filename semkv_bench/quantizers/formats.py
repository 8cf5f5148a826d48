"""The codes of serving engines, each computed as its engine does: llama.cpp's blocks, small floats, MLX's, vLLM's.

All arithmetic is float32, in the order of the source, so that what is read back is the engine's to the bit. Where an
engine would give infinity (metadata beyond float16, values beyond a float's largest) these saturate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from semkv_bench.checks import choice, is_number
from semkv_bench.errors import UsageError
from semkv_bench.kernels.numerics import to_float16
from semkv_bench.kernels.packed import E2M1, e2m1_table
from semkv_bench.lazy import torch
from semkv_bench.quantizers.codebook import lloyd_max, trapezoid_lloyd_max
from semkv_bench.quantizers.codes import Code, ValueCode

if TYPE_CHECKING:
    from torch import Tensor


__all__ = [
    "Absmax",
    "Anchored",
    "Float",
    "GgmlAsymmetric",
    "GgmlSymmetric",
    "HiddenZero",
    "Iq4Nl",
    "LloydMax",
]


def _inverse(step: Tensor) -> Tensor:
    """1 / step; 0 where that is no finite number."""
    found = 1 / step
    return torch.where(torch.isfinite(found), found, 0)


def _half_away(x: Tensor) -> Tensor:
    """Rounded to whole numbers, halves away from zero."""
    size = x.abs()
    low = size.floor()
    return x.sign() * (low + (2 * (size - low)).floor())


def _largest(grouped: Tensor) -> Tensor:
    """The value of largest magnitude of each group, with its sign; the first of several."""
    return grouped.gather(-1, grouped.abs().argmax(-1, keepdim=True))


@dataclass(frozen=True)
class GgmlSymmetric(ValueCode):
    """llama.cpp's blocks with one float16 step: q4_0 is 16 levels, q5_0 32, q8_0 255, and any other number works alike.

    Even levels: the value of largest magnitude, whatever its sign, is code 0, at -L/2 steps. Odd ones: codes of either
    sign around 0. Codes are of the unrounded step, which is rounded to float16 only to be stored.
    """

    metadata_bits: float = 16

    @property
    def attended_element(self) -> str:
        """See ``Code``."""
        return "symmetric"

    def encode(self, grouped: Tensor, levels: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See ``ValueCode``: with each group its step."""
        half = levels // 2
        if levels % 2:
            step = grouped.abs().amax(-1, keepdim=True) / half
            codes = _half_away(grouped * _inverse(step)).clamp(-half, half) + half
        else:
            step = _largest(grouped) / -half
            codes = (grouped * _inverse(step) + (half + 0.5)).trunc().clamp(0, levels - 1)
        return codes, (to_float16(step),)

    def decode(self, codes: Tensor, stored: tuple[Tensor, ...], levels: int | Tensor) -> Tensor:
        """See ``ValueCode``."""
        return (codes - levels // 2) * stored[0].float()


@dataclass(frozen=True)
class GgmlAsymmetric(Code):
    """llama.cpp's blocks with a float16 step and minimum: q4_1 is 16 levels, q5_1 32, any other number works alike."""

    metadata_bits: float = 32

    def quantize_dequantize(self, grouped: Tensor, levels: int) -> Tensor:
        """See ``Code``."""
        low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
        step = (high - low) / (levels - 1)
        codes = ((grouped - low) * _inverse(step)).nan_to_num() + 0.5
        return codes.trunc().clamp(0, levels - 1) * to_float16(step).float() + to_float16(low).float()


_IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_IQ4_NL_LEAST = 1e-15  # blocks of smaller values are zeros


@dataclass(frozen=True)
class Iq4Nl(Code):
    """llama.cpp's iq4_nl: 16 uneven levels, the float16 step a least-squares fit with weights x**2 after coding."""

    metadata_bits: float = 16

    @property
    def fixed_levels(self) -> int:
        """See ``Code``."""
        return len(_IQ4_NL)

    def quantize_dequantize(self, grouped: Tensor, levels: int) -> Tensor:
        """See ``Code``."""
        table = grouped.new_tensor(_IQ4_NL)
        largest = _largest(grouped)
        places = (grouped * _inverse(largest / _IQ4_NL[0])).nan_to_num()
        values = table[torch.bucketize(places.contiguous(), (table[1:] + table[:-1]) / 2, right=True)]
        weighted = grouped * grouped * values
        upper, lower = torch.zeros_like(largest), torch.zeros_like(largest)
        for place in range(grouped.shape[-1]):  # one after the other, as the source adds
            here = slice(place, place + 1)
            upper = upper + weighted[..., here] * grouped[..., here]
            lower = lower + weighted[..., here] * values[..., here]
        tiny = (largest.abs() < _IQ4_NL_LEAST) | (lower == 0)
        step = torch.where(tiny, 0, upper / lower.masked_fill(tiny, 1)).nan_to_num()
        return values * to_float16(step).float()


# Largest value, its exponent, and the number of codes.
_ELEMENTS = {"e4m3": (448.0, 8, 256), "e5m2": (57344.0, 15, 256), "e2m1": (6.0, 2, 16)}
_TYPES = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}  # of torch
_SCALES = {"none": 0, "float32": 32, "e8m0_floor": 8, "e8m0_ceil": 8, "e4m3": 8}
_TIES = ("even", "up", "down")
_LEAST_E4M3 = 2.0**-6  # the smallest normal number
_LEAST_CEIL = 1e-10
_LEAST_TENSOR = 2.0**-100  # a prompt of less is of zeros, as good as: its scale would have no inverse
_EXPONENTS = (-126, 127)
PROMPT = "prompt"


@dataclass(frozen=True)
class Float(Code):
    """Small floats: elements e4m3, e5m2 or e2m1, with a scale a group, a scale a tensor, or neither.

    scale: of a group. ``none``; ``float32``, max(max|x| / largest, eps) (vLLM's fp8_per_token_head); ``e8m0_floor``,
    the power of two below max|x| over that below the largest element (OCP MX); ``e8m0_ceil``, the power of two above
    max|x| / 6 (SGLang); ``e4m3``, max|x| / 6 (NVFP4). tensor_scale: what all values are divided by besides; ``prompt``
    takes it from the prompt's largest value, as calibration would. ties: where e2m1 rounds a value midway.
    """

    element: str = "e4m3"
    scale: str = "none"
    tensor_scale: float | str = 1.0
    eps: float = 1e-6
    ties: str = "even"

    def __post_init__(self) -> None:
        for name, known in (("element", _ELEMENTS), ("scale", _SCALES), ("ties", _TIES)):
            choice(f"code.{name}", getattr(self, name), known)
        if self.tensor_scale != PROMPT and not (is_number(self.tensor_scale) and self.tensor_scale > 0):
            raise UsageError(f"code.tensor_scale={self.tensor_scale} must be a number above 0, or prompt")
        if self.ties != "even" and self.element != "e2m1":
            raise UsageError(f"code.ties={self.ties} is for e2m1; {self.element} rounds to even")

    @property
    def metadata_bits(self) -> float:
        """See ``Code``."""
        return _SCALES[self.scale]

    @property
    def fixed_levels(self) -> int:
        """See ``Code``."""
        return _ELEMENTS[self.element][2]

    @property
    def sequence_bits(self) -> float:
        """See ``Code``."""
        return 32 if self.tensor_scale == PROMPT else 0

    def of_prompt(self, prompt: Tensor) -> Float:
        """See ``Code``."""
        if self.tensor_scale != PROMPT:
            return self
        top = _ELEMENTS[self.element][0] * (_ELEMENTS["e4m3"][0] if self.scale == "e4m3" else 1)
        scale = float(prompt.abs().max() / top)
        return replace(self, tensor_scale=scale if scale > _LEAST_TENSOR else 1.0)

    @property
    def packs(self) -> bool:
        """See ``Code``: unless a scale of the prompt is not known yet."""
        return self.tensor_scale != PROMPT

    @property
    def unpackable(self) -> str:
        """See ``Code``."""
        return "code.tensor_scale=prompt is simulated: give a number to store it"

    @property
    def attended_element(self) -> str | None:
        """See ``Code``: of eight bits with a float32 scale, of e2m1 with one of eight bits."""
        if self.element == "e2m1":
            return self.element if self.packs and _SCALES[self.scale] == 8 else None
        return self.element if self.scale == "float32" and self.tensor_scale == 1 else None

    @property
    def attended_whole(self) -> float:
        """See ``Code``."""
        return float(self.tensor_scale)

    def attended_scale(self, scale: Tensor) -> Tensor:
        """See ``Code``."""
        return scale.view(torch.float8_e4m3fn) if self.scale == "e4m3" else scale

    def encode(self, grouped: Tensor, levels: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Bits of the elements as numbers 0..levels-1, float32 [..., members], and the scale [..., 1], if there is one.

        Scales of eight bits are their bits, uint8.
        """
        whole, largest = grouped.new_full((), self.tensor_scale), grouped.abs().amax(-1, keepdim=True)
        if self.scale == "none":
            return self._bits(grouped / whole), ()
        if self.scale == "float32":
            scale = (largest / whole / _ELEMENTS[self.element][0]).clamp(min=self.eps)
            return self._bits(grouped / whole * (1 / scale)), (scale,)
        if self.scale == "e4m3":
            exact = largest / _ELEMENTS[self.element][0] / whole
            scale = exact.clamp(_LEAST_E4M3, _ELEMENTS["e4m3"][0]).to(torch.float8_e4m3fn).view(torch.uint8)
            return self._bits(grouped * ((1 / whole) / self._scale(scale))), (scale,)
        scale = self._power_of_two(largest / whole)
        return self._bits(grouped / whole / self._scale(scale)), (scale,)

    def decode(self, codes: Tensor, stored: tuple[Tensor, ...], levels: int | Tensor) -> Tensor:
        """Values float32 [..., members]."""
        bits, whole = codes.to(torch.uint8), codes.new_full((), self.tensor_scale)
        if self.element in _TYPES:
            values = bits.view(getattr(torch, _TYPES[self.element])).float()
        else:
            values = e2m1_table(codes.device)[bits.int()]
        if self.scale == "e4m3":
            return values * (self._scale(stored[0]) * whole)
        for scale in stored:
            values = values * self._scale(scale)
        return values * whole

    def quantize_dequantize(self, grouped: Tensor, levels: int) -> Tensor:
        """See ``Code``."""
        if self.tensor_scale == PROMPT:
            raise UsageError("code.tensor_scale=prompt needs the prompt's keys and values; give a number")
        return self.decode(*self.encode(grouped, levels), levels)

    def _scale(self, stored: Tensor) -> Tensor:
        """A scale as it is stored, as float32."""
        if self.scale == "float32":
            return stored
        if self.scale == "e4m3":
            return stored.view(torch.float8_e4m3fn).float()
        return (stored.int() << 23).view(torch.float32)

    def _power_of_two(self, largest: Tensor) -> Tensor:
        """The bits of an e8m0; of zeros the least one."""
        top, exponent, _ = _ELEMENTS[self.element]
        if self.scale == "e8m0_floor":
            power = (torch.frexp(largest).exponent - 1 - exponent).masked_fill(largest == 0, _EXPONENTS[0])
        else:
            power = (largest / top).clamp(min=_LEAST_CEIL).log2().ceil()
        return (power.clamp(*_EXPONENTS) + 127).to(torch.uint8)

    def _bits(self, x: Tensor) -> Tensor:
        """The bits of the nearest element of x, the largest beyond it, as numbers float32."""
        if self.element in _TYPES:
            top = _ELEMENTS[self.element][0]
            return x.clamp(-top, top).to(getattr(torch, _TYPES[self.element])).view(torch.uint8).float()
        table = e2m1_table(x.device)[: len(E2M1)]
        middles, size = (table[1:] + table[:-1]) / 2, x.abs().contiguous()
        below, above = (torch.bucketize(size, middles, right=right) for right in (False, True))
        place = {"down": below, "up": above, "even": torch.where(below % 2 == 0, below, above)}[self.ties]
        return (place + 8 * torch.signbit(x)).float()


@dataclass(frozen=True)
class Anchored(Code):
    """MLX's affine: the end of the range that is larger in magnitude, and zero, are exact but for float16.

    Step and bias are rounded, from float32, only to be stored. Its kernel for Apple GPUs takes 0 for the largest of a
    group of negative values; that is not done here.
    """

    eps: float = 1e-7
    metadata_bits: float = 32

    def quantize_dequantize(self, grouped: Tensor, levels: int) -> Tensor:
        """See ``Code``."""
        low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
        step = ((high - low) / (levels - 1)).clamp(min=self.eps)
        from_low = low.abs() > high.abs()
        step, edge = torch.where(from_low, step, -step), torch.where(from_low, low, high)
        place = _half_away(edge / step)
        step = torch.where(place == 0, step, edge / place.masked_fill(place == 0, 1))
        bias = torch.where(place == 0, 0, edge)
        codes = _half_away((grouped - bias) / step).nan_to_num().clamp(0, levels - 1)
        return codes * to_float16(step).float() + to_float16(bias).float()


@dataclass(frozen=True)
class Absmax(Code):
    """vLLM's int8_per_token_head: signed codes around 0, a float32 step of max(max|x| / 127, eps)."""

    eps: float = 1e-6
    metadata_bits: float = 32

    def check_levels(self, levels: int) -> None:
        """See ``Code``."""
        if levels % 2 == 0 or levels < 3:
            raise UsageError(f"codes around 0 are an odd number of levels, 255 or 15, not {levels}")

    def quantize_dequantize(self, grouped: Tensor, levels: int) -> Tensor:
        """See ``Code``."""
        half = levels // 2
        step = (grouped.abs().amax(-1, keepdim=True) / half).clamp(min=self.eps)
        return _half_away(grouped * (1 / step)).clamp(-half, half) * step


_HIDDEN = 4


@dataclass(frozen=True)
class HiddenZero(Code):
    """vLLM's int4_per_token_head: a float32 step whose lowest 4 bits hold a whole zero point.

    The zero point is within the codes, so that a range that does not hold 0 is clipped. Codes are of the step before
    its lowest bits are given away.
    """

    eps: float = 1e-6
    metadata_bits: float = 32

    def check_levels(self, levels: int) -> None:
        """See ``Code``."""
        if levels > 1 << _HIDDEN:
            raise UsageError(
                f"a zero point in {_HIDDEN} bits allows at most {1 << _HIDDEN} levels, not {levels}"
            )

    def quantize_dequantize(self, grouped: Tensor, levels: int) -> Tensor:
        """See ``Code``."""
        low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
        step = ((high - low) / (levels - 1)).clamp(min=self.eps)
        zero = _half_trunc(-low / step).clamp(0, levels - 1)
        codes = _half_trunc(grouped * (1 / step) + zero).clamp(0, levels - 1)
        stored = (step.view(torch.int32) & -(1 << _HIDDEN)).view(torch.float32)
        return (codes - zero) * stored


def _half_trunc(x: Tensor) -> Tensor:
    """Half added away from zero, then cut off: vLLM's rounding of int4."""
    return torch.where(x >= 0, x + 0.5, x - 0.5).trunc()


_BOOKS = ("exact", "vllm")


@dataclass(frozen=True)
class LloydMax(Code):
    """The Lloyd-Max code of a normal distribution for vectors of norm 1: each coordinate has variance 1/members.

    book: ``exact``, or the one that ``vllm`` computes, which differs in the third digit after the point. renormalise:
    what is read back has norm 1 again.
    """

    book: str = "exact"
    renormalise: bool = False
    metadata_bits: float = 0

    def __post_init__(self) -> None:
        choice("code.book", self.book, _BOOKS)

    def quantize_dequantize(self, grouped: Tensor, levels: int) -> Tensor:
        """See ``Code``."""
        size = grouped.shape[-1]
        if self.book == "vllm":
            centroids = trapezoid_lloyd_max(levels, size)
        else:
            centroids = lloyd_max(levels, math.inf).centroids / math.sqrt(size)
        middles = (centroids[1:] + centroids[:-1]) / 2
        table, edges = (
            torch.from_numpy(found).to(grouped.device, torch.float32) for found in (centroids, middles)
        )
        values = table[torch.bucketize(grouped.contiguous(), edges, right=True)]
        if self.renormalise:
            values = values * (1 / (values.square().sum(-1, keepdim=True) + 1e-16).sqrt())
        return values
