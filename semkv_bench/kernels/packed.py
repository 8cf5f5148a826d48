"""The packed cache: what lies where, whatever mix of precisions the tokens have.

Tokens come in blocks (64 by default). Within a block the tokens of one level count form a class; for
each head the classes follow each other, ascending by levels, each one a stream of base-L digits: its
tokens in order, all values of a token, cut into the packing plan's groups of ``digits`` codes. A
group straddles tokens, so only the last one of a class can be partly empty. Groups of ``bits`` bits
follow each other without gaps, heads too; a block starts on a 32-bit word, lowest bit first.

A group with value V (first digit most significant) is stored as the fraction ceil(V * 2**w / L**k).
Then digit j is ((x * L**j mod 2**w) * L) >> w: reading takes two multiplications and no division.
The fraction is exact where it matters, for L**k <= 2**w. Groups of up to 28 bits are read in 32-bit
arithmetic, those of up to 56 in 64-bit; a few level counts above 59 have groups of up to 103 bits, which
are read digit by digit from two limbs, as all longer than 28 are written: x = F_0 with
F_j = ceil((d_j * 2**w + F_(j+1)) / L), F_k = 0, since ceilings of quotients nest.

Nothing else is stored but each token's class (0, 1, 2 or 4 bits, one for all heads) and where each
block starts. All of it counts in ``total_nbytes``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from semkv_bench.errors import SemkvError
from semkv_bench.grid.levels import MAX_LEVELS, packing_plan
from semkv_bench.kernels.codebook_tables import CodebookTables
from semkv_bench.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from semkv_bench.kernels.aligned import AlignedLayout

__all__ = [
    "E2M1",
    "LIMB",
    "MAX_BLOCK",
    "PackedLayout",
    "PackedVectors",
    "arithmetic",
    "class_bits",
    "class_table",
    "e2m1_table",
    "largest_block",
    "pack_classes",
    "plan_tables",
    "too_large",
    "total_nbytes",
    "unpack_classes",
    "upload",
]

MAX_BLOCK = 256
LIMB = 52  # bits of a limb, so that limb * L fits 63 bits

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of e2m1 by the lower three of their bits; the highest one is the sign."""

_MAX_VALUES = 1 << 16  # of one head in a block, so that digits can be counted in few bits
_MAX_CLASSES = 16
# Bits of a group up to which x * L fits 32 bits; 64 bits, for the 256 levels of the largest L; two limbs.
_ARITHMETIC = (28, 56, 2 * LIMB)


