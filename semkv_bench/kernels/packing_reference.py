"""Packing and unpacking in torch, bit by bit: the meaning of the Triton kernels of the same name.

The layout is described in ``packed``.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from semkv_bench.grid.levels import PackingPlan, packing_plan
from semkv_bench.kernels import aligned
from semkv_bench.kernels.affine_reference import affine_dequantize
from semkv_bench.kernels.aligned import AlignedLayout
from semkv_bench.kernels.codebook_reference import codebook_dequantize
from semkv_bench.kernels.numerics import finite_cast
from semkv_bench.kernels.packed import LIMB, PackedLayout, PackedVectors, e2m1_table

__all__ = ["element_dequantize", "pack", "unpack", "unpack_dequantize"]


def pack(codes: Tensor, layout: PackedLayout) -> Tensor:
    """Words int32 [layout.words] of codes uint8 [heads, tokens, head_dim], each below its token's levels."""
    words = torch.empty(layout.words, dtype=torch.int32, device=codes.device)
    for first, last, members in _blocks(layout):
        streams = [_bits_of(codes[:, tokens], plan) for plan, tokens in members]
        bits = torch.cat(streams, dim=1).flatten()
        words[first:last] = _words_of(bits)
    return words


def unpack(words: Tensor, layout: PackedLayout) -> Tensor:
    """Codes uint8 [heads, tokens, head_dim]; the inverse of ``pack``."""
    heads, head_dim = layout.heads, layout.head_dim
    codes = torch.empty(heads, layout.tokens, head_dim, dtype=torch.uint8, device=words.device)
    for first, last, members in _blocks(layout):
        lengths = [_groups(len(tokens) * head_dim, plan) * plan.bits for plan, tokens in members]
        bits = (words[first:last, None] >> torch.arange(32, device=words.device)) & 1
        streams = bits.flatten()[: heads * sum(lengths)].view(heads, -1).split(lengths, dim=1)
        for (plan, tokens), stream in zip(members, streams, strict=True):
            digits = _digits_of(stream, plan)[:, : len(tokens) * head_dim]
            codes[:, tokens] = digits.reshape(heads, len(tokens), head_dim).to(torch.uint8)
    return codes


def unpack_dequantize(
    packed: PackedVectors, dtype: torch.dtype = torch.float32, out: Tensor | None = None
) -> Tensor:
    """Values [heads, tokens, head_dim] of ``dtype``, tokens as they lie; rotated ones of codebook coding.

    out: where to write them, of that shape; its channels lie side by side, and its type is taken, not ``dtype``.
    """
    if out is not None:
        return out.copy_(unpack_dequantize(packed, out.dtype))
    layout = packed.layout
    codes = (aligned.unpack if isinstance(layout, AlignedLayout) else unpack)(packed.words, layout)
    if packed.element is not None:
        return element_dequantize(codes, packed, dtype)
    if packed.zero is not None:
        return affine_dequantize(codes, packed.scale, packed.zero, dtype)
    levels = layout.levels()
    return finite_cast(codebook_dequantize(codes, packed.scale.squeeze(-1), levels, packed.tables), dtype)


def element_dequantize(codes: Tensor, packed: PackedVectors, dtype: torch.dtype) -> Tensor:
    """Values of codes uint8 [heads, tokens, head_dim] that are numbers by a scale alone: see ``PackedVectors``."""
    scale = packed.scale
    if packed.element == "symmetric":
        numbers = codes.float() - (packed.layout.levels() // 2)[:, None]
    elif packed.element == "e2m1":
        numbers = e2m1_table(codes.device)[codes.int()]
        if scale.dtype == torch.uint8:
            scale = (scale.int() << 23).view(torch.float32)
    else:
        numbers = codes.view({"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[packed.element]).float()
    scale = (scale.float() * packed.whole).repeat_interleave(codes.shape[-1] // packed.groups, dim=-1)
    return finite_cast(numbers * scale, dtype)


def _blocks(layout: PackedLayout) -> Iterator[tuple[int, int, list[tuple[PackingPlan, Tensor]]]]:
    """First word, last word + 1, and for each class that occurs its plan and tokens, of every block."""
    classes, starts = layout.classes(), layout.block_start.tolist()
    for block, (first, last) in enumerate(pairwise(starts)):
        here = classes[block * layout.block : (block + 1) * layout.block]
        tokens = [(here == index).nonzero().flatten() for index in range(len(layout.class_levels))]
        members = [
            (packing_plan(levels), block * layout.block + chosen)
            for levels, chosen in zip(layout.class_levels, tokens, strict=True)
            if len(chosen)
        ]
        yield first, last, members


def _groups(values: int, plan: PackingPlan) -> int:
    return -(-values // plan.digits)


def _bits_of(codes: Tensor, plan: PackingPlan) -> Tensor:
    """Bit stream [heads, groups * bits] of codes [heads, n, head_dim]."""
    digits = codes.flatten(1).long()
    missing = -digits.shape[1] % plan.digits
    digits = torch.nn.functional.pad(digits, (0, missing)).unflatten(1, (-1, plan.digits))
    bits = [
        (limb[..., None] >> torch.arange(size, device=codes.device)) & 1
        for limb, size in zip(_fraction(digits, plan), _limb_sizes(plan), strict=True)
    ]
    return torch.cat(bits, dim=-1).flatten(1)


def _limb_sizes(plan: PackingPlan) -> list[int]:
    """Bits of each limb of a group, the lowest first."""
    return [min(LIMB, plan.bits - first) for first in range(0, plan.bits, LIMB)]


def _fraction(digits: Tensor, plan: PackingPlan) -> list[Tensor]:
    """ceil(V * 2**bits / levels**digits) of groups V [..., digits], as limbs [...], the lowest first."""
    sizes = _limb_sizes(plan)
    limbs = [torch.zeros_like(digits[..., 0]) for _ in sizes]
    inexact = torch.zeros_like(limbs[0], dtype=torch.bool)
    for rest in reversed(digits.unbind(-1)):
        for place in reversed(range(len(sizes))):
            dividend = (rest << sizes[place]) | limbs[place]
            limbs[place], rest = dividend // plan.levels, dividend % plan.levels
        inexact |= rest > 0
    carry = inexact.long()
    for place, size in enumerate(sizes):
        limbs[place] += carry
        carry = limbs[place] >> size
        limbs[place] &= (1 << size) - 1
    return limbs


def _digits_of(stream: Tensor, plan: PackingPlan) -> Tensor:
    """Digits [heads, groups * digits] of a bit stream [heads, groups * bits]."""
    sizes = _limb_sizes(plan)
    limbs = [
        (part.long() << torch.arange(size, device=stream.device)).sum(-1)
        for part, size in zip(stream.unflatten(1, (-1, plan.bits)).split(sizes, dim=-1), sizes, strict=True)
    ]
    digits = []
    for _ in range(plan.digits):
        carry = torch.zeros_like(limbs[0])
        for place, size in enumerate(sizes):
            product = limbs[place] * plan.levels + carry
            limbs[place], carry = product & ((1 << size) - 1), product >> size
        digits.append(carry)
    return torch.stack(digits, dim=-1).flatten(1)


def _words_of(bits: Tensor) -> Tensor:
    bits = torch.nn.functional.pad(bits, (0, -len(bits) % 32)).view(-1, 32)
    unsigned = (bits << torch.arange(32, device=bits.device)).sum(-1)
    return torch.where(unsigned < 1 << 31, unsigned, unsigned - (1 << 32)).to(torch.int32)
