"""The drop that a run would have shown, what is left above the cliff, turns and the detector of runaways."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from planted_records import analyze, by_setting, planted, records

from semkv_bench.stats import StatsOptions
from semkv_bench.stats.contrast import Arm, contrast
from semkv_bench.stats.guarded import moments, p_below
from semkv_bench.stats.pairing import SettingInfo
from semkv_bench.stats.power import detectable_drops, residuals
from semkv_bench.stats.result import Cliff
from semkv_bench.stats.spending import Look

OPTIONS = StatsOptions(margin=0.1, resamples=200)


def chance_of_detection(rng, n, drop, noise, repetitions=3000):
    """Share of made-up samples with an average drop of ``drop`` in which the guarded test sees it."""
    right = (rng.random((n, repetitions)) < 0.5).astype(float)
    flipped = rng.random(right.shape) < noise / 2
    score = np.where(flipped, 1 - right, right)
    lost = rng.random(right.shape) < drop / (0.5 * (1 - noise / 2))
    score = np.where(lost & (right > 0) & (score > 0), 0.0, score)
    m = moments(score - right, right, np.zeros(n, int), "macro")
    return float((2 * p_below(m, 0.0) < OPTIONS.alpha).mean())


@pytest.mark.parametrize(("n", "noise"), [(40, 0.0), (80, 0.1), (200, 0.1), (400, 0.0)])
def test_the_drop_is_detected_four_times_in_five(n, noise):
    """Worked out from a sample without a drop; whole losses come in steps, so the share is a little off."""
    rng = np.random.default_rng(n)
    right = (rng.random((n, 400)) < 0.5).astype(float)
    score = np.where(rng.random(right.shape) < noise / 2, 1 - right, right)
    m = moments(score - right, right, np.zeros(n, int), "macro")
    drop = float(np.nanmedian(detectable_drops(m, right.mean(axis=0), OPTIONS)))
    assert 0.7 <= chance_of_detection(rng, n, drop, noise) <= 0.96


@pytest.mark.parametrize("lost", [1, 20, 60, 79, 80])
def test_what_could_be_detected_does_not_depend_on_what_was_lost(lost):
    """Whole losses: a sample that lost all of its answers could have shown the same drop as one that lost none."""
    found = []
    for number in (0, lost):
        d = -(np.arange(80) < number).astype(float)[:, None]
        m = moments(d, np.ones_like(d), np.zeros(80, int), "macro")
        found.append(float(detectable_drops(m, np.ones(1), OPTIONS)[0]))
    assert found[1] == pytest.approx(found[0], abs=0.003)


def test_more_examples_show_smaller_drops():
    sizes = (10, 30, 100, 300, 1000)
    drops = []
    for n in sizes:
        ties = np.zeros((n, 1))
        m = moments(ties, np.ones((n, 1)), np.zeros(n, int), "macro")
        drops.append(float(detectable_drops(m, np.ones(1), OPTIONS)[0]))
    assert drops == sorted(drops, reverse=True)
    assert drops[-1] < 0.01 < drops[1] < 0.3


def test_a_drop_larger_than_the_reference_cannot_be_seen():
    ties = np.zeros((6, 1))
    m = moments(ties, np.full((6, 1), 0.1), np.zeros(6, int), "macro")
    assert np.isnan(detectable_drops(m, np.array([0.1]), OPTIONS)).all()


def test_what_is_left_above_the_cliff():
    infos = [
        SettingInfo("full", "full", None, 16.0, None, None),
        SettingInfo("q-L16", "uniform", "q", 4.0, None, None),
        SettingInfo("q-L8", "uniform", "q", 3.0, None, None),
        SettingInfo("q-L4", "uniform", "q", 2.0, None, None),
        SettingInfo("q-L8/4@0.5:a", "mixed", "q", 2.5, None, None),
        SettingInfo("q-L8/4@0.1:a", "mixed", "q", 2.1, None, None),
        SettingInfo("r-L16", "uniform", "r", 4.0, None, None),
    ]
    verdicts = ["reference", "equivalent", "floor", "degraded", "floor", "inconclusive", "inconclusive"]
    below = np.array([False, False, True, True, True, True, True])
    nothing = Cliff(
        status="undetermined",
        lower_bits=None,
        upper_bits=None,
        lower_setting=None,
        upper_setting=None,
        probability=None,
    )
    cliffs = {"q": replace(nothing, upper_bits=3.0), "r": nothing}
    left = residuals(infos, verdicts, below, cliffs)
    assert left == [None, "not detected", "floor", None, "floor", None, None]


def test_every_setting_says_what_it_could_have_shown():
    rows = by_setting(analyze(planted(edge=2), OPTIONS))
    assert rows["full"]["detectable_drop"] is None and rows["full"]["residual"] is None
    assert all(0 < row["detectable_drop"] < 0.3 for name, row in rows.items() if name != "full")
    assert rows["L16"]["residual"] == "not detected" and rows["L2"]["residual"] is None


def conversation(examples=60, turns=3, loss=0.5) -> pd.DataFrame:
    """Two settings over several turns: L8 loses nothing, L2 loses ``loss`` more of its answers in every turn."""
    rng = np.random.default_rng(0)
    rows = []
    for i in range(examples):
        for turn in range(turns):
            for name, bits in (("full", 16.0), ("L8", 3.0), ("L2", 1.0)):
                lost = name == "L2" and rng.random() < loss * turn
                rows.append(
                    {"task": "talk", "example_id": i, "turn": turn, "setting": name, "code_bits": bits}
                    | {"score": float(not lost), "coded_share": 0.0 if name == "full" else turn / turns}
                    | {"quantized_reads": 0 if name == "full" or turn == 0 else 5}
                )
    return pd.DataFrame(rows)


def test_turns_one_by_one():
    report = analyze(conversation(), OPTIONS)
    assert (report["n_turns"], report["n_units_recorded"], report["n_clusters"]) == (3, 60, 60)
    assert [turn["turn"] for turn in report["turns"]] == [0, 1, 2]
    first, _, last = (turn["settings"] for turn in report["turns"])
    assert first["L2"]["diff"] == 0 and last["L2"]["diff"] == -1
    assert first["full"]["diff"] is None and last["full"]["score"] == 1
    assert last["L2"]["coded_share"] == pytest.approx(2 / 3)
    whole = by_setting(report)["L2"]["diff"]
    assert np.mean([turn["settings"]["L2"]["diff"] for turn in report["turns"]]) == pytest.approx(whole)


def test_drift_is_the_last_turn_less_the_first():
    drift = {row["setting"]: row for row in analyze(conversation(), OPTIONS)["turn_drift"]}
    assert drift["L2"]["diff"] == -1 and drift["L2"]["p"] < 0.001
    assert drift["L2"]["diff_ci"][0] < -1 < drift["L2"]["diff_ci"][1]
    assert drift["L8"]["diff"] == 0 and drift["L8"]["p"] == 1
    assert (drift["L8"]["first_turn"], drift["L8"]["last_turn"]) == (0, 2)


@pytest.mark.slow
def test_drift_that_missing_answers_could_make_up_is_none():
    """30 % of the last answers are lost; without as many of the first answers nothing is shown any more."""
    made = conversation(examples=100, turns=2, loss=0.3)
    whole = {row["setting"]: row for row in analyze(made, OPTIONS)["turn_drift"]}
    assert whole["L2"]["p"] < 0.001
    dropped = replace(OPTIONS, unpaired="drop")
    first = (made["setting"] == "L2") & (made["turn"] == 0)
    cut = {
        row["setting"]: row
        for row in analyze(made[~(first & (made["example_id"] < 30))], dropped)["turn_drift"]
    }
    assert cut["L2"]["n_clusters"] == 70 and cut["L2"]["diff"] < -0.2
    assert cut["L2"]["p"] > 0.5
    few = {
        row["setting"]: row
        for row in analyze(made[~(first & (made["example_id"] < 3))], dropped)["turn_drift"]
    }
    assert whole["L2"]["p"] < few["L2"]["p"] < 0.001
    assert few["L8"]["p"] == 1
    # answers of full precision that are missing count as won, so what is missing of the last turn is a loss
    alone = (made["setting"] == "full") & (made["turn"] == 1) & (made["example_id"] < 30)
    kept = {row["setting"]: row for row in analyze(made[~alone], dropped)["turn_drift"]}
    assert kept["L2"]["n_clusters"] == 70 and kept["L8"]["p"] == 1


def test_a_single_turn_has_no_turns():
    report = analyze(planted(edge=2, examples=20), OPTIONS)
    assert report["turns"] == [] and report["turn_drift"] == [] and report["n_turns"] == 1


def test_turns_that_only_some_conversations_have():
    made = conversation(examples=30)
    made = made[(made["turn"] < 2) | (made["example_id"] < 10)]
    report = analyze(made, OPTIONS)
    assert [turn["n_clusters"] for turn in report["turns"]] == [30, 30, 10]
    assert {row["n_clusters"] for row in report["turn_drift"]} == {10}


def detector(flags, **columns):
    scores = {"full": [1.0] * len(flags), "L2": [0.0] * len(flags)}
    other = {name: {"full": value, "L2": [64] * len(flags)} for name, value in columns.items()}
    made = records(scores, runaway={"full": flags, "L2": [True] * len(flags)}, **other)
    return analyze(made, OPTIONS)["runaway_detector"]


def test_false_alarms_of_full_precision():
    found = detector([True, True, False, False, False, False, False, False, False, False])
    assert (found["outputs"], found["runaway"], found["rate"]) == (10, 2, 0.2)
    assert found["rate_ci"][0] < 0.2 < found["rate_ci"][1] and found["loops"] is None


def test_outputs_short_of_the_limit_must_have_looped():
    found = detector([True, True, False, False], new_tokens=[64, 40, 12, 9])
    assert (found["loops"], found["loops_exact"]) == (1, False)


def test_loops_as_recorded_are_exact():
    made = records(
        {"full": [1.0] * 4, "L2": [0.0] * 4}, runaway={"full": [True, True, True, False], "L2": [True] * 4}
    )
    made["loop"] = [True, True, False, False] + [True] * 4
    found = analyze(made, OPTIONS)["runaway_detector"]
    assert (found["runaway"], found["loops"], found["loops_exact"]) == (3, 2, True)


def test_runaways_that_were_not_recorded():
    assert analyze(planted(edge=2, examples=20), OPTIONS)["runaway_detector"] is None


def test_an_early_look_shows_less():
    """At a look the same sample needs a larger drop, and its intervals are wider, since more looks may follow."""
    look = Look((0.5, 1.0), 1)
    ties, ones = np.zeros((60, 1)), np.ones((60, 1))
    m = moments(ties, ones, np.zeros(60, int), "macro")
    assert detectable_drops(m, np.ones(1), OPTIONS, look) > detectable_drops(m, np.ones(1), OPTIONS)
    rng = np.random.default_rng(0)
    one, two = ((rng.random((60, 1)) < right).astype(float) for right in (0.7, 0.5))
    sides = Arm(one, ones), Arm(two, ones)
    once = contrast(*sides, np.zeros(60, int), OPTIONS)
    early = contrast(*sides, np.zeros(60, int), OPTIONS, look)
    assert early.low[0] < once.low[0] and once.high[0] < early.high[0]
    assert early.p_difference[0] > once.p_difference[0] and early.mean[0] == once.mean[0]
