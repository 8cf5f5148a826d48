"""Packing and unpacking kernels against their references."""

import pytest
import torch

from semkv_bench.kernels import (
    PackedLayout,
    PackedVectors,
    packing_reference,
    packing_triton,
)
from semkv_bench.kernels.affine_reference import affine_quantize
from semkv_bench.kernels.codebook_reference import codebook_quantize
from semkv_bench.quantizers.turboquant import codebook_tables

MIXES = {
    "two": [2],
    "three": [3],
    "two levels": [5, 6],
    "narrow and wide": [4, 11],
    "wide": [11, 15],
    "five": [3, 5, 7, 9, 13],
    "all": list(range(2, 17)),
    "above sixteen": [24, 100, 255, 256],
    "long": [5, 92, 135, 242],  # groups of 7, 46, 50 and 103 bits
}
SHAPES = [(1, 1, 64, 16), (2, 131, 80, 64), (3, 65, 96, 16), (2, 128, 128, 64), (1, 300, 256, 256)]
CASES = [(shape, "two levels") for shape in SHAPES]
CASES += [((2, 70, 20, 64), mix) for mix in MIXES if mix not in ("two levels", "all")]
CASES += [((2, 40, 20, 64), "all")]  # slow in the interpreter: every word may hold any class
OFTEN = [[SHAPES[1], "two levels"], [(2, 70, 20, 64), "long"]]


def slow_but(cases, often):
    return [case if list(case) in often else pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def layout_of(shape, mix, device, seed=0):
    heads, tokens, head_dim, block = shape
    choice = torch.randint(len(MIXES[mix]), (tokens,), generator=torch.Generator().manual_seed(seed))
    return PackedLayout.build(torch.tensor(MIXES[mix])[choice].to(device), heads, head_dim, block)


def affine_vectors(layout, groups=1, seed=0):
    x = sample(layout, seed)
    codes, scale, zero = affine_quantize(x, layout.levels()[None], layout.head_dim // groups)
    return PackedVectors(layout, packing_reference.pack(codes[0], layout), scale[0], zero)


def codebook_vectors(layout, seed=0):
    top = 1 << (max(16, *layout.class_levels) - 1).bit_length()
    tables = codebook_tables(layout.head_dim, top, layout.block_start.device)
    codes, norm = codebook_quantize(sample(layout, seed), layout.levels()[None], tables)
    words = packing_reference.pack(codes[0], layout)
    return PackedVectors(layout, words, norm[..., None], tables=tables)


def sample(layout, seed):
    shape = (layout.heads, layout.tokens, layout.head_dim)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x.to(layout.block_start.device)


@pytest.mark.parametrize(("shape", "mix"), slow_but(CASES, OFTEN), ids=str)
def test_words_and_codes(shape, mix, device, canaries):
    layout = layout_of(shape, mix, device)
    levels = layout.levels()
    random = torch.rand(layout.heads, layout.tokens, layout.head_dim, device=device)
    for codes in (random * levels[:, None], (levels - 1)[:, None].expand(random.shape)):
        codes = codes.to(torch.uint8)
        words = packing_reference.pack(codes, layout)
        assert torch.equal(packing_triton.pack(codes, layout), words)
        assert torch.equal(packing_triton.unpack(words, layout), codes)


def test_many_blocks_take_several_launches(device, canaries, monkeypatch):
    monkeypatch.setattr(packing_triton, "_BLOCKS", 2)
    layout = layout_of((2, 75, 4, 16), "two levels", device)
    codes = (torch.rand(2, 75, 4, device=device) * layout.levels()[:, None]).to(torch.uint8)
    assert layout.blocks == 5
    assert torch.equal(packing_triton.pack(codes, layout), packing_reference.pack(codes, layout))


def test_values_go_where_they_are_wanted_and_nowhere_else(device):
    packed = affine_vectors(layout_of((2, 20, 20, 16), "two levels", device))
    whole = torch.full((2, 25, 20), 7.0, dtype=torch.float16, device=device)
    packing_triton.unpack_dequantize(packed, out=whole[:, 3:23])
    assert torch.equal(whole[:, 3:23], packing_reference.unpack_dequantize(packed, torch.float16))
    assert bool((whole[:, :3] == 7).all()) and bool((whole[:, 23:] == 7).all())
    one = torch.empty(2, 20, 20, dtype=torch.float16, device=device)
    assert packing_triton.unpack_dequantize(packed, out=one) is one and torch.equal(one, whole[:, 3:23])
    with pytest.raises(ValueError, match="out must be"):
        packing_triton.unpack_dequantize(packed, out=whole)


DTYPES = [torch.float32, torch.float16, torch.bfloat16]
KINDS = [(kind, dtype) for kind in ("affine", "grouped", "codebook") for dtype in DTYPES]


@pytest.mark.parametrize(
    ("kind", "dtype"), slow_but(KINDS, [["grouped", torch.float16], ["codebook", torch.bfloat16]]), ids=str
)
def test_values(kind, dtype, device, canaries):
    for shape, mix in (((2, 131, 80, 64), "two levels"), ((1, 70, 256, 16), "all")):
        layout = layout_of(shape, mix, device)
        packed = (
            codebook_vectors(layout)
            if kind == "codebook"
            else affine_vectors(layout, 1 + 4 * (kind == "grouped") * (shape[2] == 80))
        )
        expected = packing_reference.unpack_dequantize(packed, dtype)
        assert torch.equal(packing_triton.unpack_dequantize(packed, dtype), expected)


@pytest.mark.parametrize("tile", [2, pytest.param(16, marks=pytest.mark.slow)])
def test_small_tiles_and_many_programs(tile, device, canaries, monkeypatch):
    # In the interpreter one program usually takes a whole block; on a GPU it does not.
    monkeypatch.setattr(packing_triton, "tile_tokens", lambda layout, elements=0: tile)
    monkeypatch.setattr(packing_triton, "words_per_program", lambda: 64)
    layout = layout_of((2, 75, 64, 64) if tile > 2 else (1, 19, 64, 16), "two levels", device)
    packed = affine_vectors(layout)
    codes = packing_reference.unpack(packed.words, layout)
    assert torch.equal(packing_triton.pack(codes, layout), packed.words)
    assert torch.equal(packing_triton.unpack(packed.words, layout), codes)
