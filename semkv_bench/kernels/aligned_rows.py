"""Triton functions that read the codes of the aligned layout, three tokens and two channels at a time; see ``aligned``.

A packing plan is a constant of the compiler, its number: so digits and bits are unrolled, and masks known.
"""

import triton
import triton.language as tl

from semkv_bench.grid.levels import aligned_plan

__all__ = [
    "CODE_UNIT",
    "E2M1_UNIT",
    "TABLE_UNIT",
    "as_float16",
    "block_codes",
    "block_exponent",
    "blocks_of",
    "code_unit",
    "codes_below_zero",
    "exponent",
    "float_codes",
    "float_unit",
    "grouped_values",
    "high_and_low",
    "load_groups",
    "load_scales",
    "load_step",
    "next_digit",
    "own_block",
    "plan_bits",
    "plan_digits",
    "plan_number",
    "table_values",
    "whole_codes",
]

CODE_UNIT = tl.constexpr(float(2**24))  # a float16 whose bits are the integer n < 2048 is n / 2**24
TABLE_UNIT = tl.constexpr(float(2**6))
E2M1_UNIT = tl.constexpr(float(2**14))  # e2m1 has a bias of 1, float16 of 15
_LEAST_SCALE = tl.constexpr(float(2**-24))
_LEAST_BLOCK_SCALE = tl.constexpr(float(2**-100))


def plan_number(levels: int) -> int:
    """A packing plan as one constant of the compiler: levels, digits and bits."""
    plan = aligned_plan(levels)
    return (levels << 8) | (plan.digits << 4) | plan.bits


@triton.constexpr_function
def plan_levels(plan):
    """Level count of a plan's number."""
    return plan >> 8


@triton.constexpr_function
def plan_digits(plan):
    """Digits of a group."""
    return (plan >> 4) & 15


@triton.constexpr_function
def plan_bits(plan):
    """Bits of a group."""
    return plan & 15


@triton.constexpr_function
def code_width(plan):
    """Bits of a code."""
    return ((plan >> 8) - 1).bit_length()


@triton.constexpr_function
def multiplies(plan):
    """Are digits found by multiplication?"""
    return (plan & 15) < ((plan >> 4) & 15) * ((plan >> 8) - 1).bit_length()


@triton.constexpr_function
def digit_first(plan, place):
    """The lowest bit of the digit of the group's token number ``place``, where it is cut out."""
    levels, digits, bits = plan >> 8, (plan >> 4) & 15, plan & 15
    width = (levels - 1).bit_length()
    return bits if bits < digits * width else (digits - 1 - place) * width if digits > 1 else 0


@triton.constexpr_function
def digit_kept(plan, place, whole):
    """The bit where a digit stays when it is cut out of its group; 0: it is moved there.

    A float16 grows by 2**-24 from one bit pattern to the next up to bit 10, so a digit below bit 11 need not move.
    """
    levels, digits, bits = plan >> 8, (plan >> 4) & 15, plan & 15
    width = (levels - 1).bit_length()
    first = bits if bits < digits * width else (digits - 1 - place) * width if digits > 1 else 0
    return 0 if whole or first + width > 11 else first


@triton.constexpr_function
def code_unit(plan, place):
    """What to multiply a digit as float16 by."""
    levels, digits, bits = plan >> 8, (plan >> 4) & 15, plan & 15
    width = (levels - 1).bit_length()
    first = bits if bits < digits * width else (digits - 1 - place) * width if digits > 1 else 0
    return float(2 ** (24 - (0 if first + width > 11 else first)))


