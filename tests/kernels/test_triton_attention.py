"""The attention kernel against its reference."""

import pytest
import torch
from attended import BLOCKS, E2M1_VALUES, FLOATS, Cache, by_block, piece, random_cache

from semkv_bench.kernels import (
    AlignedLayout,
    PackedVectors,
    aligned,
    attention_jobs,
    attention_reference,
    attention_triton,
)

# Scores and outputs are sums of up to 128 products of float16 with a high and a low part, each to 22 bits.
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


def agree(cache, **close):
    expected, actual = (cache.attended(kernels) for kernels in (attention_reference, attention_triton))
    for over_codes, over_plain in zip(expected, actual, strict=True):
        torch.testing.assert_close(over_plain, over_codes, **(close or CLOSE))


@pytest.mark.parametrize("seed", range(12))
def test_random_shapes(seed, device, canaries):
    agree(random_cache(seed, device))


@pytest.mark.slow
@pytest.mark.parametrize("fifty", range(6), ids=lambda part: f"part{part}")
def test_many_random_shapes(fifty, device):
    for seed in range(12 + 50 * fifty, 62 + 50 * fifty):
        agree(random_cache(seed, device))


def test_more_kinds_than_one_launch_has_code_for(device, canaries, monkeypatch):
    for module in (attention_jobs, attention_triton):
        monkeypatch.setattr(module, "tile_rows", lambda *_: 16)
    rows = [
        [piece(1, 99, 16, (2, 3, 5), (4, 6), device=device)],
        [piece(1, 3, 16, (9,), (9,), 1, device=device)],
    ]
    query, turned = torch.randn(2, 2, 2, 16, generator=torch.Generator().manual_seed(1)).to(device)
    assert len(attention_triton.attention_work(rows).kinds) == 7
    agree(Cache(query, turned, rows, [], 0.25))


def test_several_jobs_of_several_tiles(device, canaries, monkeypatch):
    for module in (attention_jobs, attention_triton):
        monkeypatch.setattr(module, "tile_rows", lambda *_: 16)
    monkeypatch.setattr(attention_jobs, "_PROGRAMS", 2)
    rows = [[piece(1, 200, 16, (5,), (6,), device=device)]]
    query = torch.randn(1, 2, 16, generator=torch.Generator().manual_seed(1)).to(device)
    jobs = attention_triton.attention_work(rows).jobs
    assert jobs[0, :, 9:11].tolist() == [[0, 96], [96, 192], [192, 200]]
    agree(Cache(query, query, rows, [], 0.25))


@pytest.mark.parametrize(("group", "head_dim"), [(71, 64), (128, 96), (64, 80)])
def test_many_queries_share_a_head(group, head_dim, device):
    rows = [[piece(1, 40, head_dim, (5,), (6,), device=device)]]
    query = torch.randn(1, group, head_dim, generator=torch.Generator().manual_seed(1)).to(device)
    agree(Cache(query, query, rows, [], 0.125))


@pytest.mark.parametrize(
    ("kinds", "head_dim", "tokens"),
    [
        (("e4m3", "e4m3"), 64, 100),
        (("e5m2", "e5m2"), 80, 49),
        (("e4m3", "affine"), 20, 7),
        (("codebook", "e4m3"), 16, 193),
        (("grouped", "e5m2"), 96, 50),
    ],
)
def test_small_floats(kinds, head_dim, tokens, device, canaries):
    """Bits of fp8 become float16 without a conversion, subnormals among them, and no value is scaled by itself."""
    counts = [(256,) if kind[0] == "e" else (5,) for kind in kinds]
    keys, values = piece(2, tokens, head_dim, *counts, seed=tokens, kinds=kinds, device=device)
    for side in (keys, values):
        if side.element is not None:
            side.scale[:, ::5] *= 1e-3
    query = torch.randn(1, 6, head_dim, generator=torch.Generator().manual_seed(1)).to(device)
    agree(Cache(query, query, [[(keys, values)]], [], head_dim**-0.5))


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_every_small_float_is_exact(element, device):
    """Attention over one token alone, whose channels have all bits there are, gives their values back."""
    bits = torch.arange(256, dtype=torch.uint8)
    expected = bits.view(FLOATS[element][0]).float()
    bits[~expected.isfinite()] = 0
    layout = AlignedLayout.build(torch.full((1,), 256, device=device), 1, 256)
    words = aligned.pack(bits[None, None].to(device), layout)
    side = PackedVectors(layout, words, torch.ones(1, 1, 1, device=device), element=element)
    query = torch.zeros(1, 1, 256, device=device)
    (out, _), _ = Cache(query, query, [[(side, side)]], [], 1.0).attended(attention_triton)
    assert torch.equal(out[0, 0].cpu(), expected.where(expected.isfinite(), 0))


