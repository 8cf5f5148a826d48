import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from semkv_bench.regress.shift_tests import Sample, permutation_test, tolerance_test


def _sample(old, new, tasks=None) -> Sample:
    old, new = np.asarray(old, dtype=float), np.asarray(new, dtype=float)
    return Sample(old, new, np.zeros(len(old), dtype=np.int64) if tasks is None else np.asarray(tasks))


def test_paired_test_without_tolerance_is_students():
    tested = tolerance_test(_sample([0, 0, 0, 0], [0, 1, 2, 3]), 0.0)
    # Mean 1.5, standard deviation sqrt(5/3), standard error sqrt(5/12).
    assert tested.difference == 1.5 and tested.error == pytest.approx((5 / 12) ** 0.5) and tested.df == 3
    assert tested.p == pytest.approx(stats.ttest_1samp([0, 1, 2, 3], 0).pvalue)


def test_differences_within_the_tolerance_are_none():
    small = tolerance_test(_sample(np.zeros(30), np.full(30, 0.04)), 0.05)
    large = tolerance_test(_sample(np.zeros(30), np.full(30, 0.06)), 0.05)
    assert (small.p, large.p) == (1.0, 0.0)
    rng = np.random.default_rng(0)
    at_the_edge = tolerance_test(_sample(np.zeros(30), 0.05 + 0.01 * rng.standard_normal(30)), 0.05)
    assert at_the_edge.p > 0.05


def test_tasks_weigh_alike_whatever_their_size():
    # Differences 1 (once) and 0 (three times): the mean of task means is a half.
    tested = tolerance_test(_sample([0] * 4, [1, 0, 0, 0], tasks=[0, 1, 1, 1]), 0.0)
    assert tested.difference == 0.5 and tested.df == 2


def test_sign_flips_of_five_equal_losses():
    # Of 32 sign patterns two are as extreme.
    tested = permutation_test(_sample([1] * 5, [0] * 5), seed=0)
    assert tested.difference == -1 and tested.p == pytest.approx(2 / 32, abs=0.006)


def test_false_alarms_are_as_rare_as_stated():
    rng = np.random.default_rng(1)
    alarms = 0
    for trial in range(300):
        old, new = (rng.random((2, 16)) < 0.3).astype(float)
        alarms += permutation_test(_sample(old, new), seed=trial, permutations=400).p < 0.05
    # 300 trials at 5 % or less: 15 expected, 27 is three standard deviations more.
    assert alarms <= 27


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=12))
@settings(max_examples=50, deadline=None)
def test_p_values_are_probabilities_and_blind_to_order(values):
    old, new = np.zeros(len(values)), np.array(values)
    for test in (lambda s: tolerance_test(s, 0.05), lambda s: permutation_test(s, seed=3, permutations=200)):
        forward = test(_sample(old, new)).p
        assert 0 <= forward <= 1
        if test(_sample(old, new)).error == 0:
            continue
        assert test(_sample(new, old)).difference == pytest.approx(-test(_sample(old, new)).difference)


def test_clusters_without_a_value_leave_in_pairs():
    known = _sample([1, np.nan, 3], [1, 2, np.nan]).known()
    assert known.old.tolist() == [1] and known.new.tolist() == [1]