@triton.jit
def load_groups(
    words, group, there, row, column, PAIRS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr,
    PERIOD: tl.constexpr, PLACE: tl.constexpr,
):  # fmt: skip
    """Two channels' groups in every word of [ROWS, WIDTH], one in each half, from int32 words [units, PAIRS].

    group: int32 [ROWS], ``row * PERIOD + PLACE`` but for multiples of 16. Where not ``there``, and beyond PAIRS, any
    bits come out: they meet weights and queries of zero.
    """
    lanes: tl.constexpr = ((1 << BITS) - 1) * 65537
    shift = (((row * PERIOD + PLACE) & 15) * BITS & 15).to(tl.uint32)
    at = ((group * BITS) >> 4)[:, None] * PAIRS + column[None, :]
    inside = there[:, None] if PAIRS == WIDTH else there[:, None] & (column < PAIRS)[None, :]
    low = tl.load(words + at, mask=inside).to(tl.uint32, bitcast=True) >> shift[:, None]
    if 16 % BITS == 0:
        groups = low & lanes
    else:
        straddles = inside & (shift + BITS > 16)[:, None]
        high = (
            tl.load(words + at + PAIRS, mask=straddles).to(tl.uint32, bitcast=True) << (16 - shift)[:, None]
        )
        here = ((0xFFFF >> shift) * 65537) & lanes
        groups = (low & here[:, None]) | (high & (lanes & ~here)[:, None])
    return groups


@triton.jit
def next_digit(groups, PLAN: tl.constexpr, PLACE: tl.constexpr, WHOLE: tl.constexpr):
    """A digit of every group, moved to bit 0 if WHOLE (see ``digit_kept``), and what the next one is found in."""
    first: tl.constexpr = digit_first(PLAN, PLACE)
    mask: tl.constexpr = ((1 << code_width(PLAN)) - 1) * 65537
    if multiplies(PLAN):
        groups = groups * plan_levels(PLAN)
    if digit_kept(PLAN, PLACE, WHOLE) == first:  # noqa: SIM108
        digit = groups & (mask << first)
    else:
        digit = (groups >> first) & mask
    if multiplies(PLAN):
        groups = groups & (((1 << plan_bits(PLAN)) - 1) * 65537)
    return digit, groups


