"""Bounds of several looks against published tables, and p-values that hold over all looks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from semkv_bench.stats.spending import Look, bounds, spent

# Lan-DeMets bounds of O'Brien-Fleming type at equal steps, as the programs of Reboussin, DeMets, Kim and Lan
# (2000) and gsDesign's sfLDOF give them: one-sided 0.025 (two-sided 0.05), and one-sided 0.05.
PUBLISHED = {
    (0.025, 2): (2.963, 1.969),
    (0.025, 3): (3.710, 2.511, 1.993),
    (0.025, 4): (4.333, 2.963, 2.359, 2.014),
    (0.025, 5): (4.877, 3.357, 2.680, 2.290, 2.031),
    (0.05, 2): (2.538, 1.662),
    (0.05, 3): (3.200, 2.141, 1.695),
    (0.05, 4): (3.750, 2.540, 2.016, 1.720),
    (0.05, 5): (4.229, 2.888, 2.298, 1.962, 1.740),
}


def equal(looks: int) -> tuple[float, ...]:
    return tuple((i + 1) / looks for i in range(looks))


@pytest.mark.parametrize(("alpha", "looks"), PUBLISHED)
def test_bounds_equal_the_published_ones(alpha, looks):
    assert bounds(alpha, equal(looks)) == pytest.approx(PUBLISHED[alpha, looks], abs=0.00051)


def test_spending_by_hand():
    # 2 (1 - Phi(1.95996 / sqrt(0.5))) = 2 (1 - Phi(2.77181))
    assert spent(0.05, 0.5) == pytest.approx(2 * stats.norm.sf(1.959964 / 0.5**0.5))
    assert spent(0.05, 0.5) == pytest.approx(0.005575, abs=1e-6)
    assert spent(0.05, 1.0) == pytest.approx(0.05)
    assert spent(0.05, 0.0) == 0.0


def test_one_look_at_the_end_is_a_plain_test():
    look = Look((1.0,), 1)
    assert look.level(0.05) == pytest.approx(0.05)
    assert look.confidence(0.95) == pytest.approx(0.95)
    p = np.array([1e-6, 0.01, 0.05, 0.4])
    assert look.over_all_looks(p) == pytest.approx(p, rel=1e-3)


def test_the_bounds_spend_alpha():
    # The paths of a running sum cross the bounds with the probability that was to be spent.
    times = (0.3, 0.55, 1.0)
    rng = np.random.default_rng(0)
    steps = rng.standard_normal((400_000, 3)) * np.sqrt(np.diff([0, *times]))
    z = steps.cumsum(axis=1) / np.sqrt(times)
    crossed = (z > bounds(0.05, times)).cumsum(axis=1) > 0
    for k, time in enumerate(times):
        assert crossed[:, k].mean() == pytest.approx(spent(0.05, time), abs=0.0012)


@settings(max_examples=8, deadline=None)
@given(
    times=st.lists(st.floats(0.05, 0.95), min_size=1, max_size=3, unique=True).map(sorted),
    alpha=st.sampled_from([0.05, 0.05 / 7, 0.01, 0.2]),
)
@pytest.mark.slow
def test_p_over_all_looks_is_below_alpha_just_beyond_the_bound(times, alpha):
    times = tuple(t for t, after in zip(times, [*times[1:], 2.0], strict=True) if after - t > 0.02)
    for number in range(1, len(times) + 2):
        look = Look((*times, 1.0), number)
        level = look.level(alpha)
        if level < 1e-12:
            continue
        inside, outside = look.over_all_looks(np.array([level * 1.02, level * 0.98]))
        assert outside < alpha < inside
        p = np.linspace(0, 1, 50)
        adjusted = look.over_all_looks(p)
        assert (np.diff(adjusted) >= 0).all() and (adjusted >= p - 1e-12).all() and adjusted[-1] == 1


def test_missing_p_values_stay_missing():
    assert np.isnan(Look((0.5, 1.0), 1).over_all_looks(np.array([np.nan, 0.01]))[0])
