"""By length: what every length says by itself, and the trend over them."""

import numpy as np
import pandas as pd
import pytest

from semkv_bench.records.frames import read_records
from semkv_bench.report.sections_places import lengths_section
from semkv_bench.stats import StatsOptions, analyze
from semkv_bench.stats.lengths import _slope

OPTIONS = StatsOptions(margin=0.1, resamples=300)
LENGTHS = (1000, 2000, 4000)


def _frame(losses, n=60, lengths=LENGTHS, seed=0):
    """Scores of 0 and 1: ``losses[setting]`` gives the share lost at every length."""
    rng = np.random.default_rng(seed)
    rows = []
    for length_at, length in enumerate(lengths):
        for index in range(n):
            common = {
                "task": ("a", "b")[index % 2],
                "example_id": f"n{length}-{index}",
                "seed": 0,
                "task_length": length,
            }
            rows.append({**common, "setting": "full", "code_bits": 16.0, "score": 1.0})
            for setting, (bits, shares) in losses.items():
                score = float(rng.random() >= shares[length_at])
                rows.append({**common, "setting": setting, "code_bits": bits, "score": score})
    return pd.DataFrame(rows)


GROWING = {"affine-L16": (4.0, (0, 0, 0)), "affine-L8": (3.0, (0, 0.3, 0.8)), "affine-L2": (1.0, (1, 1, 1))}


@pytest.fixture(scope="module")
def growing():
    return analyze(_frame(GROWING), OPTIONS)


def test_every_length_has_its_own_cliff_and_operating_point(growing):
    assert [found.length for found in growing.lengths] == list(LENGTHS)
    assert [found.operating_point for found in growing.lengths] == ["affine-L8", "affine-L16", "affine-L16"]
    assert [(found.cliff.lower_bits, found.cliff.upper_bits) for found in growing.lengths] == [
        (1.0, 3.0),
        (3.0, 4.0),
        (3.0, 4.0),
    ]
    assert all(found.n_clusters == 60 for found in growing.lengths)


def test_a_length_says_what_a_run_of_it_alone_would_say(growing):
    frame = _frame(GROWING)
    for found in growing.lengths:
        alone = analyze(frame[frame["task_length"] == found.length], OPTIONS)
        assert found.cliff == alone.cliff
        assert found.operating_point == (alone.operating_point and alone.operating_point.setting)
        assert {name: row.score for name, row in found.settings.items()} == pytest.approx(
            {row.setting: row.score for row in alone.settings}
        )
        assert not alone.lengths and not alone.length_trend


def test_the_trend_is_the_slope_per_doubling(growing):
    trend = {row.setting: row for row in growing.length_trend}
    low, high = trend["affine-L8"].slope_ci
    assert low < -0.4 < high and trend["affine-L8"].slope < 0 and trend["affine-L8"].p < 0.001
    assert trend["affine-L16"].slope == 0 and trend["affine-L16"].p is None
    assert trend["affine-L2"].slope == 0 and trend["affine-L2"].p is None


@pytest.mark.slow
def test_a_steady_loss_has_no_trend():
    steady = {"affine-L16": (4.0, (0.2, 0.2, 0.2)), "affine-L2": (1.0, (0.9, 0.9, 0.9))}
    wrong = [
        row.p < 0.05
        for seed in range(20)
        for row in analyze(_frame(steady, seed=seed), OPTIONS).length_trend
        if row.p is not None
    ]
    # Holm over two settings: about one run in twenty may err.
    assert sum(wrong) <= 4


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_handful_that_parts_cleanly_is_no_trend(n):
    lost = {"affine-L16": (4.0, (0, 0)), "affine-L8": (3.0, (0, 1))}
    (row,) = (
        r for r in analyze(_frame(lost, n, (500, 2000)), OPTIONS).length_trend if r.setting == "affine-L8"
    )
    assert row.slope == pytest.approx(-0.5) and row.p > 0.05 and row.slope_ci[0] < -0.5 < 0 < row.slope_ci[1]


@pytest.mark.slow
@pytest.mark.parametrize("spread", ["equal", "of gains and losses at the longer length"])
def test_a_steady_average_seldom_shows_a_trend(spread):
    rng, wrong = np.random.default_rng(0), 0
    for _ in range(200):
        if spread == "equal":
            rows = [(length, -float(rng.random() < 0.3)) for length in (500, 1000, 2000) for _ in range(40)]
        else:
            rows = [(500, 0.0)] * 60
            rows += [(2000, float(rng.choice([-1, 1]) * (rng.random() < 0.6))) for _ in range(20)]
        index = pd.MultiIndex.from_tuples(
            [("t", str(k), length) for k, (length, _) in enumerate(rows)], names=["task", "cluster", "length"]
        )
        p = _slope(pd.Series([y for _, y in rows], index=index), 0.05, 0)[2]
        wrong += p is not None and p < 0.05
    assert wrong / 200 < 0.09


def test_every_quantizer_has_its_cliff_by_length():
    two = {"affine-L8": (3.0, (0, 0, 0)), "affine-L2": (1.0, (1, 1, 1))}
    frame = _frame(two).assign(quantizer="affine")
    other = _frame({"turboquant-L8": (3.0, (0, 1, 1)), "turboquant-L2": (1.0, (1, 1, 1))})
    other = other[other["setting"] != "full"].assign(quantizer="turboquant")
    report = analyze(pd.concat([frame, other], ignore_index=True), OPTIONS)
    assert [set(found.cliffs) for found in report.lengths] == [{"affine", "turboquant"}] * 3
    assert [found.cliffs["affine"].lower_bits for found in report.lengths] == [1.0, 1.0, 1.0]
    assert [found.cliffs["turboquant"].status for found in report.lengths] == [
        "located",
        "above_grid",
        "above_grid",
    ]
    (table, _) = lengths_section(report).tables[0][1], None
    assert sum("cliff of" in title for title in table.titles) == 2


@pytest.mark.parametrize("lengths", [None, (1000,)])
def test_one_length_is_no_axis(lengths):
    frame = _frame(GROWING, lengths=LENGTHS[:1])
    frame = frame.drop(columns="task_length") if lengths is None else frame
    report = analyze(frame, OPTIONS)
    assert report.lengths == () and report.length_trend == ()


def test_a_file_of_scores_may_tell_lengths(tmp_path):
    frame = _frame(GROWING)
    path = tmp_path / "scores.csv"
    frame.loc[frame["example_id"] == "n1000-0", "task_length"] = np.nan
    frame.to_csv(path, index=False)
    read = analyze(read_records(path), OPTIONS)
    assert [(found.length, found.n_clusters) for found in read.lengths] == [
        (1000, 59),
        (2000, 60),
        (4000, 60),
    ]
    assert {row.setting for row in read.length_trend} == set(GROWING)


@pytest.mark.parametrize("told", ["long", "", None])
def test_lengths_that_are_no_numbers_are_none(told):
    assert analyze(_frame(GROWING, n=30).assign(task_length=told), OPTIONS).lengths == ()
