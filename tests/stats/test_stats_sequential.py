"""The stop rule on planted records, and reports at a look."""

import json

import numpy as np
import pandas as pd
import pytest
from planted_records import analyze, by_setting, planted, records

from semkv_bench.errors import UsageError
from semkv_bench.stats import StatsOptions
from semkv_bench.stats.sequential import take_look
from semkv_bench.stats.spending import Look

LOOKS = Look((0.25, 0.5, 1.0), 2, (150, 300, 600))


def _decide(frame, look=LOOKS, **changes):
    return take_look(frame, StatsOptions(resamples=100, **changes), {}, look)


def test_a_clear_cliff_stops_the_run():
    decision = _decide(planted(3, 300))
    assert decision.stop and decision.open == ()
    assert "cheapest is L5" in decision.reason


def test_few_examples_leave_the_grid_open():
    decision = _decide(planted(3, 60))
    assert not decision.stop
    assert "L16" in decision.open and "L16" in decision.reason


def test_the_same_records_need_more_at_an_early_look():
    frame = planted(3, 150)
    assert _decide(frame, Look((1.0,), 1)).stop
    assert not _decide(frame, Look((0.25, 1.0), 1)).stop


def test_everything_holding_needs_no_more_examples():
    decision = _decide(planted(None, 300))
    assert decision.stop and "every grid point holds" in decision.reason


def test_a_reference_that_fails_does_not_stop():
    frame = planted(3, 300)
    frame["score"] = 0.0
    decision = _decide(frame)
    assert not decision.stop and "full precision" in decision.reason


def _with_mix(effective_bits: float) -> pd.DataFrame:
    """A located cliff and an undecided mix: 3 % of its answers are lost."""
    frame = planted(3, 300)
    frame["effective_bits"] = frame["code_bits"] + 0.25
    mix = frame[frame.setting == "L5"].assign(setting="mix", effective_bits=effective_bits)
    right = mix.index[mix["score"] == 1][:9]
    mix.loc[right, "score"] = 0.0
    frame["kind"] = np.where(frame.setting == "full", "full", "uniform")
    return pd.concat([frame, mix.assign(kind="mixed")], ignore_index=True)


def test_an_open_mix_matters_only_if_it_could_be_the_operating_point():
    cheaper = _decide(_with_mix(2.3))
    assert not cheaper.stop and cheaper.open == ("mix",)
    assert _decide(_with_mix(2.9)).stop
    pruned = _with_mix(2.3)
    pruned.loc[pruned.setting == "mix", "kind"] = "prune"
    assert _decide(pruned).stop


def test_a_report_at_a_look_says_what_was_spent_and_widens_intervals():
    frame, options = planted(3, 300), StatsOptions(resamples=200)
    plain, early = analyze(frame, options), analyze(frame, options, look=LOOKS)
    assert plain["sequential"] is None
    run = early["sequential"]
    assert (run["look"], run["looks"], run["examples"]) == (2, 3, [150, 300, 600])
    assert run["alpha_spent"] == pytest.approx(0.00557, abs=1e-5)
    assert run["alpha_at_look"] < run["alpha_spent"] + 1e-3
    wide, narrow = by_setting(early)["L8"], by_setting(plain)["L8"]
    for name in ("diff_ci", "equivalence_ci"):
        assert wide[name][0] < narrow[name][0] and wide[name][1] > narrow[name][1]
    assert wide["p_equivalence_raw"] == narrow["p_equivalence_raw"]
    assert wide["p_equivalence"] > narrow["p_equivalence"]
    for task, rows in early["tasks"].items():
        wide, narrow = rows["L8"]["diff_ci"], plain["tasks"][task]["L8"]["diff_ci"]
        assert wide[0] < narrow[0] and wide[1] > narrow[1]
    again = analyze(frame.sample(frac=1, random_state=1), options, look=LOOKS)
    assert json.dumps(again) == json.dumps(early)


def test_the_last_look_decides_like_a_plain_run():
    frame, options = planted(3, 300), StatsOptions(resamples=200)
    last = analyze(frame, options, look=Look((0.5, 1.0), 2, (150, 300)))
    plain = analyze(frame, options)
    assert [row["verdict"] for row in last["settings"]] == [row["verdict"] for row in plain["settings"]]
    assert last["cliff"] == plain["cliff"]


def test_missing_rows_do_not_end_a_run():
    """Every point is decided, but would not be if the answers that are missing were lost."""
    frame = planted(3, 300)
    assert _decide(frame, unpaired="drop").stop
    absent = (frame["setting"] == "L8") & (frame["example_id"] < 12)
    decision = _decide(frame[~absent], unpaired="drop")
    assert not decision.stop and "L8" in decision.open
    report = analyze(frame[~absent], StatsOptions(resamples=100, unpaired="drop"), look=LOOKS)
    rows = by_setting(report)
    assert rows["L8"]["verdict"] == "inconclusive" and rows["L8"]["n_missing"] == 12
    assert report["sequential"]["look"] == 2
    with pytest.raises(UsageError, match=r"L8 lacks 12"):
        _decide(frame[~absent])


def test_ties_at_an_early_look_must_suffice_for_its_level():
    # 0.97^150 = 0.0104 is below 0.05, but not below the 0.0056 of the look at half the information
    full = np.ones(150)
    frame = records({"full": full, "L8": full, "L2": 0 * full})
    early = by_setting(analyze(frame, StatsOptions(resamples=100), look=Look((0.5, 1.0), 1, (150, 300))))
    assert early["L8"]["verdict"] == "inconclusive"
    assert early["L8"]["p_equivalence_raw"] == pytest.approx(0.97**150)


@pytest.mark.parametrize("looks", [[40, 40], [80, 40], [], [0, 10], [1.5], "40", [True]])
def test_looks_must_be_growing_numbers(looks):
    with pytest.raises(UsageError, match=r"stats\.looks"):
        StatsOptions(looks=looks)
