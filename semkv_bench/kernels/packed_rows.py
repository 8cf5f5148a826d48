"""Triton functions that find and read the codes of packed tokens; see ``packed`` for the layout."""

import triton
import triton.language as tl

__all__ = ["dequantize", "load_codes", "locate", "token_classes"]


@triton.jit
def token_classes(token_class, token, tokens, CLASS_BITS: tl.constexpr):
    """Class of each token (int64 indices), -1 beyond the last one."""
    valid = token < tokens
    if CLASS_BITS == 0:
        found = tl.zeros(token.shape, dtype=tl.int32)
    else:
        bit = token * CLASS_BITS
        byte = tl.load(token_class + (bit >> 3), mask=valid, other=0).to(tl.int32)
        found = (byte >> (bit & 7).to(tl.int32)) & ((1 << CLASS_BITS) - 1)
    return tl.where(valid, found, -1)


@triton.jit
def locate(
    token_class,  # uint8, CLASS_BITS bits a token
    class_levels,  # int32 [classes]
    plans,  # int32 [257, 2], digits and bits of a group
    block,  # int64, index of the block
    start,  # first of the TILE tokens within the block
    tokens,
    classes,
    CLASS_BITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Where TILE tokens of a block lie.

    Returns levels, digits and bits of a group, rank in the class, the class's first bit within a head (all
    int32 [TILE]); and the bits of a whole head, the sum of ceil(tokens * HEAD_DIM / digits) * bits over classes.
    """
    first_token = block * BLOCK
    place = tl.arange(0, BLOCK)
    around = token_classes(token_class, first_token + place, tokens, CLASS_BITS)
    own = token_classes(token_class, first_token + start + tl.arange(0, TILE), tokens, CLASS_BITS)
    levels = tl.zeros([TILE], dtype=tl.int32)
    digits = tl.full([TILE], 1, dtype=tl.int32)
    bits = tl.zeros([TILE], dtype=tl.int32)
    rank = tl.zeros([TILE], dtype=tl.int32)
    base = tl.zeros([TILE], dtype=tl.int32)
    head_bits = 0
    for index in range(0, classes):
        count = tl.load(class_levels + index)
        group_digits = tl.load(plans + count * 2)
        group_bits = tl.load(plans + count * 2 + 1)
        member = own == index
        before = tl.sum(tl.where((around == index) & (place < start), 1, 0), axis=0)
        levels = tl.where(member, count, levels)
        digits = tl.where(member, group_digits, digits)
        bits = tl.where(member, group_bits, bits)
        rank = tl.where(member, before + tl.cumsum(member.to(tl.int32), axis=0) - 1, rank)
        base = tl.where(member, head_bits, base)
        values = tl.sum(tl.where(around == index, 1, 0), axis=0) * HEAD_DIM
        head_bits += (values + group_digits - 1) // group_digits * group_bits
    return levels, digits, bits, rank, base, head_bits


@triton.jit
def load_codes(
    words,  # int32, from the first word of the block
    powers,  # int64 [257, 16], L**j
    levels,  # int32 [TILE], as all of a token's below
    digits,  # of a group
    bits,  # of a group
    rank,  # of the token in its class
    base,  # first bit of the token's class, counted from the start of the block
    column,  # int32 [WIDTH]
    mask,  # [TILE, WIDTH]
    HEAD_DIM: tl.constexpr,
    ARITHMETIC: tl.constexpr,  # bits that the longest group is read in, see ``packed.arithmetic``
):
    """Codes int32 [TILE, WIDTH], 0 where ``mask`` is false.

    Value ``e = rank * HEAD_DIM + column`` of a class is digit j = e mod k of group e // k. With the group's
    fraction x of w bits the digit is ((x * L**j mod 2**w) * L) >> w; two limbs give one digit after another.
    """
    element = rank[:, None] * HEAD_DIM + column[None, :]
    # element // digits by multiplication: exact for element < 2**16 and digits <= 15.
    reciprocal = ((1 << 20) + digits - 1) // digits
    group = ((element.to(tl.int64) * reciprocal[:, None].to(tl.int64)) >> 20).to(tl.int32)
    digit = element - group * digits[:, None]
    position = base[:, None] + group * bits[:, None]
    if ARITHMETIC > 56:
        low_bits = tl.minimum(bits, 52)[:, None]
        high_bits = bits[:, None] - low_bits
        low = load_bits(words, position, low_bits, mask, True)
        high = load_bits(words, position + 52, high_bits, mask & (high_bits > 0), True)
        count = levels[:, None].to(tl.uint64)
        code = tl.zeros(position.shape, dtype=tl.uint64)
        for place in range(0, tl.max(digits, axis=0)):
            low_product = low * count
            high_product = high * count + (low_product >> low_bits.to(tl.uint64))
            low = low_product & ones(low_bits)
            high = high_product & ones(high_bits)
            code = tl.where(digit == place, high_product >> high_bits.to(tl.uint64), code)
    else:
        fraction = load_bits(words, position, bits[:, None], mask, ARITHMETIC > 28)
        power = tl.load(powers + levels[:, None] * 16 + digit, mask=mask, other=0)
        if ARITHMETIC > 28:
            scaled = (fraction * power.to(tl.uint64)) & ones(bits[:, None])
            code = (scaled * levels[:, None].to(tl.uint64)) >> bits[:, None].to(tl.uint64)
        else:
            keep = (tl.full([1, 1], 1, dtype=tl.uint32) << bits[:, None].to(tl.uint32)) - 1
            narrow = (fraction.to(tl.uint32) * power.to(tl.uint32)) & keep
            code = (narrow * levels[:, None].to(tl.uint32)) >> bits[:, None].to(tl.uint32)
    return code.to(tl.int32)


@triton.jit
def ones(bits):
    """The lowest ``bits`` bits, uint64, for bits < 64."""
    return (tl.full([1, 1], 1, dtype=tl.uint64) << bits.to(tl.uint64)) - 1


@triton.jit
def load_bits(words, position, bits, mask, LONG: tl.constexpr):
    """The ``bits`` bits from bit ``position`` of int32 words, uint64; LONG: more than 33 of them may be asked for."""
    word = position >> 5
    shift = position & 31
    end = shift + bits
    low = tl.load(words + word, mask=mask, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(words + word + 1, mask=mask & (end > 32), other=0).to(tl.uint32, bitcast=True)
    found = (low | (high.to(tl.uint64) << 32)) >> shift.to(tl.uint64)
    if LONG:
        last = tl.load(words + word + 2, mask=mask & (end > 64), other=0).to(tl.uint32, bitcast=True)
        # In two steps, for a shift of 64 is not defined.
        found |= (last.to(tl.uint64) << 1) << (63 - shift).to(tl.uint64)
    return found & ones(bits)


@triton.jit
def dequantize(
    code,  # int32 [TILE, WIDTH]
    levels,  # int32 [TILE]
    row,  # int64 [TILE], head * tokens + token
    row_mask,
    column,  # int32 [WIDTH]
    mask,  # [TILE, WIDTH]
    scale,  # float16 [heads, tokens, groups], or norms
    offset,  # float16 zeros [heads, tokens, groups], or float32 centroids [top + 1, top]
    top,
    AFFINE: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Values float32 [TILE, WIDTH] of codes: zero + code * scale, or centroids[L, code] * norm."""
    if AFFINE:
        if GROUPS == 1:
            step = tl.load(scale + row, mask=row_mask, other=0.0).to(tl.float32)[:, None]
            zero = tl.load(offset + row, mask=row_mask, other=0.0).to(tl.float32)[:, None]
        else:
            at = row[:, None] * GROUPS + (column // GROUP)[None, :]
            step = tl.load(scale + at, mask=mask, other=0.0).to(tl.float32)
            zero = tl.load(offset + at, mask=mask, other=0.0).to(tl.float32)
        value = zero + code.to(tl.float32) * step
    else:
        norm = tl.load(scale + row, mask=row_mask, other=0.0).to(tl.float32)[:, None]
        centroid = tl.load(offset + levels[:, None] * top + code, mask=mask, other=0.0)
        value = centroid * norm
    return value
