"""Random caches to attend to: pieces in the aligned layout, sinks and open tokens in 16 bits."""

import random
from dataclasses import dataclass

import torch

from semkv_bench.kernels import AlignedLayout, PackedVectors, aligned
from semkv_bench.kernels.affine_reference import affine_quantize
from semkv_bench.kernels.codebook_reference import codebook_quantize
from semkv_bench.kernels.packed import E2M1
from semkv_bench.quantizers.turboquant import codebook_tables


@dataclass
class Cache:
    """What ``packed_attention`` takes: queries, coded pieces by row, plain tokens."""

    query: torch.Tensor
    turned: torch.Tensor
    rows: list
    plain: list
    scale: float

    def attended(self, kernels):
        work = kernels.attention_work(self.rows)
        return kernels.packed_attention(self.query, self.turned, work, self.plain, self.scale)


def piece(
    heads, tokens, head_dim, key_levels, value_levels, seed=0, kinds=("affine", "affine"), device="cpu"
):
    """Keys and values of tokens whose level counts are drawn from ``key_levels`` and ``value_levels``."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [
        torch.tensor(choices)[torch.randint(len(choices), (tokens,), generator=generator)].to(device)
        for choices in (key_levels, value_levels)
    ]
    order = drawn[0] * 257 + drawn[1]
    sides = []
    for levels, kind in zip(drawn, kinds, strict=True):
        layout = AlignedLayout.build(levels, heads, head_dim, order)
        x = torch.randn(heads, tokens, head_dim, generator=generator) * 2 + torch.randn(
            head_dim, generator=generator
        )
        sides.append(vectors(x.to(device), layout, kind))
    return tuple(sides)


def vectors(x, layout, kind, groups=2):
    """x [heads, tokens, head_dim], tokens as they lie, coded."""
    levels = layout.levels()
    if kind in FLOATS:
        return floats(x, layout, kind)
    if kind in BLOCKS:
        return by_block(x, layout, kind)
    if kind == "codebook":
        top = 1 << (max(16, *layout.class_levels) - 1).bit_length()
        tables = codebook_tables(layout.head_dim, top, x.device)
        codes, norm = codebook_quantize(x, levels[None], tables)
        return PackedVectors(layout, aligned.pack(codes[0], layout), norm[..., None], tables=tables)
    codes, scale, zero = affine_quantize(
        x, levels[None], layout.head_dim // (groups if kind == "grouped" else 1)
    )
    # As the coder stores them: a token's scales and zeros side by side.
    metadata = torch.cat([scale[0], zero], dim=-1)
    return PackedVectors(layout, aligned.pack(codes[0], layout), *metadata.chunk(2, dim=-1))


FLOATS = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}


def floats(x, layout, element):
    """x as bits of small floats, each token's largest value the largest float."""
    kind, top = FLOATS[element]
    scale = (x.abs().amax(-1, keepdim=True) / top).clamp(min=1e-6)
    codes = (x / scale).clamp(-top, top).to(kind).view(torch.uint8)
    return PackedVectors(layout, aligned.pack(codes, layout), scale, element=element)


# Channels of a block, its element, and what its scales are stored as.
BLOCKS = {
    "mxfp4": (32, "e2m1", torch.uint8),
    "sglang_fp4": (16, "e2m1", torch.uint8),
    "nvfp4": (16, "e2m1", torch.float8_e4m3fn),
    "q4_0": (32, "symmetric", torch.float16),
}
E2M1_VALUES = torch.tensor([*E2M1, *(-size for size in E2M1)])


def by_block(x, layout, kind, whole=1.0):
    """x by the nearest numbers, each block's largest value about the largest of them; of q4_0 some steps below zero."""
    size, element, stored = BLOCKS[kind]
    blocks = x.unflatten(-1, (-1, size if x.shape[-1] % size == 0 else x.shape[-1] // 5))
    largest, half = blocks.abs().amax(-1, keepdim=True), layout.class_levels[0] // 2
    if element == "symmetric":
        sign = torch.where(torch.arange(blocks.shape[-2]) % 2 == 0, 1, -1)[:, None].to(x.device)
        scale = (sign * largest / half).half()
        codes = ((blocks / scale.float()).round() + half).clamp(0, layout.class_levels[0] - 1).to(torch.uint8)
        whole = 1.0
    else:
        if stored == torch.uint8:
            scale = ((largest / whole / 6).log2().ceil() + 127).clamp(1, 254).to(torch.uint8)
            step = ((scale.int() << 23).view(torch.float32)) * whole
        else:
            scale = (largest / whole / 6).clamp(2**-6, 448).to(stored)
            step = scale.float() * whole
        codes = ((blocks / step)[..., None] - E2M1_VALUES.to(x.device)).abs().argmin(-1).to(torch.uint8)
    words = aligned.pack(codes.flatten(-2).contiguous(), layout)
    return PackedVectors(layout, words, scale.squeeze(-1), element=element, whole=whole)


MIXES = [(5,), (4,), (6, 5), (3, 2), (8, 7, 16), (9, 12), (24, 32), (100, 256), (2, 3, 7)]


def random_cache(seed, device="cpu"):
    """A cache of random shape: heads, groups, mixes, rows of unequal length, tails and windows, some of them empty."""
    draw = random.Random(seed)
    heads, head_dim = draw.choice([1, 2, 3]), draw.choice([16, 20, 64, 80, 96, 128])
    group, rows = draw.choice([1, 3, 4, 5]), draw.choice([1, 1, 2])
    kinds = draw.choice(
        [("affine", "affine")] * 4 + [("codebook", "codebook"), ("affine", "codebook"), ("grouped",) * 2]
    )
    mixes = [draw.choice(MIXES), draw.choice(MIXES)] if draw.random() < 0.5 else [draw.choice(MIXES)] * 2
    pieces = []
    for _ in range(rows):
        row = []
        for _ in range(draw.choice([0, 1, 1, 2])):
            # Of a mix a short piece often has some classes alone.
            chosen = [mix if draw.random() < 0.7 else mix[:1] for mix in mixes]
            tokens = draw.choice([1, 2, 7, 48, 100, 193])
            row.append(piece(heads, tokens, head_dim, *chosen, draw.randrange(10**6), kinds, device))
        pieces.append(row)
    generator = torch.Generator().manual_seed(seed)
    plain = []
    for tokens in (draw.choice([0, 0, 4]), draw.choice([0, 1, 33])):
        dtype = draw.choice([torch.float16, torch.bfloat16, torch.float32])
        # As an open buffer is: room for more tokens than there are.
        held = torch.randn(2, rows, heads, tokens + 3, head_dim, generator=generator).to(device, dtype)
        plain.append(tuple(held[:, :, :, :tokens]))
    if not any(pieces) and not any(keys.shape[2] for keys, _ in plain):
        pieces[0] = [piece(heads, 5, head_dim, (5,), (5,), seed, kinds, device)]
    dtype = draw.choice([torch.float16, torch.bfloat16, torch.float32])
    query, turned = torch.randn(2, rows, heads * group, head_dim, generator=generator).to(device, dtype)
    return Cache(query, turned, pieces, plain, head_dim**-0.5)
