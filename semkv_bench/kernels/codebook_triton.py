"""Triton kernels for ``codebook_reference``: same signatures, same codes and norms to the bit.

Where the reference looks a code up by grid cell, a program counts the thresholds that a coordinate
reaches; thresholds are whole numbers of cells, so both agree for every float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from semkv_bench.kernels.codebook_tables import CodebookTables
from semkv_bench.kernels.launch import launch, rows_per_program, to_float16, unit_stride
from semkv_bench.kernels.numerics import check_rows, note_finite

__all__ = ["codebook_quantize", "codebook_quantize_dequantize"]


@triton.jit
def codebook_kernel(
    y,  # float32 [heads, tokens, head_dim], rotated
    levels,  # int64 [settings, tokens or 1]
    thresholds,  # float32 [top + 1, top]
    centroids,  # float32 [top + 1, top]
    out,  # codes uint8 or values float32 [settings, heads, tokens, head_dim]
    norms,  # float16 [heads, tokens], contiguous
    flag,  # int32, set if y is not finite
    tokens,
    settings,
    top,
    cells_per_unit,
    y_head,  # strides, in elements
    y_token,
    levels_setting,
    levels_token,
    out_setting,
    out_head,
    out_token,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,  # HEAD_DIM, rounded up to a power of two
    ROWS: tl.constexpr,
    CODES: tl.constexpr,  # write codes and norms, or else values
):
    """Code ROWS vectors with every setting's codebooks, or decode them again at once.

    norm = float16(|y|); cell = y / norm * cells_per_unit; code = how many of row L of ``thresholds`` (in
    cells) a coordinate reaches; value = centroids[L, code] * norm. A program has tokens
    ``program_id(0) * ROWS + [0, ROWS)`` of head ``program_id(1)``.
    """
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    row_mask = token < tokens
    mask = row_mask[:, None] & (column < HEAD_DIM)[None, :]

    values = tl.load(y + head * y_head + token[:, None] * y_token + column[None, :], mask=mask, other=0.0)
    # In float64 the order of the sum is lost in the rounding to float16.
    exact = values.to(tl.float64)
    square = tl.sum(exact * exact, axis=1)
    odd = tl.max(tl.where(square < float("inf"), 0, 1), axis=0)
    tl.store(flag, 1, mask=odd > 0)
    norm16 = to_float16(tl.sqrt(square).to(tl.float32))
    norm = norm16.to(tl.float32)
    if CODES:
        tl.store(norms + head * tokens + token, norm16, mask=row_mask)
    divisor = tl.where(norm == 0.0, float("inf"), norm)
    cell = tl.div_rn(values, tl.broadcast_to(divisor[:, None], values.shape)) * cells_per_unit

    # 64-bit offsets that move on from setting to setting; a product of two 32-bit numbers could overflow.
    level_at = token * levels_token
    out_at = head * out_head + token[:, None] * out_token + column[None, :]
    for _ in range(0, settings):
        level = tl.load(levels + level_at, mask=row_mask, other=2).to(tl.int32)
        code = tl.zeros([ROWS, WIDTH], dtype=tl.int32)
        for step in range(0, tl.max(level, axis=0) - 1):
            # Beyond a token's own levels the thresholds are infinite.
            threshold = tl.load(thresholds + level * top + step)
            code += (cell >= threshold[:, None]).to(tl.int32)
        if CODES:
            tl.store(out + out_at, code.to(tl.uint8), mask=mask)
        else:
            value = tl.load(centroids + level[:, None] * top + code) * norm[:, None]
            tl.store(out + out_at, value, mask=mask)
        level_at += levels_setting
        out_at += out_setting


def codebook_quantize(y: Tensor, levels: Tensor, tables: CodebookTables) -> tuple[Tensor, Tensor]:
    """See ``codebook_reference.codebook_quantize``."""
    check_rows(y, levels, tables.top)
    codes = torch.empty(len(levels), *y.shape, dtype=torch.uint8, device=y.device)
    norm = torch.empty(y.shape[:2], dtype=torch.float16, device=y.device)
    _launch(y, levels, tables, codes, norm)
    return codes, norm


def codebook_quantize_dequantize(
    y: Tensor, levels: Tensor, tables: CodebookTables, out: Tensor | None = None
) -> Tensor:
    """See ``codebook_reference.codebook_quantize_dequantize``."""
    check_rows(y, levels, tables.top)
    if out is None:
        out = torch.empty(len(levels), *y.shape, dtype=torch.float32, device=y.device)
    _launch(y, levels, tables, out, None)
    return out


def _launch(y: Tensor, levels: Tensor, tables: CodebookTables, out: Tensor, norm: Tensor | None) -> None:
    heads, tokens, head_dim = y.shape
    if out.numel() == 0:
        return
    y = unit_stride(y.float())
    flag = torch.zeros(1, dtype=torch.int32, device=y.device)
    width = triton.next_power_of_2(head_dim)
    rows = min(rows_per_program(width), triton.next_power_of_2(tokens))
    launch(
        codebook_kernel,
        (triton.cdiv(tokens, rows), heads),
        y,
        y,
        levels,
        tables.thresholds,
        tables.centroids,
        out,
        norm,
        flag,
        tokens,
        len(levels),
        tables.top,
        tables.cells_per_unit,
        *y.stride()[:2],
        levels.stride(0),
        levels.stride(1) if levels.shape[1] > 1 else 0,
        *out.stride()[:3],
        HEAD_DIM=head_dim,
        WIDTH=width,
        ROWS=rows,
        CODES=norm is not None,
    )
    note_finite(flag)
