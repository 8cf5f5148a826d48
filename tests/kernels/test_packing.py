"""The packed layout: identity for every length and mixture, and real bytes against the formula."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semkv_bench.grid.levels import mix, packing_plan
from semkv_bench.kernels import PackedLayout, PackedVectors, total_nbytes
from semkv_bench.kernels.affine_reference import affine_quantize
from semkv_bench.kernels.codebook_reference import codebook_quantize
from semkv_bench.kernels.packing_reference import pack, unpack, unpack_dequantize
from semkv_bench.quantizers import Affine, TurboQuant
from semkv_bench.quantizers.turboquant import codebook_tables

PRICED = (2, 3, 5, 7, 11, 16, 24, 32, 64, 100, 242, 256)


def random_codes(layout, seed=0):
    uniform = torch.rand(
        layout.heads, layout.tokens, layout.head_dim, generator=torch.Generator().manual_seed(seed)
    )
    return (uniform * layout.levels()[:, None]).to(torch.uint8)


@given(
    st.lists(st.integers(2, 256), min_size=1, max_size=16).flatmap(
        lambda counts: st.lists(st.sampled_from(counts), max_size=70)
    ),
    st.integers(1, 3),
    st.integers(1, 70),
    st.sampled_from([16, 32, 64, 256]),
    st.integers(0, 99),
)
@settings(max_examples=150, deadline=None)
def test_unpack_of_pack_is_the_identity(levels, heads, head_dim, block, seed):
    layout = PackedLayout.build(torch.tensor(levels, dtype=torch.int64), heads, head_dim, block)
    assert layout.levels().tolist() == levels
    codes = random_codes(layout, seed)
    words = pack(codes, layout)
    assert len(words) == layout.words
    assert torch.equal(unpack(words, layout), codes)


def test_groups_of_every_level_count_are_the_fractions_that_are_told():
    """Against whole numbers of any size: random digits, and the largest ones."""
    for levels in range(2, 257):
        plan = packing_plan(levels)
        layout = PackedLayout.build(torch.full((16,), levels), 1, plan.digits, block=16)
        codes = random_codes(layout, seed=levels)
        codes[:, 3] = levels - 1
        words = pack(codes, layout)
        stream = sum((word & 0xFFFFFFFF) << 32 * place for place, word in enumerate(words.tolist()))
        for group, digits in enumerate(codes[0].tolist()):
            value = sum(digit * levels ** (plan.digits - 1 - place) for place, digit in enumerate(digits))
            fraction = -(-value * 2**plan.bits // levels**plan.digits)
            assert stream >> group * plan.bits & (2**plan.bits - 1) == fraction, (levels, digits)
        assert torch.equal(unpack(words, layout), codes), levels


def test_worked_example():
    # Three digits base 5 in seven bits: 4, 0, 3 is 4 * 25 + 3 = 103 of 125, stored as ceil(103 * 128 / 125) = 106.
    # The second group holds one digit: 2 * 25 = 50, stored as ceil(51.2) = 52 in the next seven bits.
    layout = PackedLayout.build(torch.tensor([5]), heads=1, head_dim=4, block=16)
    words = pack(torch.tensor([[[4, 0, 3, 2]]], dtype=torch.uint8), layout)
    assert words.tolist() == [106 + (52 << 7)]


def test_powers_of_two_are_plain_bits():
    layout = PackedLayout.build(torch.tensor([4]), heads=1, head_dim=16, block=16)
    codes = torch.tensor([3, 0, 1, 2] * 4, dtype=torch.uint8)
    word = sum(int(code) << 2 * place for place, code in enumerate(codes))
    assert (pack(codes.view(1, 1, 16), layout).item() & 0xFFFFFFFF) == word


def test_classes_share_bits_without_gaps():
    # 16 tokens of one value: 13 bits hold five codes of base 6, 3 more in another 13; 8 codes of base 4 in 16.
    levels = torch.tensor([4, 6] * 8)
    layout = PackedLayout.build(levels, heads=3, head_dim=1, block=16)
    assert layout.words == -(-3 * (16 + 2 * 13) // 32)
    assert layout.class_bits == 1 and layout.nbytes == 2 + 2 * 4 + 2


def test_padding_bits_are_zero():
    layout = PackedLayout.build(torch.tensor([3]), heads=1, head_dim=5, block=16)
    assert pack(torch.full((1, 1, 5), 2, dtype=torch.uint8), layout).item() == 255  # ceil(242 * 256 / 243)


@pytest.mark.quick_cases(40)
@pytest.mark.parametrize("shape", [(3, 64), (2, 64), (8, 128), (4, 80), (1, 256)], ids=str)
@pytest.mark.parametrize("block", [64, pytest.param(128, marks=pytest.mark.slow)])
@pytest.mark.parametrize("quantizer", [Affine(), Affine(32), TurboQuant()], ids=lambda q: q.name)
@pytest.mark.parametrize("levels", [(n,) for n in PRICED] + [(6, 5), (4, 3), (8, 2), (100, 24)], ids=str)
def test_real_bytes_agree_with_the_formula(shape, block, quantizer, levels):
    heads, head_dim = shape
    if quantizer == Affine(32) and head_dim % 32:
        pytest.skip("group does not divide the head")
    tokens = 5 * block
    high = torch.zeros(tokens, dtype=torch.bool)
    high[torch.randperm(tokens, generator=torch.Generator().manual_seed(0))[: tokens // 4]] = True
    layout = PackedLayout.build(torch.where(high, levels[0], levels[-1]), heads, head_dim, block)
    both = [vectors(layout, quantizer, seed) for seed in (0, 1)]  # keys and values
    formula = mix([(1, quantizer.storage(levels[0], head_dim)), (3, quantizer.storage(levels[-1], head_dim))])
    expected = formula.effective_bits / 8 * 2 * heads * tokens * head_dim
    assert expected <= total_nbytes(both) <= 1.005 * expected


def vectors(layout, quantizer, seed):
    """Coded random vectors, for their bytes only."""
    shape = (layout.heads, layout.tokens, layout.head_dim)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    words = torch.zeros(layout.words, dtype=torch.int32)
    if isinstance(quantizer, Affine):
        group = quantizer.group_size or layout.head_dim
        _, scale, zero = affine_quantize(x, layout.levels()[None], group)
        return PackedVectors(layout, words, scale[0], zero)
    tables = codebook_tables(
        layout.head_dim, 1 << (max(layout.class_levels) - 1).bit_length(), torch.device("cpu")
    )
    _, norm = codebook_quantize(x, layout.levels()[None], tables)
    return PackedVectors(layout, words, norm[..., None], tables=tables)


def test_a_shared_layout_counts_once():
    layout = PackedLayout.build(torch.full((64,), 4), 1, 64)
    other = PackedLayout.build(torch.full((64,), 4), 1, 64)
    one, two = vectors(layout, Affine(), 0), vectors(layout, Affine(), 1)
    assert total_nbytes([one, two]) == one.nbytes + two.nbytes + layout.nbytes
    assert total_nbytes([one, vectors(other, Affine(), 1)]) == one.nbytes + two.nbytes + 2 * layout.nbytes


@pytest.mark.parametrize("quantizer", [Affine(), TurboQuant()], ids=lambda q: q.name)
def test_packed_values_are_what_the_quantizer_decodes(quantizer):
    x = torch.randn(2, 100, 64, generator=torch.Generator().manual_seed(0))
    levels = torch.where(torch.arange(100) % 4 == 0, 6, 5)
    coder = quantizer.coder(64)
    encoded = coder.encode(x, levels)
    layout = PackedLayout.build(levels, 2, 64)
    words = pack(encoded.codes, layout)
    if quantizer.name == "affine":
        scale, zero = encoded.metadata.chunk(2, dim=-1)
        values = unpack_dequantize(PackedVectors(layout, words, scale, zero))
    else:
        packed = PackedVectors(layout, words, encoded.metadata, tables=coder.tables(16))
        values = coder.rotate_back(unpack_dequantize(packed))
    assert torch.equal(values, coder.decode(encoded, torch.float32))


@pytest.mark.parametrize(
    ("levels", "head_dim", "block"),
    [
        ([257], 64, 64),
        ([1], 64, 64),
        (range(2, 19), 64, 64),
        ([4], 64, 48),
        ([4], 64, 8),
        ([4], 512, 256),
    ],
)
def test_what_cannot_be_packed_is_refused(levels, head_dim, block):
    with pytest.raises(ValueError):
        PackedLayout.build(torch.tensor(list(levels)), 1, head_dim, block)
