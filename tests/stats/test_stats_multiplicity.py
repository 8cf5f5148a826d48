"""How many settings share alpha: worked by hand, against Holm, and the family's error rate."""

from itertools import permutations

import numpy as np
import pytest
from thinned import thinned

from semkv_bench.stats.multiplicity import (
    BOTTOM_FIRST,
    TOP_FIRST,
    Shares,
    _hand_on,
    adjusted,
    holm,
    shares,
    weight_reached,
)
from semkv_bench.stats.pairing import SettingInfo


def grid(*bits, quantizer="affine"):
    return [SettingInfo(f"{quantizer}-{b}", "uniform", quantizer, float(b), float(b), b + 0.5) for b in bits]


def loose(number, kind="mixed"):
    return [SettingInfo(f"{kind}{i}", kind, "affine", 3.0, 3.0, 3.5) for i in range(number)]


# What goes from each of four settings to each other one; the last keeps a part.
_PATHS = [[0, 0.5, 0.5, 0], [0.25, 0, 0.25, 0.5], [1, 0, 0, 0], [0.2, 0.3, 0, 0]]


def test_holm_by_hand():
    # 0.01 * 4, max(0.04, 0.02 * 3), max(0.06, 0.03 * 2), max(0.06, 0.04 * 1)
    assert holm([0.03, 0.01, 0.04, 0.02]).tolist() == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.6, 0.7]).tolist() == [1.0, 1.0]
    assert holm([]).tolist() == []


def test_one_setting_gets_all_of_alpha():
    plan = shares(grid(4))
    assert plan.weights.tolist() == [1.0]
    assert adjusted([0.03], plan).tolist() == [0.03]


def test_mixes_alone_are_adjusted_by_holm():
    p = np.random.default_rng(1).random(7) ** 3
    assert adjusted(p, shares(loose(7))) == pytest.approx(holm(p))
    assert adjusted(p, shares(loose(4) + loose(3, "prune"))) == pytest.approx(holm(p))


def test_alpha_runs_down_the_grid_by_hand():
    """Three points, 0.99 of alpha at the top, 0.005 each at the others; all is handed on."""
    plan = shares(grid(4, 3, 2))
    assert plan.weights == pytest.approx([TOP_FIRST, (1 - TOP_FIRST) / 2, (1 - TOP_FIRST) / 2])
    # 0.02 / 0.99; then 0.03 at 0.995; then 0.04 at all of it
    assert adjusted([0.02, 0.03, 0.04], plan) == pytest.approx([0.02 / 0.99, 0.03 / 0.995, 0.04])
    # no point can be shown at a smaller alpha than the ones above
    assert adjusted([0.03, 0.001, 0.001], plan) == pytest.approx(np.full(3, 0.03 / 0.99))


def test_degradation_is_tested_from_the_bottom_up():
    plan = shares(grid(4, 3, 2), bottom_up=True)
    assert plan.weights == pytest.approx([(1 - BOTTOM_FIRST) / 2, (1 - BOTTOM_FIRST) / 2, BOTTOM_FIRST])
    # 0.01 / 0.9; then 0.02 at 0.95; then 0.5 at all of it
    assert adjusted([0.5, 0.02, 0.01], plan) == pytest.approx([0.5, 0.02 / 0.95, 0.01 / 0.9])


def test_order_in_the_report_does_not_matter():
    settings, p = grid(4, 3, 2) + loose(2), np.array([0.004, 0.02, 0.0001, 0.01, 0.03])
    expected = dict(zip((s.name for s in settings), adjusted(p, shares(settings)), strict=True))
    for order in permutations(range(5)):
        mixed = [settings[i] for i in order]
        got = adjusted(p[list(order)], shares(mixed))
        assert got == pytest.approx([expected[s.name] for s in mixed])


def test_an_open_point_does_not_silence_those_below_for_good():
    plan = shares(grid(4, 3, 2))
    found = adjusted([0.5, 1e-6, 1e-6], plan)
    assert found[0] > 0.05 > found[1]
    # what the two lower ones had comes round to the top
    assert adjusted([0.0495, 1e-6, 1e-6], plan)[0] == pytest.approx(0.0495)


def test_a_second_quantizer_and_mixes_take_their_shares():
    plan = shares(grid(4, 3) + grid(4, 3, quantizer="turboquant") + loose(5))
    assert plan.weights.sum() == pytest.approx(1)
    assert plan.weights[:2].sum() == plan.weights[2:4].sum() == pytest.approx(1 / 3)
    assert plan.weights[4:] == pytest.approx(np.full(5, 1 / 15))


@pytest.mark.parametrize("settings", [grid(5, 4, 3, 2), grid(4, 3) + loose(3), loose(4)])
def test_adjusted_values_are_levels(settings):
    """Shown at alpha exactly if the adjusted value is below it, whatever the alpha: one weight tells the same."""
    plan, rng = shares(settings), np.random.default_rng(2)
    for _ in range(100):
        p = rng.random(len(settings)) ** rng.integers(1, 6)
        alpha = float(rng.uniform(0.01, 0.2))
        found = adjusted(p, plan)
        for i in range(len(p)):
            assert (p[i] < alpha * weight_reached(p, i, plan, alpha)) == (found[i] < alpha)


@pytest.mark.parametrize("true", thinned([(0, 1, 2, 3), (1, 3), (2, 3), (3,), (0, 3)], (0, 1, 2, 3), (1, 3)))
def test_family_error_rate_stays_below_alpha(true):
    """Uniform p-values where nothing holds, tiny ones elsewhere: any false claim in at most 5 % of the samples."""
    plan, rng = shares(grid(5, 4, 3, 2)), np.random.default_rng(3)
    p = np.full((4, 4000), 1e-9)
    p[list(true)] = rng.random((len(true), 4000))
    found = np.apply_along_axis(adjusted, 0, p, plan)
    assert (found[list(true)] < 0.05).any(axis=0).mean() < 0.05 + 3 * np.sqrt(0.05 * 0.95 / 4000)


def test_paths_never_hand_on_more_than_there_is():
    plan = shares(grid(5, 4, 3) + loose(4))
    assert isinstance(plan, Shares) and plan.weights.sum() == pytest.approx(1)
    chain, _ = plan.groups
    assert chain.handed.sum(axis=1).tolist() == [1, 1, 1]
    assert np.diag(chain.handed).tolist() == [0, 0, 0]
    for order in permutations(range(4)):
        weights, handed = np.array([0.5, 0.3, 0.1, 0.1]), np.array(_PATHS)
        for gone in order:
            weights, handed = _hand_on(weights, handed, gone)
            assert weights.sum() <= 1 + 1e-12 and (handed.sum(axis=1) <= 1 + 1e-12).all()
            assert weights[gone] == 0 and not np.diag(handed).any()
            assert (handed >= 0).all() and (weights >= 0).all()
