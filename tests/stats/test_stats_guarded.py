"""The deciding interval: hand-derived numbers, its limits, and its coverage in a small simulation."""

import math

import numpy as np
import pytest
from scipy import stats

from semkv_bench.stats import StatsOptions
from semkv_bench.stats.equivalence import p_no_worse
from semkv_bench.stats.guarded import (
    SKEW_CAP,
    guarded_interval,
    lower_side,
    moments,
    p_above,
    p_below,
    p_few_losses,
    p_unseen_gains,
    p_unseen_losses,
    score_interval,
    task_weights,
    upper_side,
)


def sample(values, full=None, tasks=None, average="macro"):
    x = np.asarray(values, dtype=float).reshape(len(values), -1)
    stake = np.ones_like(x) if full is None else np.asarray(full, dtype=float).reshape(x.shape)
    codes = np.zeros(len(x), dtype=int) if tasks is None else np.asarray(tasks)
    return moments(x, stake, codes, average)


def test_ties_give_exactly_plus_two():
    # n ties, one pair at -1, one at +1: mean 0, s^2 = 2/(n+1), se = sqrt(2/((n+1)(n+2))), n+1 df.
    low, high = guarded_interval(sample(np.zeros(100)), 0.90)
    half = stats.t.ppf(0.95, 101) * math.sqrt(2 / (101 * 102))
    assert high[0] == pytest.approx(half)
    assert low[0] == pytest.approx(-half)
    assert half == pytest.approx(0.024, abs=0.0015)


def test_plain_moments_of_one_task():
    x = [-1, 0, 0, 0.5, 0, 0, 0, 0]
    m = sample(x)
    assert m.mean[0] == pytest.approx(-1 / 16)
    assert m.variance[0] == pytest.approx(np.var(x, ddof=1))
    assert (m.n_eff[0], m.df[0], m.clusters[0]) == (pytest.approx(8), 7, 8)
    assert m.differing[0] == pytest.approx(2)
    assert m.spread[0] == pytest.approx((1 + 0.125) / (1 + 0.25))
    # third central moment's unbiased estimate (k-statistic)
    assert m.third[0] == pytest.approx(stats.kstat(x, 3))


def test_lower_bound_by_hand():
    # 40 of 100 pairs differ by 0.5 down and 0.5 up in equal number: past ENOUGH, so the guard is
    # 1.5 pairs at -1 (scores 1 at stake) and one tie.
    x = np.r_[np.full(20, -0.5), np.full(20, 0.5), np.zeros(60)]
    side = lower_side(sample(x))
    n, center = 102.5, -1.5 / 102.5
    square = 40 * 0.25 + 100 * center**2 + 1.5 * (1 + center) ** 2 + center**2
    assert side.center[0] == pytest.approx(center)
    assert side.se[0] == pytest.approx(math.sqrt(square / ((n - 1) * n)))
    assert side.df[0] == pytest.approx(101.5)


def test_guard_scales_with_what_is_at_stake():
    rng = np.random.default_rng(0)
    x = 0.05 * rng.standard_normal(100)
    much = guarded_interval(sample(x, np.full(100, 1.0)), 0.95)
    little = guarded_interval(sample(x, np.full(100, 0.3)), 0.95)
    assert much[0][0] < little[0][0] < x.mean()
    assert much[1][0] == pytest.approx(little[1][0])
    # where all pairs differ, the upper bound is Student's but for the skewness term and one pair at the average
    student = x.mean() + stats.t.ppf(0.975, 99) * x.std(ddof=1) / 10
    assert little[1][0] == pytest.approx(student, abs=0.001)


@pytest.mark.parametrize("seed", range(5))
def test_p_values_and_bounds_agree(seed):
    rng = np.random.default_rng(seed)
    x = np.where(rng.random((60, 4)) < 0.2, rng.uniform(-1, 0.3, (60, 4)), 0)
    m = sample(x)
    low, high = guarded_interval(m, 0.90)
    for k in range(4):
        assert p_above(m, low[k])[k] == pytest.approx(0.05, abs=1e-9)
        assert p_below(m, high[k])[k] == pytest.approx(0.05, abs=1e-9)
    assert (p_below(m, 0.5) < p_below(m, 0.1)).all()


def test_upper_bound_grows_with_t():
    x = np.r_[-1, -1, np.full(5, -0.02), np.zeros(13)]
    side = upper_side(sample(x))
    positions = np.array([side.at(np.array([t]))[0] for t in np.linspace(-8, 8, 400)])
    assert (np.diff(positions) > 0).all()


