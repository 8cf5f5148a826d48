"""Rules every kernel and its reference share: stored metadata is float16 and always finite."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, ClassVar

from semkv_bench.errors import NonFiniteError
from semkv_bench.grid.levels import MAX_LEVELS
from semkv_bench.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


__all__ = [
    "FLOAT16_MAX",
    "NonFiniteError",
    "Noted",
    "Saturation",
    "check_noted",
    "check_rows",
    "finite_cast",
    "finite_together",
    "gathered",
    "named",
    "note_finite",
    "to_float16",
]

FLOAT16_MAX = 65504.0


Noted = list[tuple[str, "Tensor"]]
"""Where kernels looked for values that are not finite, and the flag that they set for one."""

_NOTED: ContextVar[Noted | None] = ContextVar("_NOTED", default=None)
_WHERE: ContextVar[str] = ContextVar("_WHERE", default="")


@contextmanager
def named(where: str) -> Iterator[None]:
    """Errors about values that are not finite name ``where``, for example a layer and a tensor."""
    token = _WHERE.set(where)
    try:
        yield
    except NonFiniteError as error:
        if str(error).startswith(where):
            raise
        raise NonFiniteError(f"{where}: {error}") from error
    finally:
        _WHERE.reset(token)


@contextmanager
def finite_together() -> Iterator[None]:
    """Read what kernels note on a GPU once, at the end: each read waits for all work before it.

    Raises NonFiniteError for the first one, naming where it was.
    """
    noted: Noted = []
    with gathered(noted):
        yield
    check_noted(noted)


@contextmanager
def gathered(noted: Noted) -> Iterator[None]:
    """Put what kernels note on a GPU beside what ``noted`` holds, for ``check_noted`` to read."""
    token = _NOTED.set(noted)
    try:
        yield
    finally:
        _NOTED.reset(token)


def check_noted(noted: Noted) -> None:
    """Read what was gathered and forget it; raises NonFiniteError for the first value that is not finite."""
    taken = noted.copy()
    noted.clear()
    by_device: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for where, flag in taken:
        by_device.setdefault(flag.device, []).append((where, flag))
    for flags in by_device.values():
        odd = torch.cat([flag for _, flag in flags]).cpu().tolist()
        for (where, _), found in zip(flags, odd, strict=True):
            if found:
                raise _not_finite(where)


def note_finite(flag: Tensor, now: bool = False) -> None:
    """Raise NonFiniteError if ``flag`` int32 [1] is not 0: now, or at the end of ``finite_together``."""
    noted = _NOTED.get()
    if noted is not None and not now:
        noted.append((_WHERE.get(), flag))
    elif int(flag):
        raise _not_finite("")


def _not_finite(where: str) -> NonFiniteError:
    return NonFiniteError(f"{where}: " * bool(where) + "NaN or infinity in the tensor to be quantized")


class Saturation:
    """How much metadata was beyond float16 in this process; the kernels for GPUs do not count theirs.

    counts: by device; those of a GPU are a tensor on it, which is not read before the count is asked for.
    """

    counts: ClassVar[dict[torch.device, Tensor | int]] = {}

    @classmethod
    def add(cls, x: Tensor) -> None:
        """Count the values of float32 ``x`` that float16 cannot hold."""
        found = (x.abs() > FLOAT16_MAX).sum()
        found = int(found) if x.device.type == "cpu" else found
        cls.counts[x.device] = cls.counts.get(x.device, 0) + found

    @classmethod
    def count(cls) -> int:
        """All that were counted."""
        return sum(map(int, cls.counts.values()))


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

    Raises ValueError on a wrong shape or type, or a level count outside 2..top. Levels on a GPU are not read, which
    would wait for all work before it: allocations check their counts, and so does whoever uploads others.
    """
    if x.dim() != 3 or x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"x must be a float [heads, tokens, head_dim], not {x.dtype} {tuple(x.shape)}")
    if levels.dim() != 2 or levels.dtype != torch.int64 or levels.shape[1] not in (1, x.shape[1]):
        raise ValueError(
            f"levels must be int64 [settings, {x.shape[1]}] or [settings, 1], "
            f"not {levels.dtype} {tuple(levels.shape)}"
        )
    if (
        levels.device.type == "cpu"
        and levels.numel()
        and not (int(levels.min()) >= 2 and int(levels.max()) <= top)
    ):
        raise ValueError(f"levels must lie in 2..{top}")
