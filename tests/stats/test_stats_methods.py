"""Method against method at equal bits: on each method's own grid, example by example, never beyond its ends."""

import math

import numpy as np
import pandas as pd
import pytest
from planted_records import analyze
from scipy import stats as scipy_stats

from semkv_bench.errors import UsageError
from semkv_bench.stats import StatsOptions
from semkv_bench.stats.methods import bracket

OPTIONS = StatsOptions(margin=0.1, resamples=200, at_bits=[2.5, 3.5])
N = 120


def frame(scores: dict[str, tuple[float, np.ndarray]], **columns) -> pd.DataFrame:
    """Records of settings ``METHOD-L4`` by (bits of the whole cache, score of every example), ``full`` included."""
    rows = []
    for name, (bits, values) in scores.items():
        method, _, levels = name.partition("-L")
        full = name == "full"
        for example, score in enumerate(values):
            rows.append(
                {
                    "task": "qa",
                    "example_id": example,
                    "seed": 0,
                    "setting": name,
                    "kind": "full" if full else "uniform",
                    "quantizer": None if full else method,
                    "code_bits": 16.0 if full else math.log2(int(levels)),
                    "effective_bits": 16.0 if full else math.log2(int(levels)),
                    "cache_bits": bits,
                    "score": float(score),
                }
            )
    return pd.DataFrame(rows).assign(**columns)


def three_methods() -> dict[str, tuple[float, np.ndarray]]:
    rng = np.random.default_rng(3)
    full = np.ones(N)
    lose = lambda share: full * (rng.random(N) >= share)  # noqa: E731
    return {
        "full": (16.0, full),
        "good-L8": (4.0, full),
        "good-L4": (3.0, full),
        "good-L2": (2.0, lose(0.1)),
        "bad-L8": (4.0, lose(0.3)),
        "bad-L4": (3.2, lose(0.6)),
        "bad-L2": (2.2, lose(0.9)),
        "dear-L8": (6.0, full),
        "dear-L4": (5.0, full),
    }


def test_a_method_scores_what_the_line_between_its_neighbours_says():
    scores = three_methods()
    found = analyze(frame(scores), OPTIONS)["methods"]
    assert found["priced_by"] == "cache_bits" and found["methods"] == ["bad", "dear", "good"]
    (pair,) = [row for row in found["pairs"] if row["bits"] == 3.5]
    (low, below), (high, above) = scores["bad-L4"], scores["bad-L8"]
    share = (3.5 - low) / (high - low)
    line = share * above + (1 - share) * below
    good = 0.5 * scores["good-L8"][1] + 0.5 * scores["good-L4"][1]
    assert (pair["first"], pair["second"], pair["n_clusters"]) == ("bad", "good", N)
    assert pair["first_score"] == pytest.approx(line.mean())
    assert pair["diff"] == pytest.approx((line - good).mean())
    assert pair["verdict"] == "second is better"
    # Guarded, so no narrower than the t interval of the example-wise differences.
    plain = scipy_stats.t.interval(0.95, N - 1, (line - good).mean(), scipy_stats.sem(line - good))
    assert pair["diff_ci"][0] <= plain[0] + 1e-9 and pair["diff_ci"][1] >= plain[1] - 1e-9
    assert pair["diff_ci_all"][0] < pair["diff_ci"][0] and pair["diff_ci_all"][1] > pair["diff_ci"][1]


def test_nothing_is_extrapolated():
    found = analyze(frame(three_methods()), OPTIONS)["methods"]
    beyond = [row for row in found["points"] if row["method"] == "dear"]
    assert [row["score"] for row in beyond] == [None, None]
    assert {(row["least_bits"], row["most_bits"]) for row in beyond} == {(5.0, 6.0)}
    assert not [row for row in found["pairs"] if "dear" in (row["first"], row["second"])]