def test_macro_average_is_the_mean_of_task_means_and_guards_once():
    x = np.r_[-1, 0, np.zeros(8)]
    tasks = np.r_[0, 0, np.ones(8, int)]
    assert sample(x, tasks=tasks).mean[0] == pytest.approx(-0.25)
    assert sample(x, tasks=tasks, average="micro").mean[0] == pytest.approx(-0.1)
    # the same ten ties in one task or in five equal tasks: the same guard, hence nearly the same interval
    one = guarded_interval(sample(np.zeros(100)), 0.9)
    five = guarded_interval(sample(np.zeros(100), tasks=np.arange(100) % 5), 0.9)
    assert five[1][0] == pytest.approx(one[1][0], rel=0.01)


def test_small_tasks_weigh_on_the_guard():
    sizes = np.repeat([0, 1, 2], [5, 20, 100])
    m = sample(np.zeros(125), tasks=sizes)
    w = np.repeat([1 / 15, 1 / 60, 1 / 300], [5, 20, 100])
    assert m.n_eff[0] == pytest.approx((w**3).sum() ** -0.5)
    assert guarded_interval(m, 0.9)[1][0] > 2 * guarded_interval(sample(np.zeros(125)), 0.9)[1][0]


def test_tasks_of_one_cluster_have_the_overall_variance():
    x = [-1.0, 0.0, 0.5, 0.0]
    m = sample(x, tasks=[0, 1, 2, 3])
    assert m.variance[0] == pytest.approx(np.var(x, ddof=1))
    assert m.df[0] == 3
    assert np.isfinite(guarded_interval(sample([0.3]), 0.95)[0]).all()


def test_weights_leave_out_absent_tasks():
    counts = np.array([[2.0, 0.0], [6.0, 3.0]])
    assert task_weights(counts, "macro").tolist() == [[0.5, 0.0], [0.5, 1.0]]
    assert task_weights(counts, "micro").tolist() == [[0.25, 0.0], [0.75, 1.0]]


def test_score_interval_by_hand():
    # ten of ten right, one made-up 0 and 1: mean 11/12, squares 11*(1/12)^2 + (11/12)^2
    low, high = score_interval(sample(np.ones(10)), 0.95)
    se = math.sqrt((11 / 144 + 121 / 144) / (11 * 12))
    assert low[0] == pytest.approx(11 / 12 - stats.t.ppf(0.975, 11) * se)
    assert high[0] > 1


SHAPES = {
    "whole scores lost, 5 %": lambda rng, s: (np.ones(s), -(rng.random(s) < 0.05).astype(float)),
    "whole scores lost, 10 %": lambda rng, s: (np.ones(s), -(rng.random(s) < 0.10).astype(float)),
    "small noise": lambda rng, s: (np.full(s, 0.3), 0.05 * rng.standard_normal(s)),
    "noise and losses": lambda rng, s: (
        np.full(s, 0.3),
        np.where(rng.random(s) < 0.05, -0.3, 0.05 * rng.standard_normal(s)),
    ),
}
TRUE = dict(zip(SHAPES, (-0.05, -0.10, 0.0, -0.015), strict=True))


@pytest.mark.parametrize("clusters", [50, 100, 300])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_coverage(shape, clusters):
    full, difference = SHAPES[shape](np.random.default_rng(clusters), (clusters, 4000))
    m = moments(difference, full, np.arange(clusters) % 3, "macro")
    low, high = guarded_interval(m, 0.95)
    coverage = ((low <= TRUE[shape]) & (TRUE[shape] <= high)).mean()
    # four standard errors of the simulation are 0.014
    assert coverage > 0.935
    if (np.abs(difference) > 0).sum(axis=0).mean() >= 20:
        assert coverage < 0.985
    if shape != "small noise":
        wrong = (p_no_worse(m, StatsOptions(margin=-TRUE[shape])) < 0.05).mean()
        assert wrong < 0.065  # a step of the discrete count, and four standard errors of the simulation


@pytest.mark.parametrize("margin", [0.01, 0.03, 0.10])
@pytest.mark.parametrize("clusters", [60, 120, 200, 450])
def test_no_level_is_too_small_for_whole_losses(margin, clusters):
    """Where a share ``margin`` of the examples loses everything, all outcomes summed: never more than the level."""
    lost = np.arange(clusters + 1)
    d = -(np.arange(clusters)[:, None] < lost).astype(float)
    m = moments(d, np.ones_like(d), np.zeros(clusters, dtype=int), "macro")
    p = p_no_worse(m, StatsOptions(margin=margin))
    chance = stats.binom.pmf(lost, clusters, margin)
    for level in (0.05, 0.05 / 4, 0.05 / 12, 0.05 / 50, 1e-4):
        assert chance @ (p < level) <= level * (1 + 1e-9)


