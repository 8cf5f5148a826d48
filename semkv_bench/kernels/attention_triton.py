"""Triton kernel for ``attention_reference``: scores and weighted values straight from packed blocks.

One program walks some blocks of one head with an online softmax; the queries of a group share what it
decodes. Decoded tiles live in registers, no unpacked copy of the cache exists. All sums are float32.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from semkv_bench.kernels.attention_reference import merge_attention
from semkv_bench.kernels.launch import launch
from semkv_bench.kernels.packed import PackedVectors, arithmetic, class_table, plan_tables
from semkv_bench.kernels.packed_rows import dequantize, load_codes, locate
from semkv_bench.kernels.packing_triton import tile_tokens

__all__ = ["packed_attention"]

_BLOCKS_PER_PROGRAM = 4
_MOST_PARTS = 128


@triton.jit
def locate_tile(
    token_class, class_levels, plans, head, block, start, tokens, classes,
    CLASS_BITS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """``locate`` for TILE tokens of one head: levels, digits, bits, rank and the class's first bit."""
    levels, digits, bits, rank, base, head_bits = locate(
        token_class, class_levels, plans, block, start, tokens, classes, CLASS_BITS, HEAD_DIM, BLOCK, TILE
    )
    return levels, digits, bits, rank, base + head * head_bits


@triton.jit
def fade_in(scores, highest, total):
    """One step of an online softmax over scores [QUERIES, TILE] in units of log 2.

    Returns weights exp2(score - new maximum), the factor by which all before fades, and the new maximum and
    sum of weights [QUERIES]. The first tile of a part always has a token, so the maximum is finite from then on.
    """
    new_highest = tl.maximum(highest, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_highest[:, None])
    fade = tl.exp2(highest - new_highest)
    return weights, fade, new_highest, total * fade + tl.sum(weights, axis=1)


