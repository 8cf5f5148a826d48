"""Random caches to attend to: pieces in the aligned layout, sinks and open tokens in 16 bits."""

import random
from dataclasses import dataclass

import torch

from semkv_bench.kernels import AlignedLayout, PackedVectors, aligned
from semkv_bench.kernels.affine_reference import affine_quantize
from semkv_bench.kernels.codebook_reference import codebook_quantize
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
