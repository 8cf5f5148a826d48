"""Differences of differences: what a setting loses by mistyped prompts beyond what full precision loses."""

import numpy as np
import pandas as pd
import pytest

from semkv_bench.stats import StatsOptions, analyze

OPTIONS = StatsOptions(margin=0.15, resamples=300)
BITS = {"full": 16.0, "affine-L16": 4.0, "affine-L8": 3.0, "affine-L2": 1.0}


def _frame(lost, n=80, kinds=("typo",)):
    """``lost[setting, kind]`` gives, of ``n`` prompts, how many of the first score 0; kind "" is the plain wording."""
    rows = []
    for index in range(n):
        for kind in ("", *kinds):
            for setting, bits in BITS.items():
                common = {"task": ("a", "b")[index % 2], "seed": 0, "cluster": f"c{index}", "code_bits": bits}
                score = float(index >= lost.get((setting, kind), 0))
                name = f"e{index}" + (f"~{kind}" if kind else "")
                rows.append(
                    {
                        **common,
                        "example_id": name,
                        "setting": setting,
                        "score": score,
                        "perturb": kind or None,
                    }
                )
    return pd.DataFrame(rows)


LOST = {
    ("full", "typo"): 8,
    ("affine-L16", "typo"): 8,
    ("affine-L8", ""): 8,
    ("affine-L8", "typo"): 48,
    ("affine-L2", ""): 80,
    ("affine-L2", "typo"): 80,
}


@pytest.fixture(scope="module")
def rows():
    return {row.setting: row for row in analyze(_frame(LOST), OPTIONS).perturbed}


def test_the_change_beyond_that_of_full_is_what_counts(rows):
    assert rows["affine-L16"].full_change == rows["affine-L16"].change == pytest.approx(-0.1)
    assert rows["affine-L16"].diff == 0 and rows["affine-L16"].verdict == "loses as much"
    eight = rows["affine-L8"]
    assert (eight.full_change, eight.change, eight.diff) == pytest.approx((-0.1, -0.5, -0.4))
    assert eight.verdict == "loses more" and eight.diff_ci[0] < -0.4 < eight.diff_ci[1] < 0
    assert eight.n_clusters == 80
    # What has lost all already has nothing left to lose.
    assert rows["affine-L2"].diff == pytest.approx(0.1) and rows["affine-L2"].change == 0


@pytest.mark.slow
def test_the_interval_is_that_of_the_doubled_scale(rows):
    """It covers what it says, where differences of differences of -2 and 2 occur."""
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(20):
        frame = _frame({}, n=40)
        for (setting, kind), rate in {
            ("full", "typo"): 0.2,
            ("affine-L8", ""): 0.3,
            ("affine-L8", "typo"): 0.6,
        }.items():
            mine = (frame["setting"] == setting) & (frame["perturb"].fillna("") == kind)
            frame.loc[mine, "score"] = (rng.random(int(mine.sum())) >= rate).astype(float)
        (row,) = [r for r in _rows(frame) if r.setting == "affine-L8"]
        low, high = row.diff_ci
        held += low <= -0.1 <= high
    assert held >= 18


def _rows(frame):
    from semkv_bench.records.normalize import normalize
    from semkv_bench.stats.pairing import pair
    from semkv_bench.stats.perturbed import by_perturbation

    records = normalize(frame)
    return by_perturbation(records, pair(records, OPTIONS), OPTIONS)


def test_kinds_are_told_apart_and_share_alpha():
    lost = {**LOST, ("affine-L8", "case"): 8}
    found = _rows(_frame(lost, kinds=("typo", "case")))
    assert {(r.perturb, r.setting): r.verdict for r in found if r.setting == "affine-L8"} == {
        ("typo", "affine-L8"): "loses more",
        ("case", "affine-L8"): "loses as much",
    }
    (alone,) = [r for r in _rows(_frame(LOST)) if r.setting == "affine-L8"]
    (among,) = [r for r in found if (r.perturb, r.setting) == ("typo", "affine-L8")]
    assert among.p_difference >= alone.p_difference and among.diff == alone.diff


def test_nothing_is_said_without_both_wordings():
    frame = _frame(LOST)
    assert not _rows(frame[frame["perturb"].isna()].reset_index(drop=True))
    assert not _rows(frame[frame["perturb"].notna()].reset_index(drop=True))
    assert not _rows(frame.drop(columns="perturb"))


def test_files_may_leave_the_plain_wording_empty():
    frame = _frame(LOST)
    assert _rows(frame.assign(perturb=frame["perturb"].fillna(""))) == _rows(frame)