@triton.jit
def attention_kernel(
    query,  # [query_heads, head_dim], contiguous
    key_words,  # of keys, as of values below: int32 words,
    key_class,  # uint8, CLASS_BITS bits a token,
    key_levels,  # int32 [classes],
    key_start,  # int32 [blocks + 1], first word of each block,
    key_scale,  # float16 [heads, tokens, GROUPS], or norms,
    key_offset,  # float16 zeros [heads, tokens, GROUPS], or float32 centroids [top + 1, top]
    value_words,
    value_class,
    value_levels,
    value_start,
    value_scale,
    value_offset,
    plans,  # int32 [257, 2], digits and bits of a group
    powers,  # int64 [257, 16], L**j
    out,  # float32 [parts, query_heads, head_dim]
    log_sums,  # float32 [parts, query_heads], natural logarithms
    tokens,
    blocks,
    blocks_per_part,
    query_heads,
    key_classes,
    value_classes,
    key_top,
    value_top,
    scale_log2,  # softmax scale / log(2)
    KEY_CLASS_BITS: tl.constexpr,
    VALUE_CLASS_BITS: tl.constexpr,
    KEY_AFFINE: tl.constexpr,
    VALUE_AFFINE: tl.constexpr,
    KEY_GROUPS: tl.constexpr,
    VALUE_GROUPS: tl.constexpr,
    ARITHMETIC: tl.constexpr,
    SHARED: tl.constexpr,  # keys and values have one layout
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,  # queries that share a head
    QUERIES: tl.constexpr,  # GROUP, rounded up to a power of two
):
    """Attention of the GROUP queries of head ``program_id(0)`` over the blocks of part ``program_id(1)``.

    out = softmax(scale * q . k) v over the part's tokens, log_sums = log sum exp(scale * q . k); keys and
    values are decoded TILE tokens at a time and never stored.
    """
    head = tl.program_id(0)
    part = tl.program_id(1)
    column = tl.arange(0, WIDTH)
    member = tl.arange(0, QUERIES)
    query_row = head.to(tl.int64) * GROUP + member
    query_mask = (member < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    query_at = query_row[:, None] * HEAD_DIM + column[None, :]
    scaled_query = tl.load(query + query_at, mask=query_mask, other=0.0).to(tl.float32) * scale_log2

    highest = tl.full([QUERIES], float("-inf"), dtype=tl.float32)
    total = tl.zeros([QUERIES], dtype=tl.float32)
    weighted = tl.zeros([QUERIES, WIDTH], dtype=tl.float32)
    first = part * blocks_per_part
    for index in range(first, tl.minimum(first + blocks_per_part, blocks)):
        block = tl.cast(index, tl.int64)
        key_here = key_words + tl.load(key_start + block)
        value_here = value_words + tl.load(value_start + block)
        for start in range(0, BLOCK, TILE):
            token = block * BLOCK + start + tl.arange(0, TILE)
            row_mask = token < tokens
            mask = row_mask[:, None] & (column < HEAD_DIM)[None, :]
            row = head.to(tl.int64) * tokens + token

            levels, digits, bits, rank, base = locate_tile(
                key_class, key_levels, plans, head, block, start, tokens, key_classes,
                KEY_CLASS_BITS, HEAD_DIM, BLOCK, TILE,
            )  # fmt: skip
            code = load_codes(
                key_here, powers, levels, digits, bits, rank, base, column, mask, HEAD_DIM, ARITHMETIC
            )  # fmt: skip
            keys = dequantize(
                code, levels, row, row_mask, column, mask, key_scale, key_offset, key_top,
                KEY_AFFINE, KEY_GROUPS, HEAD_DIM // KEY_GROUPS,
            )  # fmt: skip
            # Few queries share a head, so a matrix unit would mostly multiply padding.
            scores = tl.sum(scaled_query[:, None, :] * keys[None, :, :], axis=2)
            scores = tl.where(row_mask[None, :], scores, float("-inf"))
            weights, fade, highest, total = fade_in(scores, highest, total)

            if not SHARED:
                levels, digits, bits, rank, base = locate_tile(
                    value_class, value_levels, plans, head, block, start, tokens, value_classes,
                    VALUE_CLASS_BITS, HEAD_DIM, BLOCK, TILE,
                )  # fmt: skip
            code = load_codes(
                value_here, powers, levels, digits, bits, rank, base, column, mask, HEAD_DIM, ARITHMETIC
            )  # fmt: skip
            values = dequantize(
                code, levels, row, row_mask, column, mask, value_scale, value_offset, value_top,
                VALUE_AFFINE, VALUE_GROUPS, HEAD_DIM // VALUE_GROUPS,
            )  # fmt: skip
            weighted = weighted * fade[:, None] + tl.sum(weights[:, :, None] * values[None, :, :], axis=1)

    row_out = part.to(tl.int64) * query_heads + query_row
    tl.store(out + row_out[:, None] * HEAD_DIM + column[None, :], weighted / total[:, None], mask=query_mask)
    # Scores are in units of log 2.
    tl.store(log_sums + row_out, (highest + tl.log2(total)) * 0.6931471805599453, mask=member < GROUP)


def packed_attention(
    query: Tensor, keys: PackedVectors, values: PackedVectors, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """See ``attention_reference.packed_attention``."""
    layout = keys.layout
    query_heads = query.shape[0]
    group = query_heads // layout.heads
    queries = triton.next_power_of_2(group)
    # Enough programs for the machine, few enough parts to merge cheaply.
    per_part = max(_BLOCKS_PER_PROGRAM, -(-layout.blocks // _MOST_PARTS))
    parts = -(-layout.blocks // per_part)
    out = torch.empty(parts, *query.shape, dtype=torch.float32, device=query.device)
    log_sums = torch.empty(parts, query_heads, dtype=torch.float32, device=query.device)
    launch(
        attention_kernel,
        (layout.heads, parts),
        query,
        query.contiguous(),
        *_side(keys),
        *_side(values),
        *plan_tables(query.device),
        out,
        log_sums,
        layout.tokens,
        layout.blocks,
        per_part,
        query_heads,
        len(layout.class_levels),
        len(values.layout.class_levels),
        keys.top,
        values.top,
        softmax_scale / math.log(2),
        KEY_CLASS_BITS=layout.class_bits,
        VALUE_CLASS_BITS=values.layout.class_bits,
        KEY_AFFINE=keys.is_affine,
        VALUE_AFFINE=values.is_affine,
        KEY_GROUPS=keys.groups,
        VALUE_GROUPS=values.groups,
        ARITHMETIC=arithmetic(layout.class_levels + values.layout.class_levels),
        SHARED=layout is values.layout,
        HEAD_DIM=layout.head_dim,
        WIDTH=triton.next_power_of_2(layout.head_dim),
        BLOCK=layout.block,
        # The products of a tile with all queries must fit the registers of its threads.
        TILE=tile_tokens(layout, 8192 // max(4, queries)),
        GROUP=group,
        QUERIES=queries,
        num_warps=8,
        num_stages=1,
    )
    return merge_attention(out, log_sums)


def _side(packed: PackedVectors) -> tuple[Tensor, ...]:
    layout = packed.layout
    levels = class_table(layout.class_levels, packed.words.device)
    return packed.words, layout.token_class, levels, layout.block_start, packed.scale, packed.offset