@dataclass(frozen=True, eq=False)
class PackedLayout:
    """Where the codes of ``tokens`` vectors per head lie.

    class_levels  level counts in use, ascending
    token_class   uint8, the class of each token, ``class_bits`` bits a token from the lowest bit up
    block_start   int32 [blocks + 1], first word of each block, and the end
    words         number of 32-bit words
    longest       words of the longest block
    """

    heads: int
    head_dim: int
    tokens: int
    block: int
    class_levels: tuple[int, ...]
    token_class: Tensor
    block_start: Tensor
    words: int
    longest: int

    @property
    def blocks(self) -> int:
        """Number of blocks, the last perhaps incomplete."""
        return len(self.block_start) - 1

    @property
    def class_bits(self) -> int:
        """Bits that hold a token's class: 0, 1, 2 or 4, so that none straddles a byte."""
        return class_bits(len(self.class_levels))

    @property
    def nbytes(self) -> int:
        """Bytes of the layout itself."""
        return self.token_class.nbytes + self.block_start.nbytes + len(self.class_levels)

    @property
    def in_order(self) -> bool:
        """Do tokens lie in the order of the text?"""
        return True

    @property
    def ends_block(self) -> bool:
        """May words of later tokens simply follow? Blocks lie one after the other and know nothing of each other."""
        return self.tokens % self.block == 0

    def sort(self, x: Tensor) -> Tensor:
        """x [heads, tokens, ...] of the text, as tokens lie: in that order."""
        return x

    unsort = sort

    def classes(self) -> Tensor:
        """Class of every token, int64 [tokens]."""
        return unpack_classes(self.token_class, self.class_bits, self.tokens)

    def levels(self) -> Tensor:
        """Level count of every token, int64 [tokens]."""
        return upload(torch.tensor(self.class_levels), self.token_class.device)[self.classes()]

    @classmethod
    def build(cls, levels: Tensor, heads: int, head_dim: int, block: int = 64) -> PackedLayout:
        """Layout for tokens of the given levels, int64 [tokens], on their device.

        Raises ValueError unless levels lie in 2..256, at most 16 different ones, and ``block`` is a power of
        two, 16..256, that holds at most 65,536 values of a head.
        """
        if block & (block - 1) or not 16 <= block <= MAX_BLOCK or block * head_dim > _MAX_VALUES:
            raise ValueError(f"no packing of blocks of {block} tokens of {head_dim} values")
        device, levels = levels.device, levels.cpu()  # read once; all that follows is small
        if levels.numel() and not (int(levels.min()) >= 2 and int(levels.max()) <= MAX_LEVELS):
            raise ValueError(f"packed levels must lie in 2..{MAX_LEVELS}")
        distinct, classes = levels.unique(return_inverse=True)
        class_levels = tuple(distinct.tolist()) or (2,)
        if len(class_levels) > _MAX_CLASSES:
            raise ValueError(f"at most {_MAX_CLASSES} different level counts, not {len(class_levels)}")
        blocks = -(-len(levels) // block)
        padded = torch.full((blocks * block,), -1, dtype=torch.int64, device=levels.device)
        padded[: len(levels)] = classes
        head_bits = torch.zeros(blocks, dtype=torch.int64, device=levels.device)
        for index, count in enumerate(class_levels):
            plan = packing_plan(count)
            values = (padded.view(blocks, block) == index).sum(1) * head_dim
            head_bits += (values + plan.digits - 1) // plan.digits * plan.bits
        block_words = (head_bits * heads + 31) // 32
        words = int(block_words.sum())
        if words >= 1 << 31:
            raise too_large(words, len(levels))
        block_start = torch.zeros(blocks + 1, dtype=torch.int32, device=levels.device)
        block_start[1:] = block_words.cumsum(0)
        return cls(
            heads,
            head_dim,
            len(levels),
            block,
            class_levels,
            upload(pack_classes(classes, class_bits(len(class_levels))), device),
            upload(block_start, device),
            words,
            int(block_words.max()) if blocks else 0,
        )


@dataclass(frozen=True, eq=False)
class PackedVectors:
    """Packed vectors with their metadata: affine if there is a ``zero``, numbers by a scale alone if there is an
    ``element``, else codebook coded.

    words  int32 [layout.words]
    scale  float16 [heads, tokens, groups]; of codebook coding the norm, [heads, tokens, 1]; tokens as they lie
    zero   float16 [heads, tokens, groups] of affine coding
    tables codebooks, of codebook coding; what is coded then are rotated vectors
    element  ``e4m3`` or ``e5m2``: codes are the bits of small floats, 256 levels, and scale is float32, one a token;
             ``e2m1``: 16 levels, their bits; scale is float8_e4m3fn, or an e8m0 as its bits, uint8, and not 0;
             ``symmetric``: code L/2, rounded down, is zero, and scale is float16
    whole    what all values are multiplied by besides, of e2m1
    """

    layout: PackedLayout | AlignedLayout
    words: Tensor
    scale: Tensor
    zero: Tensor | None = None
    tables: CodebookTables | None = None
    element: str | None = None
    whole: float = 1.0

    @property
    def is_affine(self) -> bool:
        """Affine coded, or else with a codebook?"""
        return self.zero is not None

    @property
    def groups(self) -> int:
        """Groups of a vector that have metadata of their own."""
        return self.scale.shape[-1]

    @property
    def offset(self) -> Tensor:
        """What a kernel reads beside the scale: zeros or centroids."""
        return self.zero if self.tables is None else self.tables.centroids

    @property
    def top(self) -> int:
        """Columns of the table of centroids; 0 for affine coding."""
        return 0 if self.tables is None else self.tables.top

    @property
    def nbytes(self) -> int:
        """Bytes of codes and metadata, without the layout, which keys and values may share."""
        return self.words.nbytes + self.scale.nbytes + (0 if self.zero is None else self.zero.nbytes)


def largest_block(head_dim: int) -> int:
    """Tokens of the largest block of vectors of ``head_dim`` values, a power of two.

    >>> largest_block(256), largest_block(576)
    (256, 64)
    """
    return min(MAX_BLOCK, 1 << (_MAX_VALUES // head_dim).bit_length() - 1)


def too_large(words: int, tokens: int) -> SemkvError:
    """What to raise where the codes of ``tokens`` tokens take more words than offsets of 32 bits reach."""
    return SemkvError(
        f"codes of {tokens} tokens take {words} words of one layer and side, and {(1 << 31) - 1} are the most: "
        "use a shorter context"
    )


def total_nbytes(vectors: Iterable[PackedVectors]) -> int:
    """Bytes that packed vectors hold together, a shared layout counted once.

    Codebooks and plan tables are constants of the program and not counted.
    """
    vectors = list(vectors)
    layouts = {id(packed.layout): packed.layout for packed in vectors}
    return sum(packed.nbytes for packed in vectors) + sum(layout.nbytes for layout in layouts.values())


def arithmetic(class_levels: tuple[int, ...]) -> int:
    """The bits that groups of these levels are read in: 28, 56 or 104.

    >>> [arithmetic((levels,)) for levels in (5, 11, 24, 242, 255)]
    [28, 56, 28, 104, 28]
    """
    longest = max(packing_plan(levels).bits for levels in class_levels)
    return next(bits for bits in _ARITHMETIC if longest <= bits)


@lru_cache(maxsize=8)
def plan_tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """Plans int32 [257, 2] (digits, bits) and powers int64 [257, 16] (L**j) by level count, on ``device``.

    Rows of groups that are read from limbs have no powers.
    """
    plans = torch.ones(MAX_LEVELS + 1, 2, dtype=torch.int32)
    powers = torch.zeros(MAX_LEVELS + 1, 16, dtype=torch.int64)
    for levels in range(2, MAX_LEVELS + 1):
        plan = packing_plan(levels)
        plans[levels] = torch.tensor([plan.digits, plan.bits])
        if arithmetic((levels,)) <= 56:
            powers[levels, : plan.digits] = torch.tensor([levels**j for j in range(plan.digits)])
    return plans.to(device), powers.to(device)


@lru_cache(maxsize=256)
def class_table(class_levels: tuple[int, ...], device: torch.device) -> Tensor:
    """Levels by class, int32 [classes], on ``device``."""
    return torch.tensor(class_levels, dtype=torch.int32).to(device)


def upload(x: Tensor, device: torch.device) -> Tensor:
    """x on ``device``: a GPU's work so far is not waited for, as by a plain copy."""
    # Of all that copy without waiting CUDA alone is known to take what x holds before this returns.
    return x.to(device, non_blocking=device.type != "mps")


@lru_cache(maxsize=8)
def e2m1_table(device: torch.device) -> Tensor:
    """Numbers by the bits of e2m1, float32 [16], on ``device``."""
    return torch.tensor([sign * size for sign in (1.0, -1.0) for size in E2M1]).to(device)


def class_bits(classes: int) -> int:
    """Bits that hold one of so many classes: 0, 1, 2, 4 or 8, so that none straddles a byte."""
    return next(bits for bits in (0, 1, 2, 4, 8) if classes <= 1 << bits)


def unpack_classes(packed: Tensor, bits: int, tokens: int) -> Tensor:
    """Classes int64 [tokens]; the inverse of ``pack_classes``."""
    if not bits:
        return torch.zeros(tokens, dtype=torch.int64, device=packed.device)
    shifts = torch.arange(0, 8, bits, device=packed.device)
    return ((packed[:, None].long() >> shifts) & ((1 << bits) - 1)).flatten()[:tokens]


def pack_classes(classes: Tensor, bits: int) -> Tensor:
    """Classes int64 [tokens] in ``bits`` bits each, uint8, from the lowest bit up."""
    if not bits:
        return torch.empty(0, dtype=torch.uint8, device=classes.device)
    per_byte = 8 // bits
    padded = torch.zeros(-(-len(classes) // per_byte) * per_byte, dtype=torch.int64, device=classes.device)
    padded[: len(classes)] = classes
    shifts = torch.arange(0, 8, bits, device=classes.device)
    return (padded.view(-1, per_byte) << shifts).sum(1).to(torch.uint8)
