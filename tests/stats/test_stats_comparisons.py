"""Mixes against the line between their ends, importance metrics, deletion against retention."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted_records import analyze
from scipy import stats as scipy_stats

from semkv_bench.errors import UsageError
from semkv_bench.records.names import describe
from semkv_bench.stats import StatsOptions
from semkv_bench.stats.allocations import allocated
from semkv_bench.stats.contrast import Arm, contrast
from semkv_bench.stats.pairing import SettingInfo
from semkv_bench.stats.rankings import letters
from semkv_bench.stats.spending import Look

OPTIONS = StatsOptions(margin=0.1, resamples=200)
BITS = {"full": 16.0, "affine-L16": 4.0, "affine-L5": math.log2(5), "affine-L2": 1.0}


def frame(scores: dict[str, np.ndarray], bits: dict[str, float] | None = None) -> pd.DataFrame:
    """Long records of one task; kinds from the names, effective bits half a bit above ``bits``."""
    rows = []
    for name, values in scores.items():
        kind = (
            "full"
            if name == "full"
            else "prune"
            if "prune@" in name
            else "mixed"
            if "@" in name
            else "uniform"
        )
        code = (bits or {}).get(name, BITS.get(name, 3.0))
        for i, score in enumerate(values):
            rows.append(
                {
                    "task": "qa",
                    "example_id": i,
                    "setting": name,
                    "kind": kind,
                    "quantizer": None if kind in ("full", "prune") else "affine",
                    "code_bits": None if kind == "prune" else code,
                    "effective_bits": code + (0.0 if kind in ("full", "prune") else 0.5),
                    "score": float(score),
                }
            )
    return pd.DataFrame(rows)


def found(scores, name, bits=None, options=OPTIONS):
    return analyze(frame(scores, bits), options)[name]


def share(n, right):
    """``n`` 0/1 scores of which the first ``right`` are 1."""
    return np.r_[np.ones(right), np.zeros(n - right)]


def test_names_are_taken_apart():
    names = {
        "affine-L16/5@0.25:key_norm": ("mixed", "affine", 16, 5, 0.25, "key_norm"),
        "affine+turboquant-L16/5@0.1:key_norm:layer+value_norm": (
            "mixed", "affine+turboquant", 16, 5, 0.1, "key_norm:layer+value_norm",
        ),
        "L8/4@1:random": ("mixed", None, 8, 4, 1.0, "random"),
        "prune@0.5:attention_window-64": ("prune", None, None, None, 0.5, "attention_window-64"),
    }  # fmt: skip
    unread = {"my own mix": "mixed", "affine-L8/4@half:random": "mixed", "affine-L8/4@0.5:random": "uniform"}
    kinds = {name: parts[0] for name, parts in names.items()} | unread
    infos = [
        SettingInfo(name, kind, None, None, None, None, **describe(name, kind))
        for name, kind in kinds.items()
    ]
    read = [(a.kind, a.family, a.high, a.low, a.share, a.metric) for a in allocated(infos)]
    assert read == list(names.values())


def test_interpolation_by_hand():
    # Ends 0.8 and 0.2 of ten examples, a quarter high: the line is at 0.25 * 0.8 + 0.75 * 0.2 = 0.35.
    scores = {
        "full": share(10, 10),
        "affine-L16": share(10, 8),
        "affine-L5": share(10, 2),
        "affine-L16/5@0.25:key_norm": share(10, 5),
        "affine-L16/5@0.25:random": share(10, 0),
    }
    up, down = found(scores, "interpolation")
    assert (up["metric"], up["high_setting"], up["low_setting"]) == ("key_norm", "affine-L16", "affine-L5")
    assert (up["line"], up["score"], up["diff"]) == pytest.approx((0.35, 0.5, 0.15))
    assert (down["line"], down["score"], down["diff"]) == pytest.approx((0.35, 0.0, -0.35))
    assert up["diff_ci"][0] < 0.15 < up["diff_ci"][1]
    assert up["n_clusters"] == 10


@pytest.mark.parametrize(
    ("right", "verdict"), [(300, "above the line"), (220, "on the line"), (100, "below the line")]
)
def test_interpolation_verdicts(right, verdict):
    # 400 examples, ends 0.9 and 0.2, half high: the line is at 0.55, or 220 right.
    scores = {
        "full": share(400, 400),
        "affine-L16": share(400, 360),
        "affine-L5": share(400, 80),
        "affine-L16/5@0.5:key_norm": share(400, right),
    }
    (entry,) = found(scores, "interpolation")
    assert entry["verdict"] == verdict and entry["ends_differ"]


def test_a_flat_line_is_said_to_be_flat():
    scores = {
        name: share(200, 150) for name in ("full", "affine-L16", "affine-L5", "affine-L16/5@0.5:random")
    }
    (entry,) = found(scores, "interpolation")
    assert entry["verdict"] == "on the line" and entry["diff"] == 0 and not entry["ends_differ"]


def test_mixes_without_both_ends_are_left_out():
    scores = {
        "full": share(30, 30),
        "affine-L16": share(30, 25),
        "affine-L16/5@0.5:random": share(30, 20),
        "a mix": share(30, 20),
    }
    frame_ = frame(scores)
    frame_.loc[frame_["setting"] == "a mix", "kind"] = "mixed"
    assert analyze(frame_, OPTIONS)["interpolation"] == []


def test_mixes_of_nothing_and_all_serve_as_ends():
    mixes = {f"affine-L16/5@{f}:key_norm": share(40, right) for f, right in ((0, 10), (0.5, 20), (1, 30))}
    (entry,) = found({"full": share(40, 40), **mixes, "affine-L2": share(40, 0)}, "interpolation")
    assert entry["fraction"] == 0.5 and entry["line"] == pytest.approx(0.5)
    assert entry["high_setting"] == "affine-L16/5@1:key_norm"
    assert entry["low_setting"] == "affine-L16/5@0:key_norm"


def test_ends_are_found_by_their_bits_under_other_names():
    scores = {"full": share(20, 20), "four bits": share(20, 16), "five levels": share(20, 4)}
    mix = "affine-L16/5@0.5:random"
    bits = {"four bits": 4.0, "five levels": math.log2(5), mix: 3.16}
    (entry,) = found({**scores, mix: share(20, 10)}, "interpolation", bits)
    assert (entry["high_setting"], entry["low_setting"]) == ("four bits", "five levels")


def ranked(rights: dict[str, int], n=200):
    scores = {"full": share(n, n), "affine-L16": share(n, n), "affine-L2": share(n, 0)}
    scores |= {f"affine-L16/5@0.25:{metric}": share(n, right) for metric, right in rights.items()}
    return found(scores, "rankings")


def test_a_ranking_by_hand():
    (group,) = ranked({"random": 40, "key_norm": 160, "surprisal": 158, "recency": 42})
    assert (
        group["group"] == "affine-L16/5@0.25" and group["best"] == "key_norm" and group["control"] == "random"
    )
    rows = {row["metric"]: row for row in group["metrics"]}
    assert list(rows) == ["key_norm", "surprisal", "recency", "random"]
    assert [row["rank"] for row in rows.values()] == [[1, 2], [1, 2], [3, 4], [3, 4]]
    assert [row["letters"] for row in rows.values()] == ["a", "a", "b", "b"]
    assert rows["random"]["diff_best"] == pytest.approx(-0.6) and rows["key_norm"]["diff_best"] is None
    assert rows["key_norm"]["diff_random"] == pytest.approx(0.6) and rows["random"]["diff_random"] is None
    low, high = rows["random"]["diff_best_ci"]
    assert low < -0.6 < high and rows["key_norm"]["diff_random_ci"] == pytest.approx([-high, -low])
    assert len(group["pairs"]) == 6


def test_holm_is_over_all_pairs_of_the_group():
    (group,) = ranked({"random": 40, "key_norm": 52, "surprisal": 47})
    raw = sorted(pair["p_raw"] for pair in group["pairs"])
    adjusted = sorted(pair["p"] for pair in group["pairs"])
    steps = np.maximum.accumulate([min(1, p * k) for p, k in zip(raw, (3, 2, 1), strict=True)])
    assert adjusted == pytest.approx(list(steps))


def test_groups_are_of_one_allocation():
    scores = {"full": share(50, 50), "affine-L16": share(50, 50)}
    for name in ("L16/5@0.25:a", "L16/5@0.25:b", "L16/5@0.5:a", "L64/5@0.25:a", "L64/5@0.25:b:layer"):
        scores[f"affine-{name}"] = share(50, 25)
    scores |= {f"prune@0.25:{metric}": share(50, 10) for metric in ("a", "b")}
    scores["prune@0.5:a"] = share(50, 10)
    groups = found(scores, "rankings")
    assert [(g["group"], [row["metric"] for row in g["metrics"]]) for g in groups] == [
        ("affine-L16/5@0.25", ["a", "b"]),
        ("affine-L64/5@0.25", ["a", "b:layer"]),
        ("prune@0.25", ["a", "b"]),
    ]
    assert all(row["diff_random"] is None and row["p_random"] is None for row in groups[0]["metrics"])


def test_ties_everywhere_separate_nothing():
    (group,) = ranked({f"m{i}": 100 for i in range(10)})
    assert {tuple(row["rank"]) for row in group["metrics"]} == {(1, 10)}
    assert {row["letters"] for row in group["metrics"]} == {"a"}
    assert all(pair["p"] == 1 and pair["diff"] == 0 for pair in group["pairs"])


@given(st.integers(1, 8).flatmap(lambda n: st.lists(st.booleans(), min_size=n * n, max_size=n * n)))
@settings(deadline=None)
def test_letters_are_shared_exactly_where_nothing_is_separated(bits):
    size = math.isqrt(len(bits))
    upper = np.triu(np.array(bits).reshape(size, size), 1)
    separated = upper | upper.T
    marks = letters(separated)
    for a in range(size):
        assert marks[a]
        for b in range(size):
            assert bool(set(marks[a]) & set(marks[b])) is not bool(separated[a, b])


def test_deletion_is_compared_with_what_is_nearest_below():
    scores = {
        "full": share(200, 200),
        "affine-L16": share(200, 190),
        "affine-L5": share(200, 100),
        "affine-L2": share(200, 0),
        "affine-L16/5@0.25:key_norm": share(200, 120),
        "affine-L16/5@0.25:random": share(200, 120),
        "prune@0.25:random": share(200, 20),
        "prune@0.05:random": share(200, 0),
    }
    mixed = dict.fromkeys(["affine-L16/5@0.25:key_norm", "affine-L16/5@0.25:random"], 2.741)
    rows = found(scores, "deletion", {"prune@0.25:random": 4.0, "prune@0.05:random": 0.8, **mixed})
    assert [(row["setting"], row["against"]) for row in rows] == [
        ("prune@0.25:random", "affine-L5"),
        ("prune@0.25:random", "affine-L16/5@0.25:random"),
        ("prune@0.05:random", None),
    ]
    uniform = rows[0]
    assert (uniform["effective_bits"], uniform["against_effective_bits"]) == pytest.approx(
        (4.0, 2.822), abs=1e-3
    )
    assert uniform["diff"] == pytest.approx(-0.4) and uniform["verdict"] == "deletion loses more"
    assert rows[2]["verdict"] == "nothing to compare with" and rows[2]["diff"] is None


def test_half_a_percent_more_memory_counts_as_equal():
    scores = {"full": share(30, 30), "affine-L16": share(30, 30), "prune@0.28:random": share(30, 3)}
    (row,) = found(scores, "deletion", {"prune@0.28:random": 4.48})
    assert row["against"] == "affine-L16" and row["against_effective_bits"] == 4.5
    (row,) = found(scores, "deletion", {"prune@0.28:random": 4.47})
    assert row["against"] is None


def test_deletion_without_known_bits_has_nothing_to_compare_with():
    made = frame({"full": share(20, 20), "affine-L16": share(20, 20), "prune@0.25:random": share(20, 2)})
    made["effective_bits"] = None
    (row,) = analyze(made, OPTIONS)["deletion"]
    assert row["against"] is None and row["effective_bits"] is None


def test_one_cluster_decides_nothing():
    one = np.array([1.0])
    scores = dict.fromkeys(["full", "affine-L16", "affine-L5", "prune@0.9:random"], one)
    scores |= {f"affine-L16/5@0.5:{metric}": one * 0 for metric in ("random", "key_norm")}
    report = analyze(frame(scores, {"prune@0.9:random": 14.4}), OPTIONS)
    assert {row["verdict"] for row in report["interpolation"] + report["deletion"]} == {"not decided"}
    assert [row["rank"] for row in report["rankings"][0]["metrics"]] == [[1, 2], [1, 2]]


def lacking(scores, name, first):
    """Records in which setting ``name`` lacks the examples from ``first`` on."""
    made = frame(scores)
    return made[~((made["setting"] == name) & (made["example_id"] >= first))]


def test_rows_that_one_side_lacks_do_not_count():
    """A mix that was only run on the easy half is refused, or else compared on that half."""
    mix = "affine-L16/5@0.5:random"
    scores = {
        "full": share(40, 40),
        "affine-L16": share(40, 20),
        "affine-L5": share(40, 20),
        mix: share(40, 20),
    }
    made = lacking(scores, mix, 20)
    with pytest.raises(
        UsageError, match=rf"of the 40 rows of full, setting {mix} lacks 20 .*stats.unpaired=drop"
    ):
        analyze(made, OPTIONS)
    (entry,) = analyze(made, replace(OPTIONS, unpaired="drop"))["interpolation"]
    assert entry["n_clusters"] == 20 and entry["diff"] == 0 and entry["score"] == entry["line"] == 1


@pytest.mark.parametrize(("right", "verdict"), [(120, "on the line"), (200, "not decided")])
def test_no_comparison_is_decided_by_rows_left_out(right, verdict):
    """A mix without the last 80 of 200 examples: equal where the ends failed them too, else it may have lost them."""
    mix = "affine-L16/5@0.5:random"
    scores = {"full": share(200, 200), **dict.fromkeys(["affine-L16", "affine-L5", mix], share(200, right))}
    (entry,) = analyze(lacking(scores, mix, 120), replace(OPTIONS, unpaired="drop"))["interpolation"]
    assert entry["n_clusters"] == 120 and entry["diff"] == 0 and entry["verdict"] == verdict


def test_a_metric_is_not_better_by_rows_left_out():
    """One that leaves out all that it fails seems better than another that fails less."""
    first, second = "affine-L16/5@0.5:key_norm", "affine-L16/5@0.5:random"
    scores = {"full": share(200, 200), first: share(200, 120), second: np.tile([1.0, 1.0, 0.0], 67)[:200]}
    whole, drop = replace(OPTIONS, unpaired="drop"), lacking(scores, first, 120)
    (known,) = analyze(frame(scores), whole)["rankings"]
    (left_out,) = analyze(drop, whole)["rankings"]
    (pair,) = left_out["pairs"]
    assert abs(pair["diff"]) > 0.3 and pair["p"] == 1
    assert [row["letters"] for row in left_out["metrics"]] == ["a", "a"]
    assert known["metrics"][0]["metric"] == "random" and left_out["metrics"][0]["metric"] == "key_norm"


def replicates(rng, n, count, first, second):
    """Correlated 0/1 scores of two settings, [n, count] each, with the given chances of being right."""
    ease = rng.random((n, count))
    return (ease < first).astype(float), (ease < second).astype(float)


@pytest.mark.parametrize(("first", "second"), [(0.6, 0.6), (0.9, 0.85), (0.3, 0.5)])
def test_either_side_may_be_first(first, second):
    one, two = replicates(np.random.default_rng(3), 60, 20, first, second)
    full = np.ones_like(one)
    forth = contrast(Arm(one, full), Arm(two, full), np.zeros(60, int), OPTIONS)
    back = contrast(Arm(two, full), Arm(one, full), np.zeros(60, int), OPTIONS)
    np.testing.assert_allclose(forth.low, -back.high)
    np.testing.assert_allclose(forth.p_difference, back.p_difference)
    np.testing.assert_allclose(forth.p_equivalence, back.p_equivalence)


@pytest.mark.parametrize("n", [30, 100])
def test_the_interval_covers_and_the_test_holds_its_level(n):
    """2,000 made-up samples of pairs of which 12 % differ, either way: the true difference is 0."""
    rng = np.random.default_rng(n)
    base = (rng.random((n, 2000)) < 0.7).astype(float)
    drawn = rng.random((n, 2000))
    one = np.where(drawn < 0.06, 0.0, np.where(drawn < 0.12, 1.0, base))
    two = np.where(drawn < 0.06, 1.0, np.where(drawn < 0.12, 0.0, base))
    full = np.ones_like(one)
    result = contrast(Arm(one, full), Arm(two, full), np.zeros(n, int), OPTIONS)
    covered = ((result.low <= 0) & (result.high >= 0)).mean()
    assert covered >= 0.95 - 3 * math.sqrt(0.05 * 0.95 / 2000)
    assert (result.p_difference < 0.05).mean() <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 2000)


def test_a_large_sample_agrees_with_student():
    rng = np.random.default_rng(1)
    one, two = rng.random((4000, 1)) * 0.5, rng.random((4000, 1)) * 0.52
    result = contrast(Arm(one, np.ones_like(one)), Arm(two, np.ones_like(two)), np.zeros(4000, int), OPTIONS)
    expected = scipy_stats.ttest_rel(one[:, 0], two[:, 0]).confidence_interval(0.95)
    np.testing.assert_allclose([result.low[0], result.high[0]], expected, atol=0.001)


def test_the_order_of_rows_changes_nothing():
    rng = np.random.default_rng(5)
    scores = {
        name: (rng.random(30) < 0.5).astype(float)
        for name in (
            "full",
            "affine-L16",
            "affine-L5",
            "affine-L16/5@0.5:random",
            "affine-L16/5@0.5:key_norm",
        )
    }
    scores["prune@0.25:random"] = share(30, 4)
    made = frame(scores, {"prune@0.25:random": 4.0})
    shuffled = made.sample(frac=1, random_state=1)
    assert analyze(made, OPTIONS) == analyze(shuffled, OPTIONS)


@pytest.mark.slow
def test_hundreds_of_settings():
    rng = np.random.default_rng(0)
    scores = {"full": share(40, 40), "affine-L16": share(40, 40), "affine-L5": share(40, 5)}
    for percent in range(1, 41):
        for metric in ("a", "b", "c", "random", "e"):
            scores[f"affine-L16/5@{percent / 100}:{metric}"] = (rng.random(40) < 0.5).astype(float)
    report = analyze(frame(scores), OPTIONS)
    assert len(report["interpolation"]) == 200 and len(report["rankings"]) == 40


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("section", ["interpolation", "rankings", "deletion", "settings"])
def test_every_comparison_holds_over_all_looks(section):
    """At an early look no interval is narrower, and no p-value that may count is smaller, than in a plain run."""
    scores = {"full": share(60, 60), "affine-L16": share(60, 55), "affine-L5": share(60, 10)}
    scores |= {
        f"affine-L16/5@0.5:{metric}": share(60, right) for metric, right in (("random", 30), ("key_norm", 45))
    }
    made = frame(scores | {"prune@0.25:random": share(60, 20)}, {"prune@0.25:random": 4.0})
    plain, early = (analyze(made, OPTIONS, look=look)[section] for look in (None, Look((0.3, 1.0), 1)))
    pairs = [(w, n) for w, n in zip(_intervals(early), _intervals(plain), strict=True) if n[0] < n[1]]
    assert pairs
    for wide, narrow in pairs:
        assert wide[0] <= narrow[0] and wide[1] >= narrow[1]
    assert any(wide[0] < narrow[0] for wide, narrow in pairs)


def _intervals(found) -> list[list[float]]:
    """All pairs of numbers under names that end in ``ci``, but for the percentile bootstrap's."""
    if isinstance(found, list):
        return [pair for item in found for pair in _intervals(item)]
    if not isinstance(found, dict):
        return []
    own = [
        v for k, v in found.items() if k.endswith("_ci") and k != "bootstrap_ci" and v and v[0] is not None
    ]
    return own + [pair for value in found.values() for pair in _intervals(value)]