def test_p_values_are_holms_over_all_pairs_at_all_bits():
    pairs = analyze(frame(three_methods()), OPTIONS)["methods"]["pairs"]
    raw = np.array([row["p_difference_raw"] for row in pairs])
    order = np.argsort(raw)
    holm = np.maximum.accumulate(raw[order] * (len(raw) - np.arange(len(raw)))).clip(max=1)
    assert [pairs[k]["p_difference"] for k in order] == pytest.approx(list(holm))
    single = analyze(frame(three_methods()), StatsOptions(margin=0.1, resamples=200, at_bits=[3.5]))
    (alone,) = single["methods"]["pairs"]
    assert alone["p_difference"] == pytest.approx(alone["p_difference_raw"])
    assert alone["diff_ci_all"] == pytest.approx(alone["diff_ci"])


def test_methods_are_not_told_apart_by_answers_that_may_be_missing():
    """Half of the better method's answers are left out: were they lost, the methods would be alike."""
    scores = three_methods()
    wins = np.arange(N) < 60
    records = frame(
        {
            "full": (16.0, np.ones(N)),
            "one-L8": (4.0, np.where(wins, 0.0, 1.0)),
            "one-L4": (3.0, np.where(wins, 0.0, 1.0)),
            "two-L8": (4.0, np.ones(N)),
            "two-L4": (3.0, np.ones(N)),
            "two-L2": scores["bad-L2"],
        }
    )
    options = StatsOptions(margin=0.1, resamples=200, at_bits=[3.5], unpaired="drop")
    (whole,) = analyze(records, options)["methods"]["pairs"]
    assert whole["verdict"] == "second is better"
    absent = records["setting"].str.startswith("two") & (records["example_id"] >= 60)
    (cut,) = analyze(records[~absent], options)["methods"]["pairs"]
    assert cut["n_clusters"] == 60 and cut["diff"] == -1.0
    assert cut["verdict"] == "not decided" and cut["p_difference"] > 0.5


def test_equal_methods_are_not_told_apart():
    same = three_methods()
    same |= {name.replace("bad", "twin"): at for name, at in same.items() if name.startswith("bad")}
    pairs = analyze(frame(same), OPTIONS)["methods"]["pairs"]
    twins = [row for row in pairs if {row["first"], row["second"]} == {"bad", "twin"}]
    assert len(twins) == 2
    for row in twins:
        assert row["diff"] == 0 and row["p_difference"] == 1 and row["diff_ci"][0] < 0 < row["diff_ci"][1]


def test_the_front_holds_what_none_beats():
    front = analyze(frame(three_methods()), OPTIONS)["methods"]["front"]
    assert front == ["good-L2", "good-L4"]


def test_one_method_is_compared_with_none():
    one = {name: at for name, at in three_methods().items() if not name.startswith(("bad", "dear"))}
    assert analyze(frame(one), OPTIONS)["methods"] is None


def test_without_the_bits_of_the_cache_the_price_of_a_value_is_taken():
    found = analyze(frame(three_methods()).drop(columns="cache_bits"), OPTIONS)["methods"]
    assert found["priced_by"] == "effective_bits"


def test_a_point_at_just_these_bits_needs_no_neighbour():
    assert bracket([(2.0, 7), (2.5, 5)], 2.5).share == 1.0
    assert bracket([(2.5, 5)], 2.5).upper == 5
    assert bracket([], 2.5) is None and bracket([(3.0, 1)], 2.5) is None


@pytest.mark.parametrize("wrong", [[], [2.5, 2.5], [0], [17], ["3"], 3, None])
def test_bits_that_cannot_be_are_refused(wrong):
    with pytest.raises(UsageError, match="at_bits"):
        StatsOptions(at_bits=wrong)


def test_cliffs_are_each_methods_own_and_never_pooled():
    report = analyze(frame(three_methods()), OPTIONS)
    assert set(report["cliffs"]) == {"bad", "dear", "good"}
    assert report["cliffs"]["bad"]["upper_setting"] is None