@triton.jit
def channels(pair, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Halves of words [ROWS, WIDTH] as uint16 [ROWS, 2 * WIDTH]."""
    low = pair.to(tl.uint16)
    high = (pair >> 16).to(tl.uint16)
    return tl.reshape(tl.join(low, high), [ROWS, 2 * WIDTH])


@triton.jit
def whole_codes(pair, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Codes int32 [ROWS, 2 * WIDTH] of digits at bit 0."""
    return channels(pair, ROWS, WIDTH).to(tl.int32)


@triton.jit
def as_float16(pair, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Digits as float16 [ROWS, 2 * WIDTH], in units of 2**-24."""
    return channels(pair, ROWS, WIDTH).to(tl.float16, bitcast=True)


@triton.constexpr_function
def float_unit(kind):
    """What to multiply a small float by that was read as a float16: e4m3 has a bias of 7 and not of 15."""
    return float(2**8) if kind == 3 else 1.0


@triton.jit
def float_codes(pair, KIND: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Small floats, two in every word at bits 0 and 16, as float16 [ROWS, 2 * WIDTH], exact, in their unit."""
    if KIND == 3:  # noqa: SIM108
        pair = ((pair & 0x00800080) << 8) | ((pair & 0x007F007F) << 7)
    else:
        pair = pair << 8
    return channels(pair, ROWS, WIDTH).to(tl.float16, bitcast=True)


@triton.jit
def block_codes(groups, PLAN: tl.constexpr, PLACE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Digits that are e2m1 as float16 [ROWS, 2 * WIDTH], exact, in units of E2M1_UNIT: sign and rest are moved."""
    first: tl.constexpr = digit_first(PLAN, PLACE)
    pair = ((groups << (12 - first)) & 0x80008000) | ((groups << (9 - first)) & 0x0E000E00)
    return channels(pair, ROWS, WIDTH).to(tl.float16, bitcast=True)


@triton.constexpr_function
def blocks_of(groups):
    """Blocks of channels that tensors have room for, a power of two."""
    return triton.next_power_of_2(groups)


@triton.constexpr_function
def codes_below_zero(plan):
    """The code that stands for zero, of codes of either sign."""
    return float((plan >> 8) // 2)


@triton.jit
def own_block(column, HEAD_DIM: tl.constexpr, GROUPS: tl.constexpr):
    """Which block of channels each channel is of, bool [2 * WIDTH, blocks, 1]."""
    block = tl.arange(0, blocks_of(GROUPS))
    own = tl.minimum(column, HEAD_DIM - 1) // (HEAD_DIM // GROUPS)
    return (own[:, None] == block[None, :])[:, :, None]


@triton.jit
def load_scales(metadata, token, whole, KIND: tl.constexpr, GROUPS: tl.constexpr):
    """Scales of a token's blocks of channels, times ``whole``, float32 [ROWS, blocks]; 0 beyond GROUPS."""
    block = tl.arange(0, blocks_of(GROUPS))
    at = token[:, None] * GROUPS + block[None, :]
    there = (block < GROUPS)[None, :]
    if KIND == 5:
        scale = (tl.load(metadata + at, mask=there, other=0).to(tl.uint32) << 23).to(tl.float32, bitcast=True)
    elif KIND == 6:
        bits = (tl.load(metadata + at, mask=there, other=0).to(tl.uint32) << 7).to(tl.uint16)
        scale = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    else:
        scale = tl.load(metadata.to(tl.pointer_type(tl.float16)) + at, mask=there, other=0.0).to(tl.float32)
    return scale * whole


@triton.jit
def high_and_low(x):
    """Two float16 whose sum is x to 22 bits."""
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16)


@triton.jit
def grouped_values(code, metadata, token, column, HEAD_DIM: tl.constexpr, GROUPS: tl.constexpr):
    """Values float32 [ROWS, 2 * WIDTH] of codes; metadata: GROUPS scales, then as many zeros of a token."""
    group = tl.minimum(column, HEAD_DIM - 1) // (HEAD_DIM // GROUPS)
    at = token[:, None] * (2 * GROUPS) + group[None, :]
    scale = tl.load(metadata + at).to(tl.float32)
    zero = tl.load(metadata + at + GROUPS).to(tl.float32)
    return tl.where((column < HEAD_DIM)[None, :], code.to(tl.float32) * scale + zero, 0.0)


@triton.jit
def table_values(code, table, column, HEAD_DIM: tl.constexpr):
    """Centroids [ROWS, 2 * WIDTH] of codes, from a table of floats, as a high and a low float16, times TABLE_UNIT."""
    centroid = tl.load(table + code)
    return high_and_low(tl.where((column < HEAD_DIM)[None, :], centroid * TABLE_UNIT, 0.0))


@triton.jit
def load_step(metadata, token, KIND: tl.constexpr):
    """Scale and zero of every token, float32; of a codebook, the norm and zeros; of small floats no zeros either."""
    if KIND == 0:
        both = tl.load(metadata.to(tl.pointer_type(tl.uint32)) + token)
        scale = both.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        zero = (both >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    elif KIND > 2:
        scale = tl.load(metadata.to(tl.pointer_type(tl.float32)) + token)
        zero = tl.zeros(scale.shape, dtype=tl.float32)
    else:
        scale = tl.load(metadata + token).to(tl.float32)
        zero = tl.zeros(scale.shape, dtype=tl.float32)
    return scale, zero


@triton.jit
def exponent(x):
    """log2 of a float16 x >= 0, rounded down; -24 at least."""
    bits = tl.maximum(x, _LEAST_SCALE).to(tl.uint32, bitcast=True)
    return ((bits >> 23).to(tl.int32) - 127).to(tl.float32)


@triton.jit
def block_exponent(scale):
    """log2 of the largest scale of each token [ROWS, blocks], rounded down; -100 at least.

    Scales reach further down than float16's; so far weights, which grow as they fall, sum up within float32.
    """
    bits = tl.maximum(tl.max(tl.abs(scale), axis=1), _LEAST_BLOCK_SCALE).to(tl.uint32, bitcast=True)
    return ((bits >> 23).to(tl.int32) - 127).to(tl.float32)
