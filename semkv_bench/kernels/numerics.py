"""Rules every kernel and its reference share: stored metadata is float16 and always finite."""

from __future__ import annotations

from typing import TYPE_CHECKING

from semkv_bench.errors import NonFiniteError
from semkv_bench.grid.levels import MAX_LEVELS
from semkv_bench.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["FLOAT16_MAX", "NonFiniteError", "Saturation", "check_rows", "finite_cast", "to_float16"]

FLOAT16_MAX = 65504.0


class Saturation:
    """How much metadata was beyond float16 in this process; the kernels for GPUs do not count theirs."""

    count = 0

    @classmethod
    def add(cls, x: Tensor) -> None:
        """Count the values of float32 ``x`` that float16 cannot hold."""
        cls.count += int((x.abs() > FLOAT16_MAX).sum())


def to_float16(x: Tensor) -> Tensor:
    """Round finite or infinite float32 metadata to the nearest float16, saturating at +-65504 and counting that."""
    Saturation.add(x)
    return _saturated(x)


def finite_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast finite float32 to ``dtype``; only float16 is narrow enough to need saturation."""
    return _saturated(x) if dtype == torch.float16 else x.to(dtype)


def _saturated(x: Tensor) -> Tensor:
    return x.clamp(-FLOAT16_MAX, FLOAT16_MAX).to(torch.float16)


def check_rows(x: Tensor, levels: Tensor, top: int = MAX_LEVELS) -> None:
    """Check the common arguments: x [heads, tokens, head_dim] and levels int64 [S, tokens] or [S, 1].

    Raises ValueError on a wrong shape or type, or a level count outside 2..top.
    """
    if x.dim() != 3 or x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"x must be a float [heads, tokens, head_dim], not {x.dtype} {tuple(x.shape)}")
    if levels.dim() != 2 or levels.dtype != torch.int64 or levels.shape[1] not in (1, x.shape[1]):
        raise ValueError(
            f"levels must be int64 [settings, {x.shape[1]}] or [settings, 1], "
            f"not {levels.dtype} {tuple(levels.shape)}"
        )
    if levels.numel() and not (int(levels.min()) >= 2 and int(levels.max()) <= top):
        raise ValueError(f"levels must lie in 2..{top}")
