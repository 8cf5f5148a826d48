"""Triton kernels for ``packing_reference``: same signatures, same words and codes to the bit.

Tokens of different precision go through one launch. Packing works word by word: a program walks the
groups that a word overlaps, across tokens, classes and heads, so every word is written once and
nothing has to be cleared or added atomically.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from semkv_bench.grid.levels import packing_plan
from semkv_bench.kernels.launch import finite_cast, interpreted, launch, unit_stride
from semkv_bench.kernels.packed import PackedLayout, PackedVectors, arithmetic, class_table, plan_tables
from semkv_bench.kernels.packed_rows import dequantize, load_codes, locate

__all__ = ["pack", "unpack", "unpack_dequantize"]

# Of one launch: the second axis of a grid has 65,535 programs, and whole sixteens keep pointers aligned.
_BLOCKS = 65520


@triton.jit
def bits_of_head(counts, class_levels, plans, classes, HEAD_DIM: tl.constexpr):
    """Bits that one head takes of a block whose classes have ``counts`` [classes] tokens."""
    head_bits = 0
    for index in range(0, classes):
        count = tl.load(class_levels + index)
        digits = tl.load(plans + count * 2)
        values = tl.load(counts + index) * HEAD_DIM
        head_bits += (values + digits - 1) // digits * tl.load(plans + count * 2 + 1)
    return head_bits


@triton.jit
def class_at(within, counts, class_levels, plans, classes, HEAD_DIM: tl.constexpr, WORDS: tl.constexpr):
    """The class that has bit ``within`` [WORDS] of a head: its levels, digits and bits of a group, number of
    values, first token in ``order`` and first bit, all int32 [WORDS]."""
    levels = tl.full([WORDS], 2, dtype=tl.int32)
    digits = tl.full([WORDS], 1, dtype=tl.int32)
    bits = tl.full([WORDS], 1, dtype=tl.int32)
    values = tl.zeros([WORDS], dtype=tl.int32)
    first_token = tl.zeros([WORDS], dtype=tl.int32)
    base = tl.zeros([WORDS], dtype=tl.int32)
    tokens_before = 0
    bits_before = 0
    for index in range(0, classes):
        count = tl.load(class_levels + index)
        class_digits = tl.load(plans + count * 2)
        class_bits = tl.load(plans + count * 2 + 1)
        members = tl.load(counts + index)
        reached = (within >= bits_before) & (members > 0)
        levels = tl.where(reached, count, levels)
        digits = tl.where(reached, class_digits, digits)
        bits = tl.where(reached, class_bits, bits)
        values = tl.where(reached, members * HEAD_DIM, values)
        first_token = tl.where(reached, tokens_before, first_token)
        base = tl.where(reached, bits_before, base)
        tokens_before += members
        bits_before += (members * HEAD_DIM + class_digits - 1) // class_digits * class_bits
    return levels, digits, bits, values, first_token, base


@triton.jit
def code_at(codes, order, row_start, first_token, element, there, codes_token, HEAD_DIM: tl.constexpr):
    """Code int64 [WORDS] of the ``element``-th value of a class, 0 where not ``there``."""
    token = tl.load(order + first_token + element // HEAD_DIM, mask=there, other=0)
    return tl.load(codes + row_start + token * codes_token + element % HEAD_DIM, mask=there, other=0).to(
        tl.int64
    )


@triton.jit
def short_fraction(value, whole, bits, skipped):
    """Bits from ``skipped`` on of ceil(value * 2**bits / whole), for groups of up to 28 bits."""
    shifted = value << bits.to(tl.int64)
    part = shifted // whole + (shifted % whole > 0).to(tl.int64)
    return part >> skipped.to(tl.int64)


@triton.jit
def long_fraction(low, high, low_bits, inexact, skipped):
    """Bits from ``skipped`` on of a fraction in two limbs, rounded up; the lowest 32 of them count."""
    low += inexact.to(tl.int64)
    high += low >> low_bits
    low &= (1 << low_bits) - 1
    beyond = tl.maximum(skipped - 52, 0).to(tl.int64)
    part = low >> tl.minimum(skipped, 52).to(tl.int64)
    return part | ((high >> beyond) << tl.maximum(52 - skipped, 0).to(tl.int64))


@triton.jit
def pack_kernel(
    codes,  # uint8 [heads, tokens, head_dim]
    order,  # int64 [tokens], tokens by block and class
    counts,  # int32 [blocks, classes], tokens of each class
    class_levels,  # int32 [classes]
    plans,  # int32 [257, 2], digits and bits of a group
    powers,  # int64 [257, 16], L**j
    block_start,  # int32 [blocks + 1], in words
    words,  # int32, what is written
    heads,
    classes,
    steps,  # groups that one word can overlap
    codes_head,  # strides, in elements
    codes_token,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
    DIGITS: tl.constexpr,  # most digits in a group
    ARITHMETIC: tl.constexpr,  # bits of the longest group, see ``packed.arithmetic``
):
    """Write WORDS words of block ``program_id(1)``: for each word the groups that it overlaps, one by one.

    A group of k digits d_j is stored as ceil(V * 2**bits / L**k) with V = sum of d_j * L**(k-1-j).
    """
    block = tl.program_id(1).to(tl.int64)
    first_word = tl.load(block_start + block)
    length = tl.load(block_start + block + 1) - first_word
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    counts += block * classes
    order += block * BLOCK
    head_bits = bits_of_head(counts, class_levels, plans, classes, HEAD_DIM)

    position = word * 32
    collected = tl.zeros([WORDS], dtype=tl.int64)
    for _ in range(0, steps):
        inside = (position < word * 32 + 32) & (position < heads * head_bits)
        head = tl.where(inside, position // head_bits, 0)
        within = position - head * head_bits
        levels, digits, bits, values, first_token, base = class_at(
            within, counts, class_levels, plans, classes, HEAD_DIM, WORDS
        )
        group = (within - base) // bits
        skipped = (within - base) - group * bits
        row_start = head.to(tl.int64) * codes_head
        value = tl.zeros([WORDS], dtype=tl.int64)
        low = tl.zeros([WORDS], dtype=tl.int64)
        high = tl.zeros([WORDS], dtype=tl.int64)
        inexact = tl.zeros([WORDS], dtype=tl.int1)
        low_bits = tl.minimum(bits, 52).to(tl.int64)
        high_bits = bits.to(tl.int64) - low_bits
        for place in range(0, DIGITS):
            # Short groups are summed up from the first digit and divided once, long ones from the last.
            digit = place if ARITHMETIC == 28 else DIGITS - 1 - place
            element = group * digits + digit
            there = inside & (digit < digits) & (element < values)
            code = code_at(codes, order, row_start, first_token, element, there, codes_token, HEAD_DIM)
            if ARITHMETIC == 28:
                value = tl.where(digit < digits, value * levels + code, value)
            else:
                dividend = (code << high_bits) | high
                rest = dividend % levels
                high = tl.where(digit < digits, dividend // levels, high)
                dividend = (rest << low_bits) | low
                low = tl.where(digit < digits, dividend // levels, low)
                inexact |= dividend % levels > 0

        if ARITHMETIC == 28:
            whole = tl.load(powers + levels * 16 + digits - 1) * levels
            part = short_fraction(value, whole, bits, skipped)
        else:
            part = long_fraction(low, high, low_bits, inexact, skipped)
        part &= 0xFFFFFFFF
        collected |= tl.where(inside, part << (position - word * 32).to(tl.int64), 0)
        position += bits - skipped
    packed = (collected & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
    tl.store(words + first_word.to(tl.int64) + word, packed, mask=word < length)


@triton.jit
def unpack_kernel(
    words,  # int32
    token_class,  # uint8, CLASS_BITS bits a token
    class_levels,  # int32 [classes]
    block_start,  # int32 [blocks + 1], in words
    plans,  # int32 [257, 2], digits and bits of a group
    powers,  # int64 [257, 16], L**j
    scale,  # float16 [heads, tokens, GROUPS], or norms
    offset,  # float16 zeros [heads, tokens, GROUPS], or float32 centroids [top + 1, top]
    out,  # codes uint8, or values [heads, tokens, head_dim], a head contiguous
    out_head,  # from one head to the next
    tokens,
    classes,
    top,
    CLASS_BITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    ARITHMETIC: tl.constexpr,
    CODES: tl.constexpr,  # write codes, or else values
    AFFINE: tl.constexpr,
):
    """Codes or values of TILE tokens of head ``program_id(1)``; see ``load_codes`` and ``dequantize``."""
    tiles = BLOCK // TILE
    block = (tl.program_id(0) // tiles).to(tl.int64)
    start = (tl.program_id(0) % tiles) * TILE
    head = tl.program_id(1)
    levels, digits, bits, rank, base, head_bits = locate(
        token_class, class_levels, plans, block, start, tokens, classes, CLASS_BITS, HEAD_DIM, BLOCK, TILE
    )
    token = block * BLOCK + start + tl.arange(0, TILE)
    column = tl.arange(0, WIDTH)
    row_mask = token < tokens
    mask = row_mask[:, None] & (column < HEAD_DIM)[None, :]
    here = words + tl.load(block_start + block)
    base += head * head_bits
    code = load_codes(here, powers, levels, digits, bits, rank, base, column, mask, HEAD_DIM, ARITHMETIC)
    row = head.to(tl.int64) * tokens + token
    at = (head.to(tl.int64) * out_head + token * HEAD_DIM)[:, None] + column[None, :]
    if CODES:
        tl.store(out + at, code.to(tl.uint8), mask=mask)
    else:
        value = dequantize(
            code, levels, row, row_mask, column, mask, scale, offset, top, AFFINE, GROUPS, HEAD_DIM // GROUPS
        )
        tl.store(out + at, finite_cast(value, out.dtype.element_ty), mask=mask)


def pack(codes: Tensor, layout: PackedLayout) -> Tensor:
    """See ``packing_reference.pack``."""
    words = torch.empty(layout.words, dtype=torch.int32, device=codes.device)
    if not layout.words:
        return words
    codes = unit_stride(codes)
    classes, plans = layout.classes(), [packing_plan(levels) for levels in layout.class_levels]
    block = torch.arange(layout.tokens, device=codes.device) // layout.block
    key = block * len(plans) + classes
    counts = torch.zeros(layout.blocks * len(plans), dtype=torch.int32, device=codes.device)
    counts.index_add_(0, key, torch.ones_like(key, dtype=torch.int32))  # unlike bincount reads nothing back
    longest = layout.longest
    per_program = min(words_per_program(), triton.next_power_of_2(longest))
    order = key.argsort(stable=True)
    for first in range(0, layout.blocks, _BLOCKS):
        launch(
            pack_kernel,
            (triton.cdiv(longest, per_program), min(_BLOCKS, layout.blocks - first)),
            codes,
            codes,
            order[first * layout.block :],
            counts[first * len(plans) :],
            class_table(layout.class_levels, codes.device),
            *plan_tables(codes.device),
            layout.block_start[first:],
            words,
            layout.heads,
            len(plans),
            1 + -(-32 // min(plan.bits for plan in plans)),
            *codes.stride()[:2],
            HEAD_DIM=layout.head_dim,
            BLOCK=layout.block,
            WORDS=per_program,
            DIGITS=max(plan.digits for plan in plans),
            ARITHMETIC=arithmetic(layout.class_levels),
        )
    return words


def unpack(words: Tensor, layout: PackedLayout) -> Tensor:
    """See ``packing_reference.unpack``."""
    codes = torch.empty(layout.heads, layout.tokens, layout.head_dim, dtype=torch.uint8, device=words.device)
    _launch_unpack(words, layout, codes, None)
    return codes


def unpack_dequantize(
    packed: PackedVectors, dtype: torch.dtype = torch.float32, out: Tensor | None = None
) -> Tensor:
    """See ``packing_reference.unpack_dequantize``."""
    shape = packed.layout.heads, packed.layout.tokens, packed.layout.head_dim
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=packed.words.device)
    # A head's tokens follow each other without gaps, as in a cache; heads lie wherever they do.
    if out.shape != shape or out.stride()[1:] != (shape[2], 1):
        raise ValueError(f"out must be [heads, tokens, head_dim] {shape} with tokens side by side")
    _launch_unpack(packed.words, packed.layout, out, packed)
    return out


def _launch_unpack(words: Tensor, layout: PackedLayout, out: Tensor, packed: PackedVectors | None) -> None:
    if not layout.tokens:
        return
    tile = tile_tokens(layout)
    launch(
        unpack_kernel,
        (layout.blocks * (layout.block // tile), layout.heads),
        words,
        words,
        layout.token_class,
        class_table(layout.class_levels, words.device),
        layout.block_start,
        *plan_tables(words.device),
        None if packed is None else packed.scale.contiguous(),
        None if packed is None else packed.offset.contiguous(),
        out,
        out.stride(0),
        layout.tokens,
        len(layout.class_levels),
        0 if packed is None else packed.top,
        CLASS_BITS=layout.class_bits,
        HEAD_DIM=layout.head_dim,
        WIDTH=triton.next_power_of_2(layout.head_dim),
        GROUPS=1 if packed is None else packed.groups,
        BLOCK=layout.block,
        TILE=tile,
        ARITHMETIC=arithmetic(layout.class_levels),
        CODES=packed is None,
        AFFINE=packed is not None and packed.is_affine,
    )


def words_per_program() -> int:
    """Words that a packing program writes, a power of two."""
    return 1 << 14 if interpreted() else 256


def tile_tokens(layout: PackedLayout, elements: int = 2048) -> int:
    """Tokens that a program takes at a time: a power of two that divides the block."""
    width = triton.next_power_of_2(layout.head_dim)
    return layout.block if interpreted() else max(1, min(layout.block, elements // width))
