"""How single values are written."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semkv_bench.report import formatting as f


@pytest.mark.parametrize(
    ("write", "value", "text"),
    [
        (f.fixed, 0.4375, "0.438"),
        (f.fixed, -0.0001, "0.000"),
        (f.fixed, None, "–"),
        (f.fixed, math.nan, "–"),
        (f.signed, 0.0125, "+0.013"),
        (f.signed, -0.0004, "0.000"),
        (f.p_value, 0.00099, "<0.001"),
        (f.p_value, 0.039, "0.039"),
        (f.p_value, 1.0, ">0.999"),
        (f.percent, 0.0345, "3.5%"),
        (f.ratio, 16 / 2.65, "6.04x"),
        (f.bits_text, math.log2(5), "2.322"),
        (f.bits_text, 3.0, "3.0"),
        (f.effective_text, 2.025, "2.025"),
        (f.effective_text, 2.65, "2.65"),
        (f.effective_text, 4.0, "4.00"),
        (f.divergence, 0.0, "0"),
        (f.divergence, 0.000123, "1.2e-4"),
        (f.divergence, 0.01234, "0.0123"),
        (f.divergence, 2.345, "2.35"),
        (f.divergence, 123.4, "123"),
        (f.count, 1200, "1,200"),
        (f.interval, [0.1, 0.25], "[0.100, 0.250]"),
        (f.interval, [None, None], "–"),
        (f.signed_interval, [-0.034, 0.012], "[-0.034, +0.012]"),
    ],
)
def test_values(write, value, text):
    assert write(value) == text


@pytest.mark.parametrize(
    ("levels", "setting", "words"),
    [(16, "affine-L16", "4.0 bits (L=16, int4)"), (None, "nf4", "4.0 bits (nf4)"), (None, None, "4.0 bits")],
)
def test_a_grid_point_without_levels_is_named(levels, setting, words):
    assert f.grid_point(levels, setting, 4.0) == words


@given(st.floats(allow_nan=False, min_value=-1, max_value=1), st.integers(1, 4))
def test_fixed_is_the_rounded_value(value, digits):
    assert abs(float(f.fixed(value, digits)) - value) <= 0.5000001 * 10**-digits
    assert (
        not f.fixed(value, digits).startswith("-0.0000"[: digits + 3]) or float(f.fixed(value, digits)) != 0
    )


@given(st.text())
def test_clean_text_can_be_written_and_moves_no_cursor(text):
    cleaned = f.clean(text)
    cleaned.encode()
    assert not any(ord(character) < 32 or 127 <= ord(character) < 160 for character in cleaned)


@given(st.text(min_size=1), st.integers(5, 30))
def test_shortened_text_fits(text, width):
    assert len(f.shorten(text, width)) <= width


def test_plain_data_holds_only_what_json_knows():
    data = f.plain_data(
        {"a": np.float64("nan"), 2: (np.int64(3), np.array([1.5, math.inf])), "b": np.bool_(True)}
    )
    assert data == {"a": None, "2": [3, [1.5, None]], "b": True}
    assert type(data["2"][0]) is int and type(data["b"]) is bool
