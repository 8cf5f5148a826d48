"""Packing and unpacking in torch, bit by bit: the meaning of the Triton kernels of the same name.

The layout is described in ``packed``.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from semkv_bench.grid.levels import PackingPlan, packing_plan
from semkv_bench.kernels.affine_reference import affine_dequantize
from semkv_bench.kernels.codebook_reference import codebook_dequantize
from semkv_bench.kernels.numerics import finite_cast
from semkv_bench.kernels.packed import PackedLayout, PackedVectors

__all__ = ["pack", "unpack", "unpack_dequantize"]

_STEP = 17  # a remainder below 2**45 shifted by this much stays a positive int64


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


def unpack_dequantize(packed: PackedVectors, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values [heads, tokens, head_dim] of ``dtype``; rotated ones of codebook coding."""
    codes = unpack(packed.words, packed.layout)
    if packed.zero is not None:
        return affine_dequantize(codes, packed.scale, packed.zero, dtype)
    levels = packed.layout.levels()
    return finite_cast(codebook_dequantize(codes, packed.scale.squeeze(-1), levels, packed.tables), dtype)


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
    value = torch.zeros_like(digits[..., 0])
    for digit in digits.unbind(-1):
        value = value * plan.levels + digit
    fraction = _fraction(value, plan)
    return ((fraction[..., None] >> torch.arange(plan.bits, device=codes.device)) & 1).flatten(1)


def _fraction(value: Tensor, plan: PackingPlan) -> Tensor:
    """ceil(value * 2**bits / levels**digits), by long division that stays within 63 bits."""
    whole = plan.levels**plan.digits
    quotient, remainder, left = torch.zeros_like(value), value, plan.bits
    while left:
        step = min(left, _STEP)
        shifted = remainder << step
        quotient, remainder = (quotient << step) + shifted // whole, shifted % whole
        left -= step
    return quotient + (remainder > 0)


def _digits_of(stream: Tensor, plan: PackingPlan) -> Tensor:
    """Digits [heads, groups * digits] of a bit stream [heads, groups * bits]."""
    place = torch.arange(plan.bits, device=stream.device)
    fraction = (stream.unflatten(1, (-1, plan.bits)).long() << place).sum(-1)
    mask = (1 << plan.bits) - 1
    digits = [((fraction * plan.levels**j & mask) * plan.levels) >> plan.bits for j in range(plan.digits)]
    return torch.stack(digits, dim=-1).flatten(1)


def _words_of(bits: Tensor) -> Tensor:
    bits = torch.nn.functional.pad(bits, (0, -len(bits) % 32)).view(-1, 32)
    unsigned = (bits << torch.arange(32, device=bits.device)).sum(-1)
    return torch.where(unsigned < 1 << 31, unsigned, unsigned - (1 << 32)).to(torch.int32)
