"""The fractional-bit grid: level counts, how their codes share bits, and what a stored value costs.

Pure arithmetic, no tensors. All figures are bits per stored value unless a name says otherwise.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from semkv_bench.checks import is_whole
from semkv_bench.errors import UsageError

__all__ = [
    "DELETED",
    "FULL_PRECISION",
    "MAX_LEVELS",
    "PackingPlan",
    "Storage",
    "aligned_plan",
    "check_levels",
    "code_bits",
    "mix",
    "packing_plan",
]

MAX_LEVELS = 256  # a code is one byte before packing
_WASTE = 1.01  # packed bits may exceed the entropy log2(L) by less than this factor


@dataclass(frozen=True)
class PackingPlan:
    """How codes of one level count share machine bits.

    ``digits`` base-``levels`` codes are stored in ``bits`` whole bits; for levels=5 that is
    3 codes in 7 bits, 2.333 bits per value against an entropy of log2(5) = 2.322.
    """

    levels: int
    digits: int
    bits: int

    @property
    def packed_bits(self) -> float:
        """Stored bits per value, metadata excluded."""
        return self.bits / self.digits


@dataclass(frozen=True)
class Storage:
    """What one stored value costs: entropy of its code, packed code, and packed code with metadata.

    Affine at 25 % L=6 and 75 % L=5, head_dim 128: Storage(2.388, 2.400, 2.650), compression 6.04.
    """

    code_bits: float
    packed_bits: float
    effective_bits: float

    @property
    def compression(self) -> float:
        """How many times smaller than a 16-bit cache (infinite for deleted tokens)."""
        return 16 / self.effective_bits if self.effective_bits else math.inf


FULL_PRECISION = Storage(16.0, 16.0, 16.0)
DELETED = Storage(0.0, 0.0, 0.0)


def check_levels(levels: object) -> tuple[int, ...]:
    """Return the level counts as a tuple of ints.

    Raises UsageError if there are none or one is not a whole number in 2..256.
    """
    values = [levels] if isinstance(levels, int | float | str) else list(levels or ())
    if not values:
        raise UsageError("no levels given; say for example grid.levels=[8,6,5,4,3,2]")
    for value in values:
        if not is_whole(value) or not 2 <= value <= MAX_LEVELS:
            raise UsageError(f"levels must be whole numbers from 2 to {MAX_LEVELS}, not {value!r}")
    return tuple(values)


def code_bits(levels: int) -> float:
    """Entropy of a uniformly used code, ``log2(levels)``."""
    return math.log2(levels)


@cache
def packing_plan(levels: int) -> PackingPlan:
    """Smallest number of base-``levels`` digits that fills whole bits with less than 1 % waste.

    Raises UsageError for a level count outside 2..256.
    """
    check_levels([levels])
    digits = 1
    while True:
        bits = (levels**digits - 1).bit_length()
        if bits / digits < _WASTE * math.log2(levels):
            return PackingPlan(levels, digits, bits)
        digits += 1


_LANE = 16  # bits of the lane that a group is read in


@cache
def aligned_plan(levels: int) -> PackingPlan:
    """How codes are packed for speed: three digits in a group that one 16-bit lane can take apart.

    Few level counts cost more than under ``packing_plan``: L=6 has three digits in eight bits, 2.667 and not 2.6. Above
    32 levels a code is a group of its own.
    Raises UsageError for a level count outside 2..256.

    >>> [(plan.digits, plan.bits) for plan in map(aligned_plan, (2, 3, 4, 5, 6, 7, 12, 24, 100))]
    [(3, 3), (3, 5), (3, 6), (3, 7), (3, 8), (3, 9), (3, 11), (3, 15), (1, 7)]
    """
    check_levels([levels])
    width = (levels - 1).bit_length()
    if 3 * width >= _LANE:
        return PackingPlan(levels, 1, width)
    bits = (levels**3 - 1).bit_length()
    # A group times its levels, which is how the next digit is found, must fit the lane.
    return PackingPlan(levels, 3, bits if bits + width <= _LANE else 3 * width)


def mix(parts: Iterable[tuple[float, Storage]]) -> Storage:
    """Average cost over parts that hold the given shares of all values.

    ``mix([(0.25, high), (0.75, low)])`` is a two-level allocation, ``mix([(0.5, key), (0.5, value)])``
    a cache whose keys and values are stored differently, ``mix([(0.25, FULL_PRECISION), (0.75, DELETED)])``
    pruning: 4.0 bits per value of the unpruned cache. Shares are normalised, so counts do as well.
    Raises ValueError if they do not sum to a positive number.
    """
    weighted: Sequence[tuple[float, Storage]] = list(parts)
    total = math.fsum(weight for weight, _ in weighted)
    if not total > 0:
        raise ValueError("the shares of a mixture must sum to a positive number")

    def mean(field: str) -> float:
        return math.fsum(weight * getattr(storage, field) for weight, storage in weighted) / total

    return Storage(mean("code_bits"), mean("packed_bits"), mean("effective_bits"))
