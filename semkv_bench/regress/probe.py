"""Fixed tensors that quantizers are checked on, made of whole numbers alone, so the same bits on every platform.

They hold what random data never hit: codes halfway between two, constant vectors, the ends of float16, and
steps that float16 rounds down so far that only the clamp keeps a code in range.
"""

from collections.abc import Iterator, Sequence
from itertools import cycle, islice

import torch
from torch import Tensor

__all__ = ["integers", "probe_states", "probe_tensor"]

_GENERIC = 24
_LARGEST = 65504  # of float16


def integers(count: int, low: int, high: int, stream: int = 0) -> list[int]:
    """``count`` whole numbers of low..high, spread evenly, from a 64-bit congruential generator (Knuth's MMIX)."""
    state = 0x9E3779B97F4A7C15 * (stream + 1) & (2**64 - 1)
    drawn = []
    for _ in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) & (2**64 - 1)
        drawn.append(low + (state >> 33) % (high - low + 1))
    return drawn


def probe_states(heads: int, tokens: int, head_dim: int, stream: int) -> Tensor:
    """Ordinary vectors, float32 [heads, tokens, head_dim]: multiples of 1/256 in -4..4, one channel 16 times larger."""
    values = torch.tensor(integers(heads * tokens * head_dim, -1024, 1024, stream), dtype=torch.float32)
    states = values.view(heads, tokens, head_dim) / 256
    states[..., stream % head_dim] *= 16
    return states


def probe_tensor(head_dim: int, levels: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The hard cases, ``dtype`` [2, tokens, head_dim]; the second head holds the negatives, last token first.

    ``levels`` are the level counts that ties and clamped codes are made for. What float16 cannot hold is
    brought to its ends for that ``dtype``.
    """
    rows = [*_ordinary(head_dim), *_degenerate(head_dim)]
    for count in levels:
        rows += [_ties(head_dim, count), _clamped(head_dim, count)]
    head = torch.stack(rows)
    both = torch.stack([head, -head.flip(0)])
    if dtype == torch.float16:
        both = both.clamp(-_LARGEST, _LARGEST)
    return both.to(dtype)


def _row(numerators: Sequence[int], denominator: int = 1) -> Tensor:
    """Exact in float32: numerators below 2**24 over a power of two."""
    return torch.tensor(list(numerators), dtype=torch.float32) / denominator


def _filled(pattern: Sequence[int], head_dim: int) -> list[int]:
    return list(islice(cycle(pattern), head_dim))


def _ordinary(head_dim: int) -> Iterator[Tensor]:
    yield from probe_states(1, _GENERIC, head_dim, stream=0)[0]
    yield _row(range(head_dim))
    yield _row([2**k for k in islice(cycle(range(16)), head_dim)], 2**8)


def _degenerate(head_dim: int) -> Iterator[Tensor]:
    for pattern in ([9], [-9], [0], [1, *[0] * head_dim], [-1, *[1] * head_dim]):
        yield _row(_filled(pattern, head_dim))
    # Not a float16: the stored minimum of a constant vector is rounded.
    yield _row(_filled([1365], head_dim), 2**12)
    for pattern in ([_LARGEST, -_LARGEST], [_LARGEST, 0], [10**6, -(10**6), 3], [2**24 - 1, 0, 1]):
        yield _row(_filled(pattern, head_dim))
    # The smallest float16 and halves of it.
    yield _row(_filled([0, 1, 2, 3], head_dim), 2**25)
    # The minimum rounds up to float16, so values lie below the stored zero.
    yield _row([2**13 + 6 + place for place in range(head_dim)], 2**13)


def _ties(head_dim: int, levels: int) -> Tensor:
    """Step 1/8 from -1: the ends, then every value halfway between two codes."""
    halves = [-16 + 2 * code + 1 for code in range(levels - 1)]
    return _row([-16, -16 + 2 * (levels - 1), *_filled(halves, head_dim - 2)], 2**4)


def _clamped(head_dim: int, levels: int) -> Tensor:
    """A ramp of 1.25 * (levels - 1) smallest float16 steps: the scale rounds down to one, the top codes overflow."""
    top = 5 * (levels - 1)
    return _row([place * top // (head_dim - 1) for place in range(head_dim)], 2**26)
