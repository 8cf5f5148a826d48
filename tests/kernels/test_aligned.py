"""The layout that attention reads: where codes lie, what they cost, and that they come back."""

import math

import pytest
import torch

from semkv_bench.grid.levels import aligned_plan, packing_plan
from semkv_bench.kernels import AlignedLayout, PackedLayout, pack, unpack


def random_codes(levels, heads, head_dim, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand(heads, len(levels), head_dim, generator=generator)
    return (draws * levels[:, None]).to(torch.uint8)


def test_three_tokens_of_two_channels_by_hand():
    layout = AlignedLayout.build(torch.tensor([5, 5, 5]), heads=1, head_dim=2)
    codes = torch.tensor([[[4, 0], [3, 0], [2, 1]]], dtype=torch.uint8)
    # ceil((4 * 25 + 3 * 5 + 2) * 128 / 125) = 120 and ceil(1 * 128 / 125) = 2.
    assert pack(codes, layout).tolist() == [120 | 2 << 16]
    layout = AlignedLayout.build(torch.tensor([4, 4, 4, 4]), heads=1, head_dim=1)
    codes = torch.tensor([[[3], [2], [1], [3]]], dtype=torch.uint8)
    # Digits of a power of two follow each other, the first highest; the fourth token begins a group of its own.
    assert pack(codes, layout).tolist() == [0b110000_111001]


@pytest.mark.parametrize(
    "levels", [2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17, 24, 25, 32, 33, 64, 100, 255, 256]
)
def test_codes_come_back(levels):
    for tokens, head_dim in ((1, 3), (47, 2), (100, 5)):
        counts = torch.full((tokens,), levels)
        layout = AlignedLayout.build(counts, 2, head_dim)
        for codes in (
            random_codes(counts, 2, head_dim),
            random_codes(counts, 2, head_dim) * 0 + (levels - 1),
        ):
            words = pack(codes, layout)
            assert len(words) == layout.words
            assert torch.equal(unpack(words, layout), codes)
            assert bits_of(words, layout) == expected_bits(codes, levels)


def bits_of(words, layout):
    """The bits of channel 0 of head 0 as one whole number, its groups alone."""
    units = words.view(layout.heads, layout.units, -1)[0, :, 0].tolist()
    plan = aligned_plan(layout.class_levels[0])
    groups = -(-layout.tokens // plan.digits)
    whole = sum((word & 0xFFFF) << 16 * place for place, word in enumerate(units))
    assert whole < 1 << plan.bits * groups
    return whole


def expected_bits(codes, levels):
    plan = aligned_plan(levels)
    digits = codes[0, :, 0].tolist()
    digits += [0] * (-len(digits) % plan.digits)
    whole = 0
    for group in range(len(digits) // plan.digits):
        value = 0
        for digit in digits[group * plan.digits : (group + 1) * plan.digits]:
            value = value * levels + digit
        fraction = -(-value * 2**plan.bits // levels**plan.digits)
        # Where whole digits fit the same bits, or the product would not fit a lane, they stand side by side.
        width = math.ceil(math.log2(levels))
        if plan.bits == plan.digits * width:
            fraction = 0
            for digit in digits[group * plan.digits : (group + 1) * plan.digits]:
                fraction = fraction << width | digit
        whole |= fraction << plan.bits * group
    return whole


def test_tokens_lie_by_the_levels_of_both_sides():
    keys, values = torch.tensor([6, 5, 5, 6, 5]), torch.tensor([4, 4, 3, 3, 4])
    order = keys * 257 + values
    sides = [AlignedLayout.build(side, 1, 4, order) for side in (keys, values)]
    assert [(s.levels, s.tokens) for s in sides[0].segments] == [(5, 1), (5, 2), (6, 1), (6, 1)]
    assert [(s.levels, s.tokens) for s in sides[1].segments] == [(3, 1), (4, 2), (3, 1), (4, 1)]
    for side, levels in zip(sides, (keys, values), strict=True):
        assert side.order.tolist() == [2, 1, 4, 3, 0]
        assert torch.equal(side.levels(), levels[side.order])
        text = torch.arange(10).view(1, 5, 2)
        assert torch.equal(side.unsort(side.sort(text)), text)
        codes = side.sort(random_codes(levels, 1, 4))
        assert torch.equal(unpack(pack(codes, side), side), codes)


def test_what_it_costs_beside_the_dense_layout():
    """25 % of tokens at six levels, the rest at five: 2.417 and not 2.400 bits, without metadata."""
    levels = torch.where(torch.arange(9600) % 4 == 0, 6, 5)
    aligned, dense = (build(levels, 8, 128) for build in (AlignedLayout.build, PackedLayout.build))
    values = 8 * 9600 * 128
    assert 32 * aligned.words / values == pytest.approx(0.25 * 8 / 3 + 0.75 * 7 / 3, abs=1e-3)
    assert 32 * dense.words / values == pytest.approx(2.4, abs=2e-3)
    assert aligned.nbytes == 1200 + 10
    cheaper = [
        count for count in range(2, 257) if aligned_plan(count).packed_bits < packing_plan(count).packed_bits
    ]
    assert cheaper == []


def test_bad_layouts():
    with pytest.raises(ValueError, match="packed levels must lie"):
        AlignedLayout.build(torch.tensor([1, 5]), 1, 4)
    with pytest.raises(ValueError, match="at most 256"):
        AlignedLayout.build(torch.full((300,), 5), 1, 4, torch.arange(300))
    assert AlignedLayout.build(torch.empty(0, dtype=torch.int64), 1, 4).words == 0
