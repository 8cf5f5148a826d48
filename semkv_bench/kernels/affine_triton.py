"""Triton kernels for ``affine_reference``: same signatures, same codes and metadata to the bit.

Rows are (token, group) pairs of one head. A program reads its rows once, then writes all settings.
Division is IEEE and every other step is exact or rounds once, so fused multiply-adds, flushed
subnormals and the order of reductions change nothing.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from semkv_bench.kernels.launch import (
    finite_cast,
    finite_or_flag,
    launch,
    round_half_even,
    rows_per_program,
    to_float16,
    unit_stride,
)
from semkv_bench.kernels.numerics import check_rows, note_finite

__all__ = ["affine_quantize", "affine_quantize_dequantize"]


@triton.jit
def affine_kernel(
    x,  # [heads, tokens, head_dim]
    levels,  # int64 [settings, tokens or 1]
    out,  # codes uint8 or values [settings, heads, tokens, head_dim]
    scales,  # float16 [settings, heads, tokens, groups], contiguous
    zeros,  # float16 [heads, tokens, groups], contiguous
    flag,  # int32, set if x is not finite
    tokens,
    settings,
    x_head,  # strides, in elements
    x_token,
    levels_setting,
    levels_token,
    out_setting,
    out_head,
    out_token,
    scales_setting,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,  # GROUP, rounded up to a power of two
    ROWS: tl.constexpr,
    CODES: tl.constexpr,  # write codes and metadata, or else values
):
    """Code ROWS groups of GROUP values with every setting's levels, or decode them again at once.

    With low and high of a group and L levels: zero = float16(low), scale = float16((high - low) / (L - 1)),
    code = round_half_even(min(max(x - zero, 0) / scale, L - 1)), value = zero + code * scale. A program has
    rows ``program_id(0) * ROWS + [0, ROWS)`` of (token, group) pairs of head ``program_id(1)``.
    """
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token = row // GROUPS
    column = (row % GROUPS)[:, None] * GROUP + tl.arange(0, WIDTH)[None, :]
    row_mask = token < tokens
    mask = row_mask[:, None] & (tl.arange(0, WIDTH) < GROUP)[None, :]

    values = tl.load(x + head * x_head + token[:, None] * x_token + column, mask=mask, other=0.0)
    values = values.to(tl.float32)
    finite_or_flag(values, mask, flag)
    low = tl.min(tl.where(mask, values, float("inf")), axis=1)
    high = tl.max(tl.where(mask, values, float("-inf")), axis=1)
    zero16 = to_float16(low)
    zero = zero16.to(tl.float32)
    above = tl.maximum(values - zero[:, None], 0.0)
    if CODES:
        tl.store(zeros + head * tokens * GROUPS + row, zero16, mask=row_mask)

    # 64-bit offsets that move on from setting to setting; a product of two 32-bit numbers could overflow.
    level_at = token * levels_token
    out_at = head * out_head + token[:, None] * out_token + column
    scale_at = head * tokens * GROUPS + row
    for _ in range(0, settings):
        top = (tl.load(levels + level_at, mask=row_mask, other=2) - 1).to(tl.float32)
        scale16 = to_float16(tl.div_rn(high - low, top))
        scale = scale16.to(tl.float32)
        divisor = tl.where(scale == 0.0, float("inf"), scale)
        steps = tl.div_rn(above, tl.broadcast_to(divisor[:, None], above.shape))
        code = round_half_even(tl.minimum(steps, top[:, None]))
        if CODES:
            tl.store(out + out_at, code.to(tl.uint8), mask=mask)
            tl.store(scales + scale_at, scale16, mask=row_mask)
        else:
            value = zero[:, None] + code * scale[:, None]
            tl.store(out + out_at, finite_cast(value, out.dtype.element_ty), mask=mask)
        level_at += levels_setting
        out_at += out_setting
        scale_at += scales_setting


def affine_quantize(x: Tensor, levels: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """See ``affine_reference.affine_quantize``."""
    check_rows(x, levels)
    heads, tokens, head_dim = x.shape
    groups = head_dim // group_size
    codes = torch.empty(len(levels), heads, tokens, head_dim, dtype=torch.uint8, device=x.device)
    scale = torch.empty(len(levels), heads, tokens, groups, dtype=torch.float16, device=x.device)
    zero = torch.empty(heads, tokens, groups, dtype=torch.float16, device=x.device)
    _launch(x, levels, group_size, codes, scale, zero)
    return codes, scale, zero


def affine_quantize_dequantize(
    x: Tensor, levels: Tensor, group_size: int, out: Tensor | None = None
) -> Tensor:
    """See ``affine_reference.affine_quantize_dequantize``."""
    check_rows(x, levels)
    if out is None:
        out = torch.empty(len(levels), *x.shape, dtype=x.dtype, device=x.device)
    _launch(x, levels, group_size, out, None, None)
    return out


def _launch(
    x: Tensor, levels: Tensor, group_size: int, out: Tensor, scale: Tensor | None, zero: Tensor | None
) -> None:
    heads, tokens, head_dim = x.shape
    if out.numel() == 0:
        return
    x = unit_stride(x)
    flag = torch.zeros(1, dtype=torch.int32, device=x.device)
    groups, width = head_dim // group_size, triton.next_power_of_2(group_size)
    rows = min(rows_per_program(width), triton.next_power_of_2(tokens * groups))
    launch(
        affine_kernel,
        (triton.cdiv(tokens * groups, rows), heads),
        x,
        x,
        levels,
        out,
        scale,
        zero,
        flag,
        tokens,
        len(levels),
        *x.stride()[:2],
        levels.stride(0),
        levels.stride(1) if levels.shape[1] > 1 else 0,
        *out.stride()[:3],
        0 if scale is None else scale.stride(0),
        GROUPS=groups,
        GROUP=group_size,
        WIDTH=width,
        ROWS=rows,
        CODES=scale is not None,
    )
    note_finite(flag)