def test_fields_of_records_say_what_a_setting_is_whatever_its_name():
    frame_ = frame(
        {"full": share(60, 50), "mine": share(60, 50), "yours": share(60, 45)}, {"mine": 3.0, "yours": 3.0}
    )
    shared = {"family": "q", "high": 8, "low": 4, "fraction": 0.5}
    fields = {
        "mine": shared | {"metric": {"keys": "a", "values": "b"}, "scope": "layer"},
        "yours": shared | {"metric": "random", "options": {"group_size": 32}},
    }
    for name in ("family", "high", "low", "fraction", "metric", "scope", "options"):
        frame_[name] = [fields.get(setting, {}).get(name) for setting in frame_["setting"]]
    frame_.loc[frame_["setting"] != "full", "kind"] = "mixed"
    rows = {row["setting"]: row for row in analyze(frame_, OPTIONS)["settings"]}
    assert rows["mine"]["allocation"]["metric"] == "a:layer+b"
    assert rows["mine"]["allocation"]["group"] == "q-L8/4@0.5"
    assert rows["yours"]["allocation"]["group"] == "q[group_size=32]-L8/4@0.5"
    assert rows["yours"]["options"] == "group_size=32" and rows["yours"]["family"] == "q"


def test_levels_that_differ_by_side_are_no_one_number():
    frame_ = frame({"full": share(20, 20), "x": share(20, 20), "affine-L5": share(20, 20)}, {"x": 3.0})
    frame_["levels"] = [{"keys": 8, "values": 4} if name == "x" else None for name in frame_["setting"]]
    rows = {row["setting"]: row for row in analyze(frame_, OPTIONS)["settings"]}
    assert rows["x"]["levels"] is None and rows["affine-L5"]["levels"] == 5
