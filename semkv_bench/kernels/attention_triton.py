"""Triton kernel for ``attention_reference``: attention in the domain of codes.

With a token's value = scale * code + zero, score = scale (q . code) + zero sum(q) and output = sum (p scale) code +
sum p zero. So codes go into matrix instructions as they are, exact in float16, and no value is ever scaled by itself.
What meets them, queries and weights, is split into a high and a low float16. See ``docs/kernels.md``.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from semkv_bench.kernels.aligned_rows import (
    CODE_UNIT,
    E2M1_UNIT,
    TABLE_UNIT,
    as_float16,
    block_codes,
    block_exponent,
    blocks_of,
    code_unit,
    codes_below_zero,
    exponent,
    float_codes,
    float_unit,
    grouped_values,
    high_and_low,
    load_groups,
    load_scales,
    load_step,
    next_digit,
    own_block,
    plan_bits,
    plan_digits,
    plan_number,
    table_values,
    whole_codes,
)
from semkv_bench.kernels.attention_jobs import FIELDS, MX, Work, attention_work, tile_rows
from semkv_bench.kernels.attention_reference import merge_attention
from semkv_bench.kernels.launch import launch

__all__ = ["attention_work", "packed_attention"]

_FIELDS = tl.constexpr(FIELDS)
_KINDS = 4  # pairs of level counts that one launch has code for
_QUERIES = 16  # of one head that a program takes
_COLUMNS = 64  # blocks of channels times queries, unless eight queries are more
_PLAIN_TOKENS = 256  # tokens in 16 bits that a program takes
_WEIGHT_UNIT = tl.constexpr(float(2**14))


@triton.jit
def load_query(query, member, GROUP, column, HEAD_DIM: tl.constexpr, QUERIES: tl.constexpr):
    """Queries of one head, float32 [2 * WIDTH, QUERIES]."""
    mask = (column < HEAD_DIM)[:, None] & (member < GROUP)[None, :]
    return tl.load(query + member[None, :] * HEAD_DIM + column[:, None], mask=mask, other=0.0).to(tl.float32)


@triton.constexpr_function
def scale_alignment(kind, groups):
    """What divides the address of a token's scales by block, in bytes."""
    size = groups * (2 if kind == 7 else 1)
    return min(16, size & -size)


@triton.jit
def power_of_two_below(x):
    """The largest power of two up to x >= 0, and at least 2**-100."""
    bits = tl.maximum(x, 7.888609052210118e-31).to(tl.uint32, bitcast=True) & 0x7F800000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def store_part(weighted, highest, total, out, log_sums, member, group, column, HEAD_DIM: tl.constexpr):
    """weighted [2 * WIDTH, QUERIES] and total [QUERIES], in units of exp2(highest), as output and natural log-sum."""
    some = total > 0
    result = weighted / tl.where(some, total, 1.0)[None, :]
    mask = (column < HEAD_DIM)[:, None] & (member < group)[None, :]
    tl.store(out + member[None, :] * HEAD_DIM + column[:, None], result, mask=mask)
    log_sum = tl.where(
        some, (highest + tl.log2(tl.where(some, total, 1.0))) * 0.6931471805599453, float("-inf")
    )
    tl.store(log_sums + member, log_sum, mask=member < group)


