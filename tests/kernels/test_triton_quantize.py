"""Affine and codebook kernels against their references: codes and metadata to the bit."""

import pytest
import torch

from semkv_bench.kernels import (
    NonFiniteError,
    affine_reference,
    affine_triton,
    codebook_reference,
    codebook_triton,
)
from semkv_bench.quantizers.turboquant import codebook_tables

SHAPES = [(1, 1, 64), (2, 131, 80), (3, 64, 96), (2, 77, 128), (1, 70, 256)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SLOW = pytest.mark.slow
OFTEN = (2, 131, 80)
SHAPES_OFTEN = [shape if shape == OFTEN else pytest.param(shape, marks=SLOW) for shape in SHAPES]
DTYPES_OFTEN = [DTYPES[0], pytest.param(DTYPES[1], marks=SLOW), DTYPES[2]]
AWKWARD = [
    [2.5, 3.5, -2.5, 4.5],
    [9.0, 9.0, 9.0, 9.0],
    [-9.0, -9.0, -9.0, -9.0],
    [65504.0, -65504.0, 0.0, 1.0],
    [65504.0, 0.0, 1.0, 2.0],
    [3e-8, 0.0, 1e-8, 2e-8],
    [6e-8, -6e-8, 0.0, 1e-7],
    [1e-40, -1e-40, 0.0, 1e-45],
    [0.0, 0.5, 1.5, 7.0],
    [0.0, -0.0, 0.0, -0.0],
    [1000.2, 1000.3, 1000.2, 1000.25],
]


def vectors(shape, dtype, device):
    """Random vectors, the first ones of them awkward."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator) * torch.logspace(-3, 3, shape[1])[:, None]
    for token, row in enumerate(AWKWARD[: shape[1]]):
        x[0, token] = torch.tensor(row).repeat(shape[2] // 4)
    return x.clamp(-65504, 65504).to(dtype).to(device)


def settings(tokens, device):
    """Uniform and mixed settings; a uniform row, too, has a level for each token."""
    mixed = torch.randint(2, 17, (2, tokens), generator=torch.Generator().manual_seed(tokens))
    return torch.cat([torch.tensor([[2], [5], [16]]).expand(3, tokens), mixed]).to(device)


def assert_equal(actual, expected):
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES_OFTEN, ids=str)
@pytest.mark.parametrize("shape", SHAPES_OFTEN, ids=str)
def test_affine_codes_and_metadata(shape, dtype, device, canaries):
    x = vectors(shape, dtype, device)
    for group_size in (shape[2], 16):
        for levels in (settings(shape[1], device), torch.tensor([[3], [256]], device=device)):
            expected = affine_reference.affine_quantize(x, levels, group_size)
            assert int(expected[0].max()) > 0
            assert_equal(affine_triton.affine_quantize(x, levels, group_size), expected)


@pytest.mark.parametrize("dtype", DTYPES_OFTEN, ids=str)
@pytest.mark.parametrize("shape", SHAPES_OFTEN, ids=str)
def test_affine_values(shape, dtype, device, canaries):
    x = vectors(shape, dtype, device)
    levels = settings(shape[1], device)
    for group_size in (shape[2], 16):
        expected = affine_reference.affine_quantize_dequantize(x, levels, group_size)
        actual = affine_triton.affine_quantize_dequantize(x, levels, group_size)
        assert_equal([actual], [expected])


def test_many_programs_cover_all_rows(device, canaries, monkeypatch):
    # In the interpreter one program usually takes all rows of a head; on a GPU it does not.
    for module in (affine_triton, codebook_triton):
        monkeypatch.setattr(module, "rows_per_program", lambda width: 32)
    x, levels = vectors((2, 131, 80), torch.float32, device), settings(131, device)
    tables = codebook_tables(80, 16, device)
    for group_size in (80, 16):
        expected = affine_reference.affine_quantize(x, levels, group_size)
        assert_equal(affine_triton.affine_quantize(x, levels, group_size), expected)
    expected = codebook_reference.codebook_quantize(x, levels, tables)
    assert_equal(codebook_triton.codebook_quantize(x, levels, tables), expected)


def test_affine_ties_go_to_the_even_code(device):
    x = torch.tensor([[[0.0, 0.5, 1.5, 2.5, 3.5, 4.5, 6.0, 7.0]]], device=device)
    codes, scale, zero = affine_triton.affine_quantize(x, torch.tensor([[8]], device=device), 8)
    assert codes.tolist() == [[[[0, 0, 2, 2, 4, 4, 6, 7]]]]
    assert (scale.item(), zero.item()) == (1, 0)
    back = affine_triton.affine_quantize_dequantize(x, torch.tensor([[8]], device=device), 8)
    assert back.tolist() == [[[[0, 0, 2, 2, 4, 4, 6, 7]]]]


@pytest.mark.parametrize("shape", SHAPES_OFTEN, ids=str)
def test_codebook_codes_and_norms(shape, device, canaries):
    tables = codebook_tables(shape[2], 16, device)
    y = vectors(shape, torch.float32, device)
    for levels in (settings(shape[1], device), torch.tensor([[3], [16]], device=device)):
        expected = codebook_reference.codebook_quantize(y, levels, tables)
        assert int(expected[0].max()) > 0
        assert_equal(codebook_triton.codebook_quantize(y, levels, tables), expected)


@pytest.mark.parametrize("shape", SHAPES_OFTEN, ids=str)
def test_codebook_values(shape, device, canaries):
    tables = codebook_tables(shape[2], 16, device)
    y = vectors(shape, torch.float32, device)
    levels = settings(shape[1], device)
    expected = codebook_reference.codebook_quantize_dequantize(y, levels, tables)
    assert float(expected.abs().max()) > 0
    assert_equal([codebook_triton.codebook_quantize_dequantize(y, levels, tables)], [expected])


def test_codebook_on_and_beside_the_thresholds(device):
    # Unit vectors whose coordinates are thresholds, and the float32 numbers next to them.
    tables = codebook_tables(64, 16, device)
    y = torch.zeros(1, 15 * 3, 64)
    for index in range(15):
        threshold = tables.thresholds[16, index].cpu() / tables.cells_per_unit
        near = [
            torch.nextafter(threshold, threshold - 1),
            threshold,
            torch.nextafter(threshold, threshold + 1),
        ]
        for side, coordinate in enumerate(near):
            y[0, index * 3 + side, 0] = coordinate
            y[0, index * 3 + side, 1] = (1 - coordinate**2).sqrt()
    y = y.to(device)
    levels = torch.tensor([[16], [15], [2]], device=device)
    expected = codebook_reference.codebook_quantize(y, levels, tables)
    assert expected[0][0, 0, :, 0].unique().numel() == 16
    assert_equal(codebook_triton.codebook_quantize(y, levels, tables), expected)


@pytest.mark.parametrize("dtype", DTYPES_OFTEN, ids=str)
def test_strided_input_and_output(dtype, device):
    x = vectors((77, 2, 128), dtype, device).transpose(0, 1)  # [heads, tokens, head_dim], tokens outermost
    levels = settings(77, device)
    store = torch.full((10, 2, 90, 128), 77.0, dtype=dtype, device=device)
    view = store[::2, :, 5:82]
    assert affine_triton.affine_quantize_dequantize(x, levels, 128, out=view) is view
    assert torch.equal(view, affine_reference.affine_quantize_dequantize(x, levels, 128))
    assert (store[1::2] == 77).all() and (store[:, :, :5] == 77).all() and (store[:, :, 82:] == 77).all()
    tables = codebook_tables(128, 16, device)
    store = store.float().fill_(77)
    view = store[::2, :, 5:82]
    codebook_triton.codebook_quantize_dequantize(x.float(), levels, tables, out=view)
    assert torch.equal(view, codebook_reference.codebook_quantize_dequantize(x.float(), levels, tables))
    assert (store[1::2] == 77).all() and (store[:, :, :5] == 77).all() and (store[:, :, 82:] == 77).all()


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # the interpreter says so of inf - inf
@pytest.mark.parametrize(
    "bad", [float("nan"), pytest.param(float("inf"), marks=SLOW), pytest.param(float("-inf"), marks=SLOW)]
)
def test_non_finite_input_is_an_error(bad, device):
    x = vectors((2, 131, 80), torch.float32, device)
    levels, tables = torch.tensor([[4]], device=device), codebook_tables(80, 16, device)
    affine_triton.affine_quantize(x, levels, 80)
    x[1, 130, 79] = bad
    for call in (
        lambda: affine_triton.affine_quantize(x, levels, 80),
        lambda: affine_triton.affine_quantize_dequantize(x, levels, 16),
        lambda: codebook_triton.codebook_quantize(x, levels, tables),
        lambda: codebook_triton.codebook_quantize_dequantize(x, levels, tables),
    ):
        with pytest.raises(NonFiniteError):
            call()


def test_no_tokens_is_no_work(device):
    x, levels = torch.empty(2, 0, 64, device=device), torch.tensor([[4]], device=device)
    assert affine_triton.affine_quantize(x, levels, 64)[0].shape == (1, 2, 0, 64)
    tables = codebook_tables(64, 16, device)
    assert codebook_triton.codebook_quantize(x, levels, tables)[0].shape == (1, 2, 0, 64)


def test_large_rows_in_large_blocks(device):
    x = torch.randn(1, 8192, 128, generator=torch.Generator().manual_seed(0)).to(device)
    levels = torch.tensor([[3], [6]], device=device)
    assert_equal(
        affine_triton.affine_quantize(x, levels, 128), affine_reference.affine_quantize(x, levels, 128)
    )
