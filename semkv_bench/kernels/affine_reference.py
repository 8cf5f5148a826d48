"""Affine coding of vectors in torch: the meaning of the Triton kernel of the same name.

Per group of a vector: zero = min and scale = (max - min)/(L - 1), both float16; then
code = round-half-even((x - zero)/scale) clamped to 0..L-1 in float32, and x' = zero + code * scale.
The product is exact in float32 (11 + 8 significant bits), so a fused multiply-add changes nothing.

What float16 cannot hold never becomes infinite or NaN:

- a zero or scale beyond +-65504 saturates there, and codes clamp as usual;
- a scale that rounds to 0 (constant groups, or a range below (L - 1) * 2**-25) gives code 0, x' = zero;
- x' saturates at +-65504 if the input is float16.
"""

import torch
from torch import Tensor

from semkv_bench.kernels.numerics import NonFiniteError, check_rows, finite_cast, to_float16
from semkv_bench.kernels.token_chunks import for_token_chunks

__all__ = ["affine_dequantize", "affine_quantize", "affine_quantize_dequantize"]


def affine_quantize(x: Tensor, levels: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes and metadata of x [heads, tokens, head_dim] at levels int64 [S, tokens] or [S, 1].

    Returns codes uint8 [S, heads, tokens, head_dim], scale float16 [S, heads, tokens, groups] and
    zero float16 [heads, tokens, groups], which all settings share. Raises NonFiniteError.
    """
    check_rows(x, levels)
    heads, tokens, head_dim = x.shape
    groups = head_dim // group_size
    codes = x.new_empty(len(levels), heads, tokens, head_dim, dtype=torch.uint8)
    scale = x.new_empty(len(levels), heads, tokens, groups, dtype=torch.float16)
    zero = x.new_empty(heads, tokens, groups, dtype=torch.float16)

    def code(here: slice) -> None:
        rows = x[:, here].unflatten(-1, (-1, group_size)).float()
        low, span = _zero_and_span(rows)
        top = _top(levels if levels.shape[1] == 1 else levels[:, here])
        step = to_float16(span / top)
        found = _code(_above_zero(rows, low), step.float(), top)
        codes[:, :, here].copy_(found.flatten(-2))
        scale[:, :, here], zero[:, here] = step.squeeze(-1), low.squeeze(-1)

    for_token_chunks(code, x)
    return codes, scale, zero


def affine_dequantize(codes: Tensor, scale: Tensor, zero: Tensor, dtype: torch.dtype) -> Tensor:
    """Values [..., head_dim] of ``dtype`` from codes [..., head_dim], scale and zero [..., groups]."""
    grouped = codes.unflatten(-1, (scale.shape[-1], -1)).float()
    values = grouped.mul_(scale.float().unsqueeze(-1)).add_(zero.float().unsqueeze(-1))
    return finite_cast(values, dtype).flatten(-2)


def affine_quantize_dequantize(
    x: Tensor, levels: Tensor, group_size: int, out: Tensor | None = None
) -> Tensor:
    """What a cache that stored x with each setting would give back: [S, heads, tokens, head_dim].

    One pass over x yields the statistics of all settings. ``out`` may be strided, its last dimension
    contiguous. Raises NonFiniteError.
    """
    check_rows(x, levels)
    heads, tokens, head_dim = x.shape
    if out is None:
        out = x.new_empty(len(levels), heads, tokens, head_dim)

    def code(here: slice) -> None:
        levels_here = levels if levels.shape[1] == 1 else levels[:, here]
        _chunk_quantize_dequantize(x[:, here], levels_here, group_size, out[:, :, here])

    for_token_chunks(code, x)
    return out


def _chunk_quantize_dequantize(x: Tensor, levels: Tensor, group_size: int, out: Tensor) -> None:
    rows = x.unflatten(-1, (-1, group_size)).float()
    zero16, span = _zero_and_span(rows)
    zero = zero16.float()
    above = _above_zero(rows, zero16)
    target = out.unflatten(-1, (-1, group_size))
    buffer = torch.empty_like(above)
    for setting, top in enumerate(_top(levels)):
        scale = to_float16(span / top).float()
        _code(above, scale, top, out=buffer).mul_(scale)
        if target.dtype == torch.float32:
            torch.add(buffer, zero, out=target[setting])
        else:
            target[setting].copy_(finite_cast(buffer.add_(zero), target.dtype))


def _zero_and_span(rows: Tensor) -> tuple[Tensor, Tensor]:
    low, high = rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
    if not bool((torch.isfinite(low) & torch.isfinite(high)).all()):
        raise NonFiniteError("NaN or infinity in the tensor to be quantized")
    return to_float16(low), high - low


def _above_zero(rows: Tensor, zero: Tensor) -> Tensor:
    # Clamped below once for all settings: values under a rounded-up zero have code 0 at any scale.
    return (rows - zero.float()).clamp_(min=0)


def _top(levels: Tensor) -> Tensor:
    """Highest code as float32 [S, heads=1, tokens or 1, groups=1, 1]."""
    return (levels - 1).float()[:, None, :, None, None]


def _code(above: Tensor, scale: Tensor, top: Tensor, out: Tensor | None = None) -> Tensor:
    divisor = scale.masked_fill(scale == 0, torch.inf)
    codes = torch.div(above, divisor, out=out)
    return torch.minimum(codes, top, out=codes).round_()
