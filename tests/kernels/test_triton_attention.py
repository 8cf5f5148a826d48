"""The attention kernel against its reference."""

import pytest
import torch
from attended import FLOATS, Cache, piece, random_cache

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
