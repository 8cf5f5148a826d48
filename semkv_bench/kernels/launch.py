"""The one place that launches Triton kernels, how much one program works on, and helpers that kernels share."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import KernelInterface

from semkv_bench.errors import SemkvError

__all__ = [
    "finite_cast",
    "finite_or_flag",
    "interpreted",
    "launch",
    "round_half_even",
    "rows_per_program",
    "to_float16",
    "unit_stride",
]

_MOST_PROGRAMS = (2**31 - 1, 65535, 65535)  # of every axis of a grid
_INSTEAD = "set SEMKV_KERNELS=reference, which is slower (and attention='dequantize' for SemKVCache)"
_ELEMENTS = 2048
_ELEMENTS_INTERPRETED = 1 << 18  # the interpreter pays per program, not per element


def interpreted() -> bool:
    """Do kernels run in Triton's interpreter?"""
    return bool(knobs.runtime.interpret)


def launch(kernel: KernelInterface, grid: tuple[int, ...], beside: Tensor, *arguments, **options) -> None:
    """Launch a kernel on the GPU that holds ``beside``, on that GPU's current stream.

    Triton launches on the process's current GPU, whatever its arguments lie on: with a model spread over
    several GPUs the work of a layer on the second would run unordered on the first one's stream. The current
    GPU is as before afterwards. ``grid`` counts programs; ``arguments`` and ``options`` are the kernel's.

    Raises SemkvError where a GPU has not so many programs, or not the memory that one of them shares.
    """
    over = [count for count, most in zip(grid, _MOST_PROGRAMS, strict=False) if count > most]
    if over:
        raise SemkvError(f"{_name(kernel)} would need {over[0]} programs side by side: {_INSTEAD}")
    with torch.cuda.device_of(beside):
        try:
            kernel[grid](*arguments, **options)
        except OutOfResources as error:
            raise SemkvError(
                f"{_name(kernel)} needs {error.required} of {error.name} and this GPU has {error.limit}: {_INSTEAD}"
            ) from None


def _name(kernel: KernelInterface) -> str:
    return getattr(kernel, "__name__", "a kernel")


def rows_per_program(width: int) -> int:
    """Rows of ``width`` (a power of two) padded elements that one program takes, a power of two."""
    return max(1, (_ELEMENTS_INTERPRETED if interpreted() else _ELEMENTS) // width)


def unit_stride(x: Tensor) -> Tensor:
    """x itself if its last dimension is contiguous, else a contiguous copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


@triton.jit
def round_half_even(x):
    """Nearest integer of 0 <= x < 2**22, ties to even: float32 has no fractions from 2**23 on."""
    return (x + 8388608.0) - 8388608.0


@triton.jit
def to_float16(x):
    """Nearest float16, saturating at +-65504."""
    return tl.minimum(tl.maximum(x, -65504.0), 65504.0).to(tl.float16)


@triton.jit
def to_bfloat16(x):
    """Nearest bfloat16 of finite float32, ties to even; spelled out, for the interpreter's cast truncates."""
    bits = x.to(tl.uint32, bitcast=True)
    bits += 0x7FFF + ((bits >> 16) & 1)
    return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def finite_cast(x, dtype: tl.constexpr):
    """Finite float32 as ``dtype``, saturating in float16."""
    if dtype == tl.float16:
        y = to_float16(x)
    elif dtype == tl.bfloat16:
        y = to_bfloat16(x)
    else:
        y = x
    return y


@triton.jit
def finite_or_flag(x, mask, flag):
    """Set the int32 ``flag`` if x holds NaN or infinity where ``mask`` is true."""
    # x - x is 0 for finite x and NaN for all others.
    odd = tl.max(tl.where(mask & (x - x != 0.0), 1, 0).reshape([x.numel]), axis=0)
    tl.store(flag, 1, mask=odd > 0)
