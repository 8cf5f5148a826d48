"""Verdicts, sample size, and exact paired tests against numbers worked out by hand."""

import numpy as np
import pandas as pd
import pytest
from planted_records import analyze, by_setting, planted, records

from semkv_bench.stats import StatsOptions, exact_mcnemar
from semkv_bench.stats.contrast import Arm, contrast
from semkv_bench.stats.equivalence import p_degraded, p_no_worse
from semkv_bench.stats.guarded import moments, p_below
from semkv_bench.stats.operating_point import clusters_to_confirm
from semkv_bench.stats.runaway import paired_counts


def test_exact_mcnemar_by_hand():
    # two-sided: 2 * (C(9,0) + C(9,1)) / 2^9
    assert exact_mcnemar(8, 1) == 20 / 512 == 0.0390625
    assert exact_mcnemar(1, 8) == exact_mcnemar(8, 1)
    assert exact_mcnemar(0, 0) == 1.0
    assert exact_mcnemar(3, 0) == 0.25


def test_counts_leave_out_ties_and_missing_pairs():
    setting = np.array([0.0, 1.0, 0.5, 0.5, np.nan])
    reference = np.array([1.0, 1.0, 0.25, 0.5 + 1e-15, 1.0])
    assert paired_counts(setting, reference) == (1, 1)


def test_200_items_8_worse_1_better():
    full = np.r_[np.ones(199), 0]
    low = np.r_[np.zeros(8), np.ones(192)]
    row = by_setting(analyze(records({"full": full, "L4": low}), StatsOptions(resamples=100)))["L4"]
    assert (row["n_worse"], row["n_better"], row["p_mcnemar"]) == (8, 1, 0.0390625)
    assert row["diff"] == pytest.approx(-7 / 200)
    assert row["detectable"] is True
    assert row["verdict"] == "inconclusive"


def test_ten_ties_are_inconclusive_and_say_what_would_settle_it():
    ones = np.ones(10)
    report = analyze(
        records({"full": ones, "L8": ones, "L4": ones, "L2": 0 * ones}), StatsOptions(resamples=100)
    )
    rows = by_setting(report)
    assert rows["L2"]["verdict"] == "degraded"
    for name in ("L8", "L4"):
        assert rows[name]["verdict"] == "inconclusive"
        assert rows[name]["detectable"] is False
        # n ties pass where 0.97^n < 0.05, two points no later than one
        assert rows[name]["n_needed"] == 99


def test_the_size_named_settles_it():
    def report(n):
        ones = np.ones(n)
        return analyze(records({"full": ones, "L8": ones, "L2": 0 * ones}), StatsOptions(resamples=100))

    needed = by_setting(report(30))["L8"]["n_needed"]
    assert by_setting(report(needed - 1))["L8"]["verdict"] == "inconclusive"
    assert by_setting(report(needed))["L8"]["verdict"] == "equivalent"


def test_reference_that_scores_nothing_is_insensitive(quick):
    frame = planted(2)
    frame["score"] = 0.0
    report = analyze(frame, quick)
    assert {row["verdict"] for row in report["settings"]} == {"reference", "insensitive"}
    assert report["operating_point"] is None
    assert report["cliff"]["status"] == "undetermined"
    assert report["assay"]["reference_above_chance"] is False


def test_reference_at_chance_is_insensitive_even_if_settings_fall(quick):
    frame = planted(2)
    chance = {f"task{i}": 0.75 for i in range(3)}
    report = analyze(frame, quick, chance=chance)
    assert {row["verdict"] for row in report["settings"]} == {"reference", "insensitive"}
    assert analyze(frame, quick, chance=dict.fromkeys(chance, 0.4))["assay"]["sensitive"]


def test_floor_is_within_the_margin_yet_below(quick):
    rng = np.random.default_rng(3)
    full = np.full(900, 0.5)
    slight = full - 0.01 + 0.02 * rng.standard_normal(900)
    rows = by_setting(analyze(records({"full": full, "L8": slight, "L2": 0 * full}), quick))
    assert rows["L8"]["verdict"] == "floor"
    assert rows["L8"]["detectable"] is True
    assert -0.03 < rows["L8"]["equivalence_ci"][0] < rows["L8"]["diff_ci"][1] < 0


def test_a_gain_beyond_the_margin_is_not_degraded(quick):
    full = np.r_[np.ones(100), np.zeros(100)]
    rows = by_setting(analyze(records({"full": full, "L8": np.ones(200), "L2": 0 * full}), quick))
    assert rows["L8"]["verdict"] == "no_worse"
    assert rows["L8"]["n_needed"] is None
    assert rows["L8"]["detectable"] is True


@pytest.mark.parametrize(("won", "verdict"), [(0, "equivalent"), (1, "no_worse"), (5, "no_worse")])
def test_a_gain_is_no_loss(won, verdict):
    full = np.r_[np.ones(140), np.zeros(10)]
    better = np.r_[np.ones(140 + won), np.zeros(10 - won)]
    report = analyze(records({"full": full, "L8": better, "L2": 0 * full}), StatsOptions(resamples=100))
    row = by_setting(report)["L8"]
    assert row["verdict"] == verdict
    assert row["p_no_worse"] < 0.05 and (row["p_equivalence"] < 0.05) == (won == 0)
    assert report["cliff"]["upper_setting"] == report["operating_point"]["setting"] == "L8"
    assert report["operating_point"]["verdict"] == verdict


