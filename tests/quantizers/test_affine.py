"""Affine coding against hand-derived numbers and a plain NumPy reading of its definition."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semkv_bench.errors import UsageError
from semkv_bench.grid.levels import mix
from semkv_bench.quantizers import Affine, NonFiniteError

FLOAT16_MAX = 65504.0


def once(rows, levels, dtype=torch.float32, group_size=None):
    """quantize_dequantize of a list of rows under one level count: [rows, head_dim]."""
    x = torch.tensor(rows, dtype=dtype)[None]
    coder = Affine(group_size).coder(x.shape[-1])
    return coder.quantize_dequantize(x, torch.tensor([[levels]]))[0, 0]


def by_definition(row, levels):
    """One group in NumPy float32, value by value."""
    row = np.asarray(row, np.float32)
    zero = np.float16(np.clip(row.min(), -FLOAT16_MAX, FLOAT16_MAX)).astype(np.float32)
    with np.errstate(over="ignore"):
        step = (row.max() - row.min()) / np.float32(levels - 1)
    scale = np.float16(min(step, np.float32(FLOAT16_MAX))).astype(np.float32)
    if scale == 0:
        return np.full_like(row, zero)
    codes = np.clip(np.rint((row - zero) / scale), 0, levels - 1).astype(np.float32)
    return zero + codes * scale


def test_constant_rows_come_back_exactly():
    for levels in (2, 3, 5, 256):
        assert once([[9.0, 9.0], [-9.0, -9.0]], levels).tolist() == [[9, 9], [-9, -9]]


def test_ties_go_to_the_even_code():
    # zero 0, scale 1: the values are their own codes before rounding.
    row = [0.0, 0.5, 1.5, 2.5, 3.5, 4.5, 7.0]
    assert once([row], 8).tolist() == [[0, 0, 2, 2, 4, 4, 7]]


def test_worked_example():
    # L=3 over 0..1: scale 0.5; 0.25 is a tie and goes down to code 0, 0.26 up to 1, 0.75 up to 2.
    assert once([[0.0, 0.25, 0.26, 0.74, 0.75, 1.0]], 3).tolist() == [[0, 0, 0.5, 0.5, 1, 1]]


def test_scale_and_zero_are_rounded_to_float16_before_coding():
    row = [0.1, 0.2, 0.33, 0.7]
    zero = np.float32(np.float16(0.1))
    scale = np.float32(np.float16((np.float32(0.7) - np.float32(0.1)) / np.float32(4)))
    expected = zero + np.rint((np.float32(row) - zero) / scale) * scale
    assert once([row], 5).tolist() == [expected.tolist()]
    assert expected[0] == np.float32(0.0999755859375)


def test_groups_are_coded_apart():
    assert once([[0.0, 1.0, 100.0, 300.0]], 2, group_size=2).tolist() == [[0, 1, 100, 300]]
    assert once([[0.0, 1.0, 100.0, 300.0]], 2).tolist() == [[0, 0, 0, 300]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "row",
    [
        [3e-8, 0.0, 1e-8, 2e-8],
        [6e-8, -6e-8, 0.0, 1e-7],
        [65504.0, -65504.0, 0.0, 1.0],
        [65504.0, 0.0, 1.0, 2.0],
        [1e-40, 0.0, -1e-40, 1e-45],
        [-0.0, 0.0, -0.0, -0.0],
        [1000.2, 1000.3, 1000.2, 1000.25],
    ],
)
@pytest.mark.parametrize("levels", [2, 3, 8, 256])
def test_float16_extremes_stay_finite_and_follow_the_definition(row, levels, dtype):
    actual = once([row], levels, dtype)[0]
    expected = torch.from_numpy(by_definition(torch.tensor(row, dtype=dtype).float().numpy(), levels))
    if dtype == torch.float16:
        expected = expected.clamp(-FLOAT16_MAX, FLOAT16_MAX)
    assert torch.isfinite(actual).all()
    assert torch.equal(actual, expected.to(dtype))


@pytest.mark.parametrize("row", [[3e38, -3e38, 0.0, 1.0], [1e6, 1e6, 1e6, 1e6], [-2e5, 2e5, 0.0, 1e5]])
def test_values_beyond_float16_saturate(row):
    actual = once([row], 4)[0]
    assert torch.isfinite(actual).all()
    assert np.array_equal(actual.numpy(), by_definition(row, 4))


def test_scale_that_rounds_to_zero_gives_the_zero_point():
    assert once([[0.0, 2.0**-25, 2.0**-26, 0.0]], 2).tolist() == [[0, 0, 0, 0]]
    # A little more than half the smallest float16 rounds up to it.
    assert once([[0.0, 2.0**-25 * 1.5, 0.0, 0.0]], 2).tolist() == [[0, 2.0**-24, 0, 0]]


def test_float16_output_saturates_where_the_rounded_scale_overshoots():
    # 65504 / 7 = 9357.7 becomes 9360 in float16, and 7 * 9360 = 65520 would round to infinity.
    assert once([[0.0, 65504.0]], 8, torch.float16).tolist() == [[0, 65504]]
    assert once([[0.0, 65504.0]], 8, torch.float32).tolist() == [[0, 65520]]


@given(
    st.lists(st.floats(-1e5, 1e5, width=32), min_size=2, max_size=8),
    st.integers(2, 256),
)
@settings(max_examples=200, deadline=None)
def test_agrees_with_the_definition(row, levels):
    assert np.array_equal(once([row], levels)[0].numpy(), by_definition(row, levels))


@given(st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=8), st.integers(2, 16))
@settings(max_examples=200, deadline=None)
def test_error_is_at_most_half_a_step_and_the_rounding_of_zero(row, levels):
    step = (max(row) - min(row)) / (levels - 1)
    slack = 2.0**-10 * (max(map(abs, row)) + step * levels) + 2.0**-24 * levels
    error = np.abs(once([row], levels)[0].numpy().astype(np.float64) - np.float64(row))
    assert error.max() <= step / 2 + slack


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_are_errors(bad):
    with pytest.raises(NonFiniteError):
        once([[1.0, 2.0], [3.0, bad]], 4)
    with pytest.raises(NonFiniteError):
        Affine().coder(2).encode(torch.tensor([[[1.0, bad]]]), 4)


def test_group_size_must_divide_head_dim():
    with pytest.raises(
        UsageError, match=r"group_size=48 .* 80; legal sizes are 2, 4, 5, 8, 10, 16, 20, 40, 80"
    ):
        Affine(48).check(80)
    for wrong in (0, -2):
        with pytest.raises(UsageError):
            Affine(wrong).coder(64)
    Affine(16).check(80)


def test_storage_of_the_published_settings():
    affine = Affine()
    uniform = affine.storage(5, 128)
    assert [f"{v:.5g}" for v in (uniform.code_bits, uniform.packed_bits, uniform.effective_bits)] == [
        "2.3219",
        "2.3333",
        "2.5833",
    ]
    assert round(uniform.compression, 2) == 6.19
    mixed = mix([(0.25, affine.storage(6, 128)), (0.75, affine.storage(5, 128))])
    assert round(mixed.code_bits, 3) == 2.388
    assert round(mixed.packed_bits, 3) == 2.4
    assert round(mixed.effective_bits, 3) == 2.65
    assert round(mixed.compression, 2) == 6.04


def test_smaller_groups_cost_more():
    assert Affine(32).storage(4, 128).effective_bits == 2 + 1
    assert Affine().storage(4, 64).effective_bits == 2.5