@triton.jit
def attend_coded(
    query, job, head, out, log_sums, member, group, scale_log2,
    KEY_PLAN: tl.constexpr, VALUE_PLAN: tl.constexpr, KEY_KIND: tl.constexpr, VALUE_KIND: tl.constexpr,
    KEY_GROUPS: tl.constexpr, VALUE_GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, QUERIES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of one head's queries over the tokens of one job, all of one pair of level counts.

    Three tokens in a row have one row of a tile, one for each of their groups' digits.
    """
    PAIRS: tl.constexpr = (HEAD_DIM + 1) // 2
    # A row of channels starts where 128 bits can be read, if its length is such.
    ALIGNED: tl.constexpr = 16 if PAIRS % 4 == 0 else 4
    key_words = tl.multiple_of(
        tl.load(job + 1).to(tl.pointer_type(tl.int32)) + head * tl.load(job + 2), ALIGNED
    )
    value_words = tl.multiple_of(
        tl.load(job + 3).to(tl.pointer_type(tl.int32)) + head * tl.load(job + 4), ALIGNED
    )
    if KEY_KIND > 4:
        key_metadata = tl.load(job + 5).to(tl.pointer_type(tl.uint8)) + head * tl.load(job + 6)
        key_metadata = tl.multiple_of(key_metadata, scale_alignment(KEY_KIND, KEY_GROUPS))
        key_whole = tl.load(job + 11).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        key_metadata = tl.load(job + 5).to(tl.pointer_type(tl.float16)) + head * tl.load(job + 6)
    if VALUE_KIND > 4:
        value_metadata = tl.load(job + 7).to(tl.pointer_type(tl.uint8)) + head * tl.load(job + 8)
        value_metadata = tl.multiple_of(value_metadata, scale_alignment(VALUE_KIND, VALUE_GROUPS))
        value_whole = tl.load(job + 12).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        value_metadata = tl.load(job + 7).to(tl.pointer_type(tl.float16)) + head * tl.load(job + 8)
    first = tl.load(job + 9).to(tl.int32)
    last = tl.load(job + 10).to(tl.int32)
    key_table = tl.load(job + 11).to(tl.pointer_type(tl.float32))
    value_table = tl.load(job + 12).to(tl.pointer_type(tl.float32))

    column = tl.arange(0, WIDTH)
    channel = tl.arange(0, 2 * WIDTH)
    row = tl.arange(0, ROWS)
    asked = load_query(query, member, group, channel, HEAD_DIM, QUERIES) * scale_log2
    asked_sum = tl.sum(asked, axis=0)
    # Queries fill the range of float16, so that their low part has its bits, too.
    unit = power_of_two_below(tl.max(tl.max(tl.abs(asked), axis=1), axis=0)) / _WEIGHT_UNIT
    KEY_BLOCKS: tl.constexpr = blocks_of(KEY_GROUPS)
    if KEY_KIND > 4:
        # A column for each block of channels, zero beside it: one product has the sums of all blocks.
        asked = tl.where(own_block(channel, HEAD_DIM, KEY_GROUPS), asked[:, None, :], 0.0)
        asked = tl.reshape(asked, [2 * WIDTH, KEY_BLOCKS * QUERIES])
        asked_sum = tl.sum(asked, axis=0)
    asked_high, asked_low = high_and_low(asked / unit)

    highest = tl.full([QUERIES], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS, QUERIES], dtype=tl.float32)
    VALUE_BLOCKS: tl.constexpr = blocks_of(VALUE_GROUPS) if VALUE_KIND > 4 else 1
    offset = tl.zeros([ROWS, VALUE_BLOCKS * QUERIES], dtype=tl.float32)
    weighted = tl.zeros([2 * WIDTH, VALUE_BLOCKS * QUERIES], dtype=tl.float32)
    KEY_DIGITS: tl.constexpr = plan_digits(KEY_PLAN)
    VALUE_DIGITS: tl.constexpr = plan_digits(VALUE_PLAN)
    KEY_BITS: tl.constexpr = plan_bits(KEY_PLAN)
    VALUE_BITS: tl.constexpr = plan_bits(VALUE_PLAN)
    for start in range(first, last, 3 * ROWS):
        token = start + row * 3
        groups = tl.zeros([ROWS, WIDTH], dtype=tl.uint32)
        scores = ()
        steps = ()
        zeros = ()
        above = tl.full([ROWS, QUERIES], float("-inf"), dtype=tl.float32)
        for place in tl.static_range(3):
            there = token + place < last
            here = tl.minimum(token + place, last - 1)
            if KEY_DIGITS == 1:
                groups = load_groups(
                    key_words, token + place, there, row, column, PAIRS, WIDTH, KEY_BITS, 3, place
                )
            elif place == 0:
                groups = load_groups(key_words, token // 3, there, row, column, PAIRS, WIDTH, KEY_BITS, 1, 0)
            if KEY_KIND != 5 and KEY_KIND != 6:
                digit, groups = next_digit(groups, KEY_PLAN, place, KEY_KIND != 0 and KEY_KIND != 7)
            if KEY_KIND == 1:
                code = whole_codes(digit, ROWS, WIDTH)
                key = grouped_values(code, key_metadata, here, channel, HEAD_DIM, KEY_GROUPS)
                score = tl.dot(key, asked, input_precision=PRECISION)
            elif KEY_KIND == 2:
                code = whole_codes(digit, ROWS, WIDTH)
                high, low = table_values(code, key_table, channel, HEAD_DIM)
                score = tl.dot(high, asked_high, out_dtype=tl.float32)
                score = tl.dot(high, asked_low, score)
                score = tl.dot(low, asked_high, score)
                norm, _ = load_step(key_metadata, here, 2)
                score = score * (norm * (unit / TABLE_UNIT))[:, None]
            elif KEY_KIND > 4:
                if KEY_KIND == 7:
                    code = as_float16(digit, ROWS, WIDTH)
                else:
                    code = block_codes(groups, KEY_PLAN, place, ROWS, WIDTH)
                sums = tl.dot(code, asked_high, out_dtype=tl.float32)
                sums = tl.dot(code, asked_low, sums)
                if KEY_KIND == 7:
                    sums = sums * (unit * code_unit(KEY_PLAN, place))
                    sums -= (asked_sum * codes_below_zero(KEY_PLAN))[None, :]
                scale = load_scales(key_metadata, here, key_whole, KEY_KIND, KEY_GROUPS)
                if KEY_KIND != 7:
                    scale = scale * (unit * E2M1_UNIT)
                sums = tl.reshape(sums, [ROWS, KEY_BLOCKS, QUERIES])
                score = tl.sum(sums * scale[:, :, None], axis=1)
            elif KEY_KIND > 2:
                code = float_codes(digit, KEY_KIND, ROWS, WIDTH)
                score = tl.dot(code, asked_high, out_dtype=tl.float32)
                score = tl.dot(code, asked_low, score)
                scale, _ = load_step(key_metadata, here, KEY_KIND)
                score = score * (scale * (unit * float_unit(KEY_KIND)))[:, None]
            else:
                code = as_float16(digit, ROWS, WIDTH)
                score = tl.dot(code, asked_high, out_dtype=tl.float32)
                score = tl.dot(code, asked_low, score)
                scale, zero = load_step(key_metadata, here, 0)
                score = score * (scale * (unit * code_unit(KEY_PLAN, place)))[:, None]
                score += zero[:, None] * asked_sum[None, :]
            score = tl.where(there[:, None], score, float("-inf"))
            if VALUE_KIND == 1:
                scale, zero = tl.full([ROWS], 1.0, dtype=tl.float32), tl.zeros([ROWS], dtype=tl.float32)
                above = tl.maximum(above, score)
            elif VALUE_KIND > 4:
                scale = load_scales(value_metadata, here, value_whole, VALUE_KIND, VALUE_GROUPS)
                zero = tl.zeros([ROWS], dtype=tl.float32)
                above = tl.maximum(above, score + block_exponent(scale)[:, None])
            else:
                scale, zero = load_step(value_metadata, here, VALUE_KIND)
                # The largest weight, not the largest score, is what fills the range of float16.
                above = tl.maximum(above, score + exponent(scale)[:, None])
            scores = scores + (score,)  # noqa: RUF005
            steps = steps + (scale,)  # noqa: RUF005
            zeros = zeros + (zero,)  # noqa: RUF005

        now = tl.maximum(highest, tl.max(above, axis=0))
        fade = tl.exp2(highest - now)
        highest = now
        total *= fade[None, :]
        if VALUE_KIND > 4:
            fade = tl.broadcast_to(fade[None, :], [VALUE_BLOCKS, QUERIES])
            fade = tl.reshape(fade, [VALUE_BLOCKS * QUERIES])
        offset *= fade[None, :]
        weighted *= fade[None, :]
        for place in tl.static_range(3):
            there = token + place < last
            here = tl.minimum(token + place, last - 1)
            weight = tl.exp2(scores[place] - now[None, :])
            total += weight
            if VALUE_DIGITS == 1:
                groups = load_groups(
                    value_words, token + place, there, row, column, PAIRS, WIDTH, VALUE_BITS, 3, place
                )
            elif place == 0:
                groups = load_groups(
                    value_words, token // 3, there, row, column, PAIRS, WIDTH, VALUE_BITS, 1, 0
                )
            if VALUE_KIND != 5 and VALUE_KIND != 6:
                digit, groups = next_digit(groups, VALUE_PLAN, place, VALUE_KIND != 0 and VALUE_KIND != 7)
            if VALUE_KIND == 1:
                code = whole_codes(digit, ROWS, WIDTH)
                value = grouped_values(code, value_metadata, here, channel, HEAD_DIM, VALUE_GROUPS)
                weighted = tl.dot(tl.trans(value), weight, weighted, input_precision=PRECISION)
            elif VALUE_KIND == 2:
                code = whole_codes(digit, ROWS, WIDTH)
                high, low = table_values(code, value_table, channel, HEAD_DIM)
                weight_high, weight_low = high_and_low(weight * (steps[place] * _WEIGHT_UNIT)[:, None])
                weighted = tl.dot(tl.trans(high), weight_high, weighted)
                weighted = tl.dot(tl.trans(high), weight_low, weighted)
                weighted = tl.dot(tl.trans(low), weight_high, weighted)
            elif VALUE_KIND > 4:
                scale = steps[place][:, :, None]
                if VALUE_KIND == 7:
                    code = tl.trans(as_float16(digit, ROWS, WIDTH))
                    unit_here = _WEIGHT_UNIT / CODE_UNIT * code_unit(VALUE_PLAN, place)
                    offset += tl.reshape(weight[:, None, :] * scale, [ROWS, VALUE_BLOCKS * QUERIES])
                else:
                    code = tl.trans(block_codes(groups, VALUE_PLAN, place, ROWS, WIDTH))
                    unit_here = _WEIGHT_UNIT
                spread = (weight * unit_here)[:, None, :] * scale
                spread = tl.reshape(spread, [ROWS, VALUE_BLOCKS * QUERIES])
                weight_high, weight_low = high_and_low(spread)
                weighted = tl.dot(code, weight_high, weighted)
                weighted = tl.dot(code, weight_low, weighted)
            elif VALUE_KIND > 2:
                code = tl.trans(float_codes(digit, VALUE_KIND, ROWS, WIDTH))
                weight_high, weight_low = high_and_low(weight * (steps[place] * _WEIGHT_UNIT)[:, None])
                weighted = tl.dot(code, weight_high, weighted)
                weighted = tl.dot(code, weight_low, weighted)
            else:
                code = tl.trans(as_float16(digit, ROWS, WIDTH))
                offset += weight * zeros[place][:, None]
                unit_here = _WEIGHT_UNIT / CODE_UNIT * code_unit(VALUE_PLAN, place)
                weight_high, weight_low = high_and_low(weight * (steps[place] * unit_here)[:, None])
                weighted = tl.dot(code, weight_high, weighted)
                weighted = tl.dot(code, weight_low, weighted)

    if VALUE_KIND == 0:
        weighted = weighted * (CODE_UNIT / _WEIGHT_UNIT) + tl.sum(offset, axis=0)[None, :]
    elif VALUE_KIND == 2:
        weighted = weighted * (1.0 / (TABLE_UNIT * _WEIGHT_UNIT))
    elif VALUE_KIND > 4:
        if VALUE_KIND == 7:
            below_zero = tl.sum(offset, axis=0) * codes_below_zero(VALUE_PLAN)
            weighted = weighted * (CODE_UNIT / _WEIGHT_UNIT) - below_zero[None, :]
        else:
            weighted = weighted * (E2M1_UNIT / _WEIGHT_UNIT)
        weighted = tl.reshape(weighted, [2 * WIDTH, VALUE_BLOCKS, QUERIES])
        weighted = tl.sum(tl.where(own_block(channel, HEAD_DIM, VALUE_GROUPS), weighted, 0.0), axis=1)
    elif VALUE_KIND > 2:
        weighted = weighted * (float_unit(VALUE_KIND) / _WEIGHT_UNIT)
    store_part(weighted, highest, tl.sum(total, axis=0), out, log_sums, member, group, channel, HEAD_DIM)


@triton.jit
def attend_plain(
    query, keys, values, token_stride, start, stop, out, log_sums, member, group, scale_log2,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, QUERIES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of one head's queries over its tokens ``start`` to ``stop``, which are not coded."""
    channel = tl.arange(0, 2 * WIDTH)
    asked = load_query(query, member, group, channel, HEAD_DIM, QUERIES) * scale_log2
    highest = tl.full([QUERIES], float("-inf"), dtype=tl.float32)
    total = tl.zeros([QUERIES], dtype=tl.float32)
    weighted = tl.zeros([2 * WIDTH, QUERIES], dtype=tl.float32)
    for first in range(start, stop, ROWS):
        token = first + tl.arange(0, ROWS)
        there = token < stop
        at = token.to(tl.int64)[:, None] * token_stride + channel[None, :]
        mask = there[:, None] & (channel < HEAD_DIM)[None, :]
        key = tl.load(keys + at, mask=mask, other=0.0).to(tl.float32)
        score = tl.dot(key, asked, input_precision=PRECISION)
        score = tl.where(there[:, None], score, float("-inf"))
        now = tl.maximum(highest, tl.max(score, axis=0))
        weight = tl.exp2(score - now[None, :])
        fade = tl.exp2(highest - now)
        highest = now
        total = total * fade + tl.sum(weight, axis=0)
        value = tl.load(values + at, mask=mask, other=0.0).to(tl.float32)
        weighted = tl.dot(tl.trans(value), weight, weighted * fade[None, :], input_precision=PRECISION)
    store_part(weighted, highest, total, out, log_sums, member, group, channel, HEAD_DIM)


# Counts that change while a cache grows are of one code, whatever divides them.
@triton.jit(do_not_specialize=["coded_parts", "first_parts", "parts", "first_tokens", "second_tokens"])
def attention_kernel(
    query,  # [rows, query_heads, head_dim], contiguous
    turned,  # the same in the basis of coded keys
    jobs,  # int64 [rows * coded_parts, _FIELDS]
    first_keys,  # [rows, heads, tokens, head_dim], as all below
    first_values,
    second_keys,
    second_values,
    out,  # float32 [rows, parts, query_heads, head_dim]
    log_sums,  # float32 [rows, parts, query_heads], natural logarithms
    coded_parts,  # of a row, the first ones
    first_parts,  # of a row's first plain tokens
    parts,  # of a row
    first_tokens,
    first_row,  # strides, in elements
    first_head,
    first_token,
    second_tokens,
    second_row,
    second_head,
    second_token,
    query_heads,
    group,  # queries that share a head
    first_kind,
    scale_log2,  # softmax scale / log(2)
    KINDS: tl.constexpr,  # pairs of plans that this launch attends to: key's number << 20 | value's number
    KEY_KIND: tl.constexpr,
    VALUE_KIND: tl.constexpr,
    KEY_GROUPS: tl.constexpr,
    VALUE_GROUPS: tl.constexpr,
    PLAIN: tl.constexpr,  # this launch takes the plain tokens
    PLAIN_TOKENS: tl.constexpr,  # that a program takes
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,  # half of HEAD_DIM, rounded up to a power of two
    ROWS: tl.constexpr,
    QUERIES: tl.constexpr,  # of one head that a program takes
    PRECISION: tl.constexpr,  # of products of float32
):
    """One part of a row: ``program_id(0)`` counts the parts of all rows, ``program_id(1)`` heads and their queries."""
    index = tl.program_id(0).to(tl.int64)
    row = index // parts
    part = (index % parts).to(tl.int32)
    chunks = (group + QUERIES - 1) // QUERIES
    head = (tl.program_id(1) // chunks).to(tl.int64)
    member = (tl.program_id(1) % chunks) * QUERIES + tl.arange(0, QUERIES)
    asked = (row * query_heads + head * group) * HEAD_DIM
    log_sums += index * query_heads + head * group
    out += (index * query_heads + head * group) * HEAD_DIM
    if part < coded_parts:
        job = jobs + (row * coded_parts + part) * _FIELDS
        kind = tl.load(job).to(tl.int32)
        for number in tl.static_range(len(KINDS)):
            if kind == first_kind + number:
                attend_coded(
                    turned + asked, job, head, out, log_sums, member, group, scale_log2,
                    KINDS[number] >> 20, KINDS[number] & 0xFFFFF, KEY_KIND, VALUE_KIND, KEY_GROUPS, VALUE_GROUPS,
                    HEAD_DIM, WIDTH, ROWS, QUERIES, PRECISION,
                )  # fmt: skip
        if (kind < 0) & (first_kind == 0):
            channel = tl.arange(0, 2 * WIDTH)
            nothing = tl.zeros([QUERIES], dtype=tl.float32)
            empty = tl.zeros([2 * WIDTH, QUERIES], dtype=tl.float32)
            store_part(empty, nothing, nothing, out, log_sums, member, group, channel, HEAD_DIM)
    elif PLAIN:
        part -= coded_parts
        # Products over plain tokens have eight columns; four queries of codes are all that the head has.
        OPEN: tl.constexpr = QUERIES if QUERIES > 8 else 8
        if QUERIES < OPEN:  # noqa: SIM108
            asking = tl.arange(0, OPEN)
        else:
            asking = member
        if part < first_parts:
            at = row * first_row + head * first_head
            start = part * PLAIN_TOKENS
            attend_plain(
                query + asked, first_keys + at, first_values + at, first_token, start,
                tl.minimum(start + PLAIN_TOKENS, first_tokens), out, log_sums, asking, group, scale_log2,
                HEAD_DIM, WIDTH, 32, OPEN, PRECISION,
            )  # fmt: skip
        else:
            at = row * second_row + head * second_head
            start = (part - first_parts) * PLAIN_TOKENS
            attend_plain(
                query + asked, second_keys + at, second_values + at, second_token, start,
                tl.minimum(start + PLAIN_TOKENS, second_tokens), out, log_sums, asking, group, scale_log2,
                HEAD_DIM, WIDTH, 32, OPEN, PRECISION,
            )  # fmt: skip


def packed_attention(
    query: Tensor,
    turned: Tensor,
    work: Work,
    plain: Sequence[tuple[Tensor, Tensor]],
    softmax_scale: float,
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """See ``attention_reference.packed_attention``."""
    rows, query_heads, head_dim = query.shape
    sources = [_source(*pair) for pair in plain if pair[0].shape[2]][:2]
    plain_parts = [-(-keys.shape[2] // _PLAIN_TOKENS) for keys, _ in sources]
    parts = work.parts + sum(plain_parts)
    out = torch.empty(rows, parts, query_heads, head_dim, dtype=torch.float32, device=query.device)
    log_sums = torch.empty(rows, parts, query_heads, dtype=torch.float32, device=query.device)
    heads = sources[0][0].shape[1] if sources else work.heads
    group = query_heads // heads
    queries = min(_QUERIES, max(8, triton.next_power_of_2(group)))
    columns = [triton.next_power_of_2(groups) if kind >= MX else 1 for kind, groups in work.sides]
    queries = min(queries, max(8, _COLUMNS // max(columns)))
    if min(columns) > 1 and group <= 4:
        queries = 4  # times two blocks at least: a product has eight columns
    query, turned = query.contiguous(), turned.contiguous()
    while len(sources) < 2:
        sources.append((query[:, :, None, :0], query[:, :, None, :0]))
        plain_parts.append(0)
    (key_kind, key_groups), (value_kind, value_groups) = work.sides
    for first_kind in range(0, max(1, len(work.kinds)), _KINDS):
        kinds = work.kinds[first_kind : first_kind + _KINDS]
        launch(
            attention_kernel,
            (rows * parts, heads * -(-group // queries)),
            query,
            query,
            turned,
            work.jobs,
            *sources[0],
            *sources[1],
            out,
            log_sums,
            work.parts,
            plain_parts[0],
            parts,
            *_extent(sources[0][0]),
            *_extent(sources[1][0]),
            query_heads,
            group,
            first_kind,
            softmax_scale / math.log(2),
            KINDS=tuple((plan_number(key) << 20) | plan_number(value) for key, value in kinds),
            KEY_KIND=key_kind,
            VALUE_KIND=value_kind,
            KEY_GROUPS=key_groups,
            VALUE_GROUPS=value_groups,
            PLAIN=not first_kind and any(plain_parts),
            PLAIN_TOKENS=_PLAIN_TOKENS,
            HEAD_DIM=head_dim,
            WIDTH=triton.next_power_of_2((head_dim + 1) // 2),
            ROWS=tile_rows(head_dim, work.sides),
            QUERIES=queries,
            PRECISION="ieee" if torch.version.hip else "tf32x3",
            num_warps=4,
            num_stages=1,
        )
    coded = work.parts
    return (
        merge_attention(out[:, :coded], log_sums[:, :coded]),
        merge_attention(out[:, coded:], log_sums[:, coded:]),
    )


def _source(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values with the same strides, channels next to each other."""
    if keys.stride() == values.stride() and keys.stride(3) == 1:
        return keys, values
    return keys.contiguous(), values.contiguous()


def _extent(x: Tensor) -> tuple[int, int, int, int]:
    """Tokens of x [rows, heads, tokens, head_dim], and its strides by row, head and token."""
    return x.shape[2] if x.shape[3] else 0, *x.stride()[:3]
