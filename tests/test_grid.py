"""Storage arithmetic against the published table and hand-derived figures."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semkv_bench.errors import UsageError
from semkv_bench.grid.levels import (
    DELETED,
    FULL_PRECISION,
    Storage,
    check_levels,
    code_bits,
    mix,
    packing_plan,
)

PLANS = {2: (1, 1), 3: (5, 8), 4: (1, 2), 5: (3, 7), 6: (5, 13), 7: (6, 17), 8: (1, 3), 16: (1, 4)}


@pytest.mark.parametrize("levels", PLANS)
def test_plan_is_the_tabulated_one(levels):
    plan = packing_plan(levels)
    assert (plan.digits, plan.bits) == PLANS[levels]


def test_packed_bits_to_the_digits_of_the_table():
    shown = [f"{packing_plan(levels).packed_bits:.5g}" for levels in (2, 3, 4, 5, 6, 7, 8, 16)]
    assert shown == ["1", "1.6", "2", "2.3333", "2.6", "2.8333", "3", "4"]


@given(st.integers(2, 256))
def test_codes_fit_and_waste_less_than_one_percent(levels):
    plan = packing_plan(levels)
    assert levels**plan.digits <= 2**plan.bits < 2 * levels**plan.digits
    assert plan.packed_bits < 1.01 * math.log2(levels)


def test_code_bits_of_the_grid():
    assert [round(code_bits(n), 3) for n in (2, 3, 4, 5, 6, 7, 8)] == [1, 1.585, 2, 2.322, 2.585, 2.807, 3]


@pytest.mark.parametrize("bad", [[], None, [2.5], ["4"], [True], [1], [0], [-3], [257], [4, None], 2.0, "8"])
def test_bad_levels_are_refused(bad):
    with pytest.raises(UsageError):
        check_levels(bad)


def test_good_levels_become_a_tuple():
    assert check_levels([8, 3, 2]) == (8, 3, 2)
    assert check_levels(5) == (5,)


def test_mixture_weighs_by_share_or_by_count():
    half = mix([(0.5, Storage(1, 2, 3)), (0.5, Storage(3, 4, 5))])
    assert half == Storage(2, 3, 4)
    assert mix([(7, Storage(1, 2, 3)), (7, Storage(3, 4, 5))]) == half


def test_pruning_to_a_quarter_costs_four_bits():
    pruned = mix([(0.25, FULL_PRECISION), (0.75, DELETED)])
    assert pruned == Storage(4, 4, 4)
    assert pruned.compression == 4
    assert DELETED.compression == math.inf


@pytest.mark.parametrize("parts", [[], [(0, FULL_PRECISION)]])
def test_empty_mixture_is_refused(parts):
    with pytest.raises(ValueError):
        mix(parts)
