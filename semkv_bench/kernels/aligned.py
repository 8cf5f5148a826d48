"""The packed cache as attention reads it: whole words, tokens of one precision side by side.

Tokens that have the same levels on both sides of the cache, keys and values, form a *segment*; segments follow each
other, and so do their tokens, whatever their places in the text: attention does not ask for them. Three neighbours of
a segment form a group: their codes of one channel are three digits in ``bits`` bits (``aligned_plan``; one token alone
above 32 levels). Groups of one channel follow each other without gaps in a lane of 16-bit units. Two neighbouring
channels share a word: the even one has its lower half. So a word of a head is at [unit, channel // 2], a row of
channels is read 128 bits at a time, and what is done to one word is done to two codes.

A group is stored as ``packed`` says: x = ceil(V * 2**w / L**3), and x * L has the first digit above bit w and the rest
below. Where three whole digits fit the same bits, they simply follow each other, the first one highest.

Which token is where is told by each token's segment (0, 1, 2, 4 or 8 bits), one for all heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from semkv_bench.grid.levels import MAX_LEVELS, PackingPlan, aligned_plan
from semkv_bench.kernels.packed import class_bits, pack_classes, too_large, unpack_classes, upload
from semkv_bench.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AlignedLayout", "Segment", "pack", "unpack"]

UNIT = 16  # bits
_LANES = 2


@dataclass(frozen=True)
class Segment:
    """``tokens`` neighbours of the same levels and key (see ``AlignedLayout.build``).

    first: the place of the first one; unit, units: the first unit of a head and how many there are.
    """

    key: int
    levels: int
    first: int
    tokens: int
    unit: int
    units: int

    @property
    def plan(self) -> PackingPlan:
        """How its codes share bits."""
        return aligned_plan(self.levels)


@dataclass(frozen=True, eq=False)
class AlignedLayout:
    """Where the codes of ``tokens`` vectors a head lie: words int32 [heads, units, (head_dim + 1) // 2].

    token_segment  uint8, the segment of each token of the text, packed from the lowest bit up
    """

    heads: int
    head_dim: int
    tokens: int
    segments: tuple[Segment, ...]
    token_segment: Tensor

    @property
    def pairs(self) -> int:
        """Words of a row of channels."""
        return (self.head_dim + 1) // _LANES

    @property
    def units(self) -> int:
        """Units of a head."""
        return self.segments[-1].unit + self.segments[-1].units if self.segments else 0

    @property
    def words(self) -> int:
        """Number of 32-bit words."""
        return self.heads * self.units * self.pairs

    @property
    def class_levels(self) -> tuple[int, ...]:
        """Level counts in use, ascending."""
        return tuple(sorted({segment.levels for segment in self.segments})) or (2,)

    @property
    def nbytes(self) -> int:
        """Bytes of the layout itself: of every token its segment, of every segment its levels and tokens."""
        return self.token_segment.nbytes + 5 * len(self.segments)

    @cached_property
    def order(self) -> Tensor:
        """Place in the text of each token as they lie, int64 [tokens]."""
        return unpack_classes(self.token_segment, class_bits(len(self.segments)), self.tokens).argsort(
            stable=True
        )

    def levels(self) -> Tensor:
        """Level count of every token as they lie, int64 [tokens]."""
        return self._by_token([segment.levels for segment in self.segments])

    def keys(self) -> Tensor:
        """Key of every token as they lie, int64 [tokens]."""
        return self._by_token([segment.key for segment in self.segments])

    def _by_token(self, values: list[int]) -> Tensor:
        counts = torch.tensor([segment.tokens for segment in self.segments], dtype=torch.int64)
        spread = torch.tensor(values, dtype=torch.int64).repeat_interleave(counts)
        return upload(spread, self.token_segment.device)

    @property
    def in_order(self) -> bool:
        """Do tokens lie in the order of the text?"""
        return len(self.segments) < 2

    @property
    def ends_block(self) -> bool:
        """May words of later tokens simply follow?"""
        return False

    def sort(self, x: Tensor) -> Tensor:
        """x [heads, tokens, ...] of the text, as tokens lie."""
        return x if self.in_order else x[:, self.order]

    def unsort(self, x: Tensor) -> Tensor:
        """Inverse of ``sort``."""
        if self.in_order:
            return x
        out = torch.empty_like(x)
        out[:, self.order] = x
        return out

    @classmethod
    def build(cls, levels: Tensor, heads: int, head_dim: int, key: Tensor | None = None) -> AlignedLayout:
        """Layout for tokens of these levels, int64 [tokens].

        key: int64 [tokens], equal where tokens belong to one segment, which then have equal levels; segments come in
        its order. Two sides of a cache with the same key have the same order. Default: the levels.
        Raises ValueError unless levels lie in 2..256, in at most 256 segments.
        """
        # Read once, for all checks and counts.
        read = torch.stack([levels, levels if key is None else key]).cpu()
        keys, classes, counts = read[1].unique(return_inverse=True, return_counts=True)
        if len(counts) > 256:
            raise ValueError(f"at most 256 different pairs of level counts, not {len(counts)}")
        own = torch.zeros_like(counts).scatter_(0, classes, read[0])
        if len(levels) and not (int(own.min()) >= 2 and int(own.max()) <= MAX_LEVELS):
            raise ValueError(f"packed levels must lie in 2..{MAX_LEVELS}")
        segments, first, unit = [], 0, 0
        for name, count, tokens in zip(keys.tolist(), own.tolist(), counts.tolist(), strict=True):
            segments.append(Segment(name, count, first, tokens, unit, _units(tokens, aligned_plan(count))))
            first, unit = first + tokens, unit + segments[-1].units
        token_segment = upload(pack_classes(classes, class_bits(len(counts))), levels.device)
        layout = cls(heads, head_dim, len(levels), tuple(segments), token_segment)
        if layout.words >= 1 << 31:
            raise too_large(layout.words, len(levels))
        return layout


def _units(tokens: int, plan: PackingPlan) -> int:
    return -(-(-(-tokens // plan.digits) * plan.bits) // UNIT)


def pack(codes: Tensor, layout: AlignedLayout) -> Tensor:
    """Words int32 [layout.words] of codes uint8 [heads, tokens, head_dim], tokens as they lie."""
    padded = torch.nn.functional.pad(codes, (0, _LANES * layout.pairs - layout.head_dim))
    lanes = [_lanes(padded[:, s.first : s.first + s.tokens], s) for s in layout.segments]
    if not lanes:
        return torch.empty(0, dtype=torch.int32, device=codes.device)
    low, high = torch.cat(lanes, dim=1).unflatten(-1, (-1, _LANES)).unbind(-1)
    return (low | (high << UNIT)).to(torch.uint32).view(torch.int32).flatten()


def _lanes(codes: Tensor, segment: Segment) -> Tensor:
    """Units int64 [heads, units, channels], each below 2**16, of codes uint8 [heads, tokens, channels]."""
    plan = segment.plan
    missing = -codes.shape[1] % plan.digits
    digits = torch.nn.functional.pad(codes, (0, 0, 0, missing)).long().unflatten(1, (-1, plan.digits))
    value = torch.zeros_like(digits[:, :, 0])
    for digit in digits.unbind(2):
        value = (
            value * plan.levels + digit if _multiplies(plan) else (value << plan.bits // plan.digits) | digit
        )
    if _multiplies(plan):
        whole = plan.levels**plan.digits
        value = ((value << plan.bits) + whole - 1) // whole
    bit = torch.arange(value.shape[1], device=codes.device) * plan.bits
    spread = value << (bit % UNIT)[:, None]
    units = codes.new_zeros(codes.shape[0], segment.units + 1, codes.shape[2], dtype=torch.int64)
    units.index_add_(1, bit // UNIT, spread & 0xFFFF)  # bits of groups never overlap, so a sum is a union
    units.index_add_(1, bit // UNIT + 1, spread >> UNIT)
    return units[:, : segment.units]


def unpack(words: Tensor, layout: AlignedLayout) -> Tensor:
    """Codes uint8 [heads, tokens, head_dim], tokens as they lie; the inverse of ``pack``."""
    lanes = words.view(layout.heads, layout.units, layout.pairs, 1) >> torch.arange(
        0, UNIT * _LANES, UNIT, device=words.device
    )
    lanes = (lanes.long() & 0xFFFF).flatten(2)[..., : layout.head_dim]
    codes = [_codes(lanes[:, s.unit : s.unit + s.units], s) for s in layout.segments]
    return torch.cat(codes, dim=1) if codes else lanes.to(torch.uint8)


def _codes(lanes: Tensor, segment: Segment) -> Tensor:
    plan = segment.plan
    bit = torch.arange(-(-segment.tokens // plan.digits), device=lanes.device) * plan.bits
    beyond = torch.nn.functional.pad(lanes, (0, 0, 0, 1))
    both = lanes[:, bit // UNIT] | (beyond[:, bit // UNIT + 1] << UNIT)
    group = (both >> (bit % UNIT)[:, None]) & ((1 << plan.bits) - 1)
    digits = []
    for place in range(plan.digits):
        if _multiplies(plan):
            product = group * plan.levels
            digits.append(product >> plan.bits)
            group = product & ((1 << plan.bits) - 1)
        else:
            width = plan.bits // plan.digits
            digits.append((group >> width * (plan.digits - 1 - place)) & ((1 << width) - 1))
    return torch.stack(digits, dim=2).flatten(1, 2)[:, : segment.tokens].to(torch.uint8)


def _multiplies(plan: PackingPlan) -> bool:
    """Are digits found by multiplication, or do they simply follow each other?"""
    return plan.bits < plan.digits * (plan.levels - 1).bit_length()