@pytest.mark.parametrize(
    ("kinds", "head_dim", "tokens", "group"),
    [
        (("mxfp4", "mxfp4"), 64, 100, 3),
        (("q4_0", "q4_0"), 128, 49, 17),
        (("nvfp4", "nvfp4"), 64, 7, 4),
        (("nvfp4", "q4_0"), 128, 11, 9),
        (("sglang_fp4", "affine"), 80, 50, 1),  # five blocks, with room for eight
        (("affine", "mxfp4"), 96, 33, 3),
        (("e4m3", "q4_0"), 80, 20, 3),
        (("q4_0", "codebook"), 32, 50, 3),  # one block
        (("mxfp4", "q4_0"), 32, 5, 2),
    ],
)
def test_scales_of_blocks_of_channels(kinds, head_dim, tokens, group, device, canaries):
    """Four bits with several scales a token: products by block are scaled, and no value by itself."""
    counts = [(16,) if kind in BLOCKS else (256,) if kind == "e4m3" else (5,) for kind in kinds]
    keys, values = piece(2, tokens, head_dim, *counts, seed=tokens, kinds=kinds, device=device)
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(1, 2 * group, head_dim, generator=generator).to(device)
    open_ = tuple(torch.randn(2, 1, 2, 5, head_dim, generator=generator).to(device))
    agree(Cache(query, query, [[(keys, values)]], [open_], head_dim**-0.5))


@pytest.mark.parametrize("levels", [(5, 8), (32, 255)])
def test_codes_of_either_sign_have_any_number_of_levels(levels, device):
    sides = [
        piece(1, 40, 64, (count,), (count,), kinds=("q4_0", "q4_0"), device=device)[0] for count in levels
    ]
    query = torch.randn(1, 2, 64, generator=torch.Generator().manual_seed(1)).to(device)
    agree(Cache(query, query, [[tuple(sides)]], [], 0.125))


@pytest.mark.parametrize("kind", BLOCKS)
def test_every_code_of_four_bits_is_exact(kind, device):
    """Attention over one token alone, whose channels have all codes there are, in blocks of very different scales."""
    size, element, stored = BLOCKS[kind]
    codes = torch.arange(16, dtype=torch.uint8).repeat(8)[None, None]
    layout = AlignedLayout.build(torch.full((1,), 16, device=device), 1, 128)
    exponents = torch.arange(128 // size)[None, None] - 3
    powers = (
        (exponents + 127).to(stored) if stored == torch.uint8 else torch.exp2(exponents.float()).to(stored)
    )
    words = aligned.pack(codes.to(device), layout)
    side = PackedVectors(layout, words, powers.to(device), element=element)
    query = torch.zeros(1, 1, 128, device=device)
    (out, _), _ = Cache(query, query, [[(side, side)]], [], 1.0).attended(attention_triton)
    numbers = E2M1_VALUES[codes.int()] if element == "e2m1" else codes.float() - 8
    expected = numbers * torch.exp2(exponents.float()).repeat_interleave(size, -1)
    assert torch.equal(out[0, 0].cpu(), expected[0, 0])


@pytest.mark.parametrize("size", [2.0**-90, 2.0**-40, 2.0**60, 2.0**100])
def test_powers_of_two_far_beyond_float16(size, device):
    """All values tiny or huge, and keys so that their scores are not."""
    layout = AlignedLayout.build(torch.full((50,), 16, device=device), 1, 64)
    x = torch.randn(2, 1, 50, 64, generator=torch.Generator().manual_seed(2)).to(device)
    x[1, :, ::4] /= 64
    x[1, :, 1::4, :32] *= 2.0**-12
    keys, values = (by_block(one * size, layout, "mxfp4") for one in x)
    query = torch.randn(1, 2, 64, generator=torch.Generator().manual_seed(1)).to(device) / size
    (expected, sums), (actual, found) = (
        Cache(query, query, [[(keys, values)]], [], 0.25).attended(kernels)[0]
        for kernels in (attention_reference, attention_triton)
    )
    torch.testing.assert_close(actual / size, expected / size, **CLOSE)
    torch.testing.assert_close(found, sums, **CLOSE)


def test_a_scale_of_all_values_is_each_pieces_own(device):
    layout = AlignedLayout.build(torch.full((30,), 16, device=device), 2, 64)
    x = torch.randn(4, 2, 30, 64, generator=torch.Generator().manual_seed(2)).to(device)
    sides = [
        by_block(one, layout, "nvfp4", whole) for one, whole in zip(x, (0.01, 0.3, 2.5, 1e-3), strict=True)
    ]
    query = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(1)).to(device)
    agree(Cache(query, query, [[tuple(sides[:2]), tuple(sides[2:])]], [], 0.125))


@pytest.mark.parametrize("size", [60.0, 1e-4, 0.0])
def test_large_and_small_scores(size, device):
    """Scores of several hundred overflow an exponential that does not subtract the maximum."""
    rows = [[piece(1, 100, 64, (5, 6), (5, 6), device=device)]]
    query = size * torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(1)).to(device)
    cache = Cache(query, query, rows, [], 1.0)
    (_, log_sums), _ = cache.attended(attention_reference)
    assert float(log_sums.max()) > 200 or size < 60
    agree(cache, rtol=2e-4, atol=2e-4)


def test_tokens_of_very_different_size(device):
    """A token far larger than all others sets no scale for them; constant vectors have a step of zero."""
    keys, values = piece(1, 90, 64, (5,), (5,), device=device)
    for side, share in ((keys, 1e-3), (values, 2e-5)):
        side.scale[:, ::7] *= share
        side.zero[:, ::7] *= share
        side.scale[:, 3::11] = 0
    values.scale[:, 40] = 3000.0
    query = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(1)).to(device)
    expected, actual = (
        Cache(query, query, [[(keys, values)]], [], 0.125).attended(kernels)[0][0]
        for kernels in (attention_reference, attention_triton)
    )
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5 * float(expected.abs().max()))