def test_a_gain_at_the_top_of_the_grid_holds_nothing_below_it_back():
    full = np.r_[np.ones(140), np.zeros(10)]
    scores = {"full": full, "L16": np.r_[np.ones(141), np.zeros(9)], "L8": full, "L2": 0 * full}
    rows = by_setting(analyze(records(scores), StatsOptions(resamples=100)))
    assert [rows[name]["verdict"] for name in ("L16", "L8", "L2")] == ["no_worse", "equivalent", "degraded"]


@pytest.mark.parametrize("n", [50, 100, 200])
def test_a_steady_small_loss_with_rare_gains_is_not_degraded(n):
    # the drop is at the margin, and most samples hold few of the gains that keep it there
    rng = np.random.default_rng(n)
    full = 0.2 + 0.5 * rng.random((n, 4000))
    scores = np.where(rng.random(full.shape) < 0.01, 1.0, full - 0.04)
    margin = 0.04 - 0.01 * (1.04 - 0.45)
    m = moments(scores - full, full, np.zeros(n, int), "macro")
    options = StatsOptions(margin=margin)
    assert (p_below(m, -margin) < 0.05).mean() > 0.1
    assert (p_degraded(m, options) < 0.05).mean() < 0.055


def test_repeat_of_the_reference_is_the_noise_floor(quick):
    frame = planted(2)
    again = frame[frame.setting == "full"].assign(setting="full-repeat", kind="full")
    frame = frame.assign(kind=np.where(frame.setting == "full", "full", "uniform"))
    report = analyze(pd.concat([frame, again]), quick)
    assert report["noise_floor"]["diff"] == 0
    assert report["noise_floor"]["n_worse"] == 0
    plain = by_setting(analyze(frame, quick))
    assert by_setting(report)["L16"]["p_equivalence"] == plain["L16"]["p_equivalence"]


def test_clusters_to_confirm_is_where_ties_can_pass():
    # 0.97^98 = 0.0505, 0.97^99 = 0.0490
    assert clusters_to_confirm(StatsOptions()) == 99
    assert 0.97**99 < 0.05 < 0.97**98


@pytest.mark.parametrize(("ties", "verdict"), [(98, "inconclusive"), (99, "equivalent")])
def test_ties_must_be_many_enough_to_have_shown_a_drop(ties, verdict):
    full = np.ones(ties)
    row = by_setting(
        analyze(records({"full": full, "L8": full, "L2": 0 * full}), StatsOptions(resamples=100))
    )
    assert row["L8"]["verdict"] == verdict
    if verdict == "inconclusive":
        assert row["L8"]["p_equivalence_raw"] == pytest.approx(0.97**98)


def test_the_size_named_settles_four_samples_in_five():
    rng = np.random.default_rng(1)
    full = np.ones(60)
    near = np.where(rng.random(60) < 0.3, 0.97, 1.0)
    near[0] = 0.5
    row = by_setting(
        analyze(records({"full": full, "L8": near, "L2": 0 * full}), StatsOptions(resamples=100))
    )
    needed = row["L8"]["n_needed"]
    assert needed > 60 and "n_needed_80" not in row["L8"]
    again = rng.choice(near, (needed, 2000))
    m = moments(again - 1, np.ones_like(again), np.zeros(needed, int), "macro")
    assert 0.7 < (p_no_worse(m, StatsOptions()) < 0.05).mean() < 0.95
    assert row["L2"]["n_needed"] is row["full"]["n_needed"] is None


@pytest.mark.parametrize(("examples", "verdict"), [(200, "equivalent"), (900, "floor")])
def test_a_steady_small_loss_is_a_floor_once_rare_gains_would_have_been_seen(examples, verdict):
    """All answers lose 0.005: a rare perfect one would make up for it, and 0.995**200 = 0.37 samples hold none."""
    rng = np.random.default_rng(0)
    full = rng.uniform(0.2, 0.5, examples)
    frame = records({"full": full, "L8": full - 0.005, "L4": full, "L2": 0 * full})
    report = analyze(frame, StatsOptions(resamples=100))
    row = by_setting(report)["L8"]
    assert row["verdict"] == verdict and row["detectable"] == (verdict == "floor")
    assert row["p_difference"] >= min(1, 2 * 0.995**examples)
    known = row["detectable_drop"]
    assert known is None or 2 * (1 - known) ** examples < 0.05
    first, second = (
        Arm(frame[frame.setting == name]["score"].to_numpy()[:, None], full[:, None]) for name in ("L8", "L4")
    )
    apart = contrast(first, second, np.zeros(examples, dtype=int), StatsOptions())
    assert (apart.p_difference[0] < 0.05) == (verdict == "floor")