def test_few_losses_by_hand():
    d = np.zeros((100, 3))
    d[0, 1], d[:2, 2] = -1.0, [-1.0, 1.0]
    m = moments(d, np.ones_like(d), np.zeros(100, dtype=int), "macro")
    one = 0.97**100 + 100 * 0.03 * 0.97**99
    assert p_few_losses(m, 0.03) == pytest.approx([0.97**100, one, 0.97**100])


def test_a_drop_may_hide_in_the_task_of_the_heaviest_clusters():
    """Ties in tasks of 10, 40 and 40: a drop of 0.02 is 0.06 of the first task, which ten ties pass at 0.94**10."""
    m = sample(np.zeros(90), tasks=np.repeat([0, 1, 2], [10, 40, 40]))
    assert p_few_losses(m, 0.02)[0] == pytest.approx(0.94**10)
    assert p_few_losses(sample(np.zeros(90), tasks=np.arange(90) % 3), 0.02)[0] == pytest.approx(0.98**90)


@pytest.mark.parametrize(
    "sizes", [(5, 50, 50, 50), (13, 100, 100, 100), (20, 60, 60), (10, *[20] * 7), (8,) * 12]
)
def test_nothing_is_equivalent_too_often_where_the_smallest_task_loses(sizes):
    tasks = np.repeat(np.arange(len(sizes)), sizes)
    rng = np.random.default_rng(sum(sizes))
    lost = (tasks == 0)[:, None] & (rng.random((len(tasks), 4000)) < 0.03 * len(sizes))
    m = moments(-lost.astype(float), np.ones(lost.shape), tasks, "macro")
    # three standard errors of the simulation are 0.01
    assert (p_no_worse(m, StatsOptions(margin=0.03)) < 0.05).mean() <= 0.06
    low, _ = guarded_interval(m, 0.95)
    assert (low > -0.03).mean() <= 0.06  # the steps of a small task, as for ties


def test_few_large_scores_among_many_small_ones_are_what_is_at_stake():
    """A tenth of the scores are 1 and only those are lost: small differences of the rest must not hide that."""
    rng = np.random.default_rng(7)
    high = rng.random((60, 4000)) < 0.1
    full = np.where(high, 1.0, 0.1)
    lost = high & (rng.random(high.shape) < 0.3)
    d = np.where(high, -lost.astype(float), 0.01 * rng.standard_normal(high.shape))
    m = moments(d, full, np.zeros(60, dtype=int), "macro")
    assert (p_no_worse(m, StatsOptions(margin=0.03)) < 0.05).mean() <= 0.06
    assert m.reference_size[0] == pytest.approx((full[:, 0] ** 3).sum() / (full[:, 0] ** 2).sum())


def test_seeds_lost_one_by_one_cost_less_than_seeds_lost_together():
    """Equal cluster means: a third of each of nine clusters, or three seeds of three that are lost at once."""
    d = np.zeros((100, 1))
    d[:30] = -1 / 3
    full, tasks = np.ones_like(d), np.zeros(100, dtype=int)
    plain = moments(d, full, tasks, "macro")
    together = moments(d, full, tasks, "macro", row_sizes=np.abs(d))
    alone = moments(d, full, tasks, "macro", row_sizes=(d < 0).astype(float))
    assert together.reference_size == plain.reference_size == pytest.approx(1)
    # thirty thirds: sum of squares 30/9; the sizes 30/27 against 30/9, a pseudo-cluster of 0.3 on both
    assert alone.reference_size == pytest.approx((30 / 27 + 0.3) / (30 / 9 + 0.3))
    low = [float(guarded_interval(m, 0.95)[0][0]) for m in (together, alone)]
    assert low[0] < low[1] < -1 / 10


@pytest.mark.parametrize("gain", [-0.5, -0.02, 0.02, 0.5])
@pytest.mark.parametrize("pairs", [5, 20, 120])
def test_an_interval_holds_its_own_estimate(gain, pairs):
    low, high = guarded_interval(sample(np.full(pairs, gain)), 0.95)
    assert low <= gain <= high


def test_upper_bound_of_many_differing_pairs_by_hand():
    """One pair at the average is added, and nothing that pulls the bound towards 0."""
    side = upper_side(sample(np.where(np.arange(60) < 20, -0.25, 0.05)))
    squares, cubes = 20 * 0.2**2 + 40 * 0.1**2, 20 * -(0.2**3) + 40 * 0.1**3
    assert side.center == pytest.approx(-0.05)
    assert side.se == pytest.approx(math.sqrt(squares / (60 * 61)))
    assert side.df == pytest.approx(60)
    assert side.skew == pytest.approx(cubes * 60**2 / (59 * 58) / squares / (6 * 61))


@pytest.mark.parametrize("clusters", [40, 200])
def test_all_lost_is_not_known_for_certain(clusters):
    """What no pair escaped, the next one may: one tie is added, and the correction for skewness is capped."""
    _, high = guarded_interval(sample(-np.ones(clusters)), 0.95)
    n = clusters + 2
    rest = (n - 1) * (1 / n) ** 2 + ((n - 1) / n) ** 2
    reach = stats.t.ppf(0.975, clusters + 1) * math.sqrt(rest / (n * (n - 1)))
    assert high[0] == pytest.approx(-(n - 1) / n + (1 + SKEW_CAP) * reach)


@pytest.mark.parametrize(("lost", "cap"), [(2, True), (3, True), (12, False)])
def test_correction_for_skewness_is_capped_where_losses_are_few(lost, cap):
    d = np.where(np.arange(200) < lost, -1.0, 0.002 * (-1.0) ** np.arange(200))
    side = upper_side(sample(d))
    t = np.array([1.96])
    reach, johnson = t * side.se, side.skew * (1 + 2 * t * t)
    assert bool(-johnson > SKEW_CAP * reach) == cap
    assert side.at(t) == pytest.approx(side.center + reach + np.maximum(johnson, -SKEW_CAP * reach))


def test_coverage_where_seeds_are_lost_one_by_one():
    """F1-like scores of three seeds, 50 examples: the interval is neither too short nor too wide."""
    rng = np.random.default_rng(50)
    rows, full = (3, 50, 40000), np.where(rng.random((50, 40000)) < 0.6, 1.0, rng.beta(2, 2, (50, 40000)))
    reworded = np.where(rng.random(rows) < 0.3, full * (1 - 0.3 * rng.random(rows)), full)
    away = np.where(rng.random(rows) < 0.05, 0.0, reworded) - full
    squares = (away**2).sum(axis=0)
    sizes = np.where(squares > 0, np.abs(away**3).sum(axis=0) / np.where(squares > 0, squares, 1), 0)
    m = moments(away.mean(axis=0), full, np.zeros(50, dtype=int), "macro", sizes)
    low, high = guarded_interval(m, 0.95)
    mean = 0.8 * (0.05 * -1 + 0.95 * 0.3 * -0.15)
    # three standard errors of the simulation are 0.003
    assert 0.94 - 0.003 < ((low <= mean) & (mean <= high)).mean() < 0.975 + 0.003


def test_what_a_sample_is_too_small_to_have_seen_is_not_ruled_out():
    # all differ by a hair, so the size of a loss seems known: none of a share of 0.03 is seen in 98 with more than 5 %
    noise = np.tile([0.001, -0.001], 100)
    for n, passes in ((98, False), (100, True)):
        m = sample(noise[:n], full=np.full(n, 0.1))
        assert p_above(m, -0.03)[0] < 1e-3
        assert p_unseen_losses(m, 0.03)[0] == pytest.approx(0.97**n)
        assert (p_no_worse(m, StatsOptions(margin=0.03))[0] < 0.05) == passes
    # what is lost already leaves less to go: 0.01 of the average, 0.02 unseen
    assert p_unseen_losses(sample(np.full(100, -0.01)), 0.03)[0] == pytest.approx(0.98**100)
    assert p_unseen_losses(sample(np.full(100, -0.04)), 0.03)[0] == 1


def test_unseen_changes_may_all_lie_in_a_small_task():
    # three tasks: 10, 45 and 45 examples; a drop of 0.03 is one of 0.09 in the small one
    tasks = [0] * 10 + [1] * 45 + [2] * 45
    m = sample(np.tile([0.001, -0.001], 50), full=np.full(100, 0.1), tasks=tasks)
    assert p_unseen_losses(m, 0.03)[0] == pytest.approx(0.91**10)
    lost = sample(np.full(100, -0.04) + np.tile([0.001, -0.001], 50), tasks=tasks)
    # 0.01 of gains would lift it back to the margin: all from the small task's 0.03
    assert p_unseen_gains(lost, 0.03)[0] == pytest.approx(0.97**10)
    assert p_unseen_gains(lost, 0.04)[0] == pytest.approx(1)


@pytest.mark.parametrize(("share", "n"), [(0.03, 50), (0.03, 99), (0.1, 29)])
def test_a_rare_whole_loss_among_small_differences_stays_within_alpha(share, n):
    """A few scores are 1 and all of them are lost, the rest 0.1 and differ by a hundredth: many samples hold none."""
    rng = np.random.default_rng(1)
    high = rng.random((n, 2000)) < share
    full = np.where(high, 1.0, 0.1)
    x = np.where(high, -1.0, 0.01 * rng.standard_normal(high.shape))
    m = moments(x, full, np.zeros(n, dtype=int), "macro")
    assert (p_above(m, -share) < 0.05).mean() > 0.04  # the interval alone: none was seen
    assert (p_no_worse(m, StatsOptions(margin=share)) < 0.05).mean() <= 0.055
