"""Pairing, clusters and repeats: what counts as evidence, and what may not change a report."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted_records import analyze, by_setting, planted, records

from semkv_bench.errors import UsageError
from semkv_bench.records.normalize import normalize
from semkv_bench.stats import StatsOptions
from semkv_bench.stats.bootstrap import percentile_interval, resample_means
from semkv_bench.stats.operating_point import _halves
from semkv_bench.stats.pairing import pair

FEW = StatsOptions(resamples=100)
BOOKKEEPING = ("n_units_recorded", "n_repeats_collapsed", "n_examples_recorded")


def seeded(frame: pd.DataFrame, seeds: int, generator: int = 0) -> pd.DataFrame:
    """The examples under several seeds, each with scores of its own."""
    rng = np.random.default_rng(generator)
    parts = []
    for seed in range(seeds):
        part = frame.assign(seed=seed)
        part["score"] = np.round(rng.random(len(part)) * part["score"], 3)
        parts.append(part)
    return pd.concat(parts, ignore_index=True)


@st.composite
def frames(draw):
    examples = draw(st.integers(2, 12))
    levels = draw(st.lists(st.sampled_from([8, 6, 5, 4, 2]), min_size=1, max_size=3, unique=True))
    score = st.sampled_from([0.0, 0.25, 0.5, 1.0])
    values = st.lists(score, min_size=examples, max_size=examples)
    scores = {name: draw(values) for name in ["full", *(f"L{level}" for level in levels)]}
    tasks = [f"t{draw(st.integers(0, 2))}" for _ in range(examples)]
    return records(scores, tasks)


def text(report: dict) -> str:
    return json.dumps({k: v for k, v in report.items() if k not in BOOKKEEPING}, allow_nan=False)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(frames(), st.randoms(use_true_random=False))
def test_neither_row_order_nor_names_of_examples_change_a_bit(frame, random):
    order, names = list(range(len(frame))), [f"x{i}" for i in range(frame["example_id"].nunique())]
    random.shuffle(order)
    random.shuffle(names)
    renamed = frame.assign(example_id=frame["example_id"].map(dict(enumerate(names))))
    assert text(analyze(frame, FEW)) == text(analyze(renamed.iloc[order], FEW))


@settings(max_examples=12, deadline=None)
@given(frames(), st.integers(1, 3), st.integers(1, 2))
@pytest.mark.slow
def test_repeating_a_seed_changes_no_bit(frame, seeds, copies):
    frame = seeded(frame, seeds)
    again = [frame[frame.seed == 0].assign(seed=10 + k) for k in range(copies)]
    repeated = analyze(pd.concat([frame, *again]), FEW)
    once = analyze(frame, FEW)
    assert text(once) == text(repeated)
    rows = int((frame.setting == "full").sum() / seeds)
    assert repeated["n_repeats_collapsed"] == once["n_repeats_collapsed"] + copies * rows


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(frames())
def test_bounds_contain_the_difference_and_lie_on_the_scale(frame):
    for row in analyze(frame, FEW)["settings"][1:]:
        low, high = row["diff_ci"]
        assert -1 <= low <= row["diff"] <= high <= 1
        assert low <= row["equivalence_ci"][0] <= row["equivalence_ci"][1] <= high
        assert 0 <= row["score_ci"][0] <= row["score"] <= row["score_ci"][1] <= 1
        assert row["p_equivalence"] >= row["p_equivalence_raw"]


def test_seeds_and_turns_are_one_cluster():
    frame = seeded(planted(2, 30), 3)
    frame["prompt_hash"] = frame["example_id"].astype(str) + "-" + frame["seed"].astype(str)
    turns = pd.concat([frame.assign(turn=0), frame.assign(turn=1, score=frame["score"] / 2)])
    report = analyze(turns, FEW)
    assert report["n_clusters"] == 30
    assert report["n_examples"] == report["n_examples_recorded"] == 180
    row = by_setting(report)["L8"]
    wide = turns.pivot_table(index=["task", "example_id"], columns="setting", values="score")
    expected = (wide["L8"] - wide["full"]).groupby("task").mean().mean()
    assert row["diff"] == pytest.approx(expected)
    assert row["score"] == pytest.approx(wide["L8"].groupby("task").mean().mean())


def test_row_sizes_are_those_of_single_seeds():
    frame = records({"full": [1.0, 1.0], "L4": [1.0, 1.0]})
    more = [frame.assign(seed=seed) for seed in (0, 1, 2)]
    scores = {0: [0.0, 1.0], 1: [1.0, 0.5], 2: [1.0, 0.0]}
    for part in more:
        part.loc[part["setting"] == "L4", "score"] = scores[int(part["seed"].iloc[0])]
    paired = pair(normalize(pd.concat(more)), StatsOptions())
    assert sorted(paired.differences[:, 1]) == pytest.approx([-0.5, -1 / 3])
    # one seed lost 1; one lost 0.5, one 1: (0.125 + 1) / (0.25 + 1)
    assert sorted(paired.row_sizes[:, 1]) == pytest.approx([0.9, 1.0])


def test_more_seeds_do_not_narrow_the_interval_of_equal_outcomes():
    frame = planted(2, 60)
    thrice = pd.concat([frame.assign(seed=s) for s in range(3)])
    one, three = analyze(frame, FEW), analyze(thrice, FEW)
    assert three["n_examples"] == one["n_examples"] == 60
    assert three["n_repeats_collapsed"] == 120
    assert by_setting(one)["L4"]["diff_ci"] == by_setting(three)["L4"]["diff_ci"]


def test_predictions_tell_seeds_apart():
    frame = pd.concat([planted(2, 20).assign(seed=s) for s in range(2)])
    frame["prediction"] = frame["seed"].map({0: "a", 1: "b"})
    assert analyze(frame, FEW)["n_examples"] == 40
    frame["prediction"] = "a"
    assert analyze(frame, FEW)["n_examples"] == 20


def test_averages():
    full = np.ones(10)
    frame = records({"full": full, "L4": np.r_[0, 0, np.ones(8)]}, ["a"] * 2 + ["b"] * 8)
    assert by_setting(analyze(frame, FEW))["L4"]["diff"] == pytest.approx(-0.5)
    micro = StatsOptions(resamples=100, average="micro")
    assert by_setting(analyze(frame, micro))["L4"]["diff"] == pytest.approx(-0.2)
    tasks = analyze(frame, FEW)["tasks"]
    assert tasks["a"]["L4"]["diff"] == -1
    assert tasks["b"]["L4"]["diff_ci"][0] < 0 < tasks["b"]["L4"]["diff_ci"][1]
    assert tasks["a"]["full"] == {"score": 1.0, "diff": None, "diff_ci": [None, None], "n_clusters": 2}


def test_partly_covered_settings_are_paired_where_they_can_be():
    frame = planted(2, 60)
    half = frame[~((frame.setting == "L4") & (frame.example_id < 30))]
    with pytest.raises(UsageError) as caught:
        analyze(half, FEW)
    assert str(caught.value) == (
        "of the 60 rows of full, setting L4 lacks 30 (first: task task0, example 0, seed 0, turn 0); score those too "
        "(an answer that failed has score 0), or count them as lost with stats.unpaired=drop"
    )
    report = analyze(half, StatsOptions(resamples=100, unpaired="drop"))
    row = by_setting(report)["L4"]
    own = frame[frame.example_id >= 30].pivot(index=["task", "example_id"], columns="setting", values="score")
    assert row["n_clusters"] == row["n"] == 30
    assert row["reference_score"] == pytest.approx(own["full"].groupby("task").mean().mean())
    assert row["diff"] == pytest.approx(row["score"] - row["reference_score"])
    assert report["warnings"] == ["L4 covers 30 of 60 examples"]


def test_rows_that_settings_lack_are_counted():
    frame = planted(2, 60)
    names = [name for name in frame.setting.unique() if name != "full"]
    for lost, name in enumerate(names, start=1):
        frame = frame[~((frame.setting == name) & (frame.example_id < lost))]
    with pytest.raises(
        UsageError, match=rf"setting {names[-1]} lacks {len(names)}, {names[-2]} lacks .* more settings"
    ):
        pair(normalize(frame), StatsOptions())
    paired = pair(normalize(frame), StatsOptions(unpaired="drop"))
    assert paired.missing == {name: lost for lost, name in enumerate(names, start=1)}
    assert paired.unpaired == {}


def test_rows_left_out_do_not_make_a_setting_safe():
    """24 answers that int4 lost are left out: what is left ties, and is not safe."""
    full = np.ones(400)
    low = np.r_[np.zeros(24), np.ones(376)]
    frame = records({"full": full, "L8": full, "L4": low, "L2": 0 * full})
    assert by_setting(analyze(frame, FEW))["L4"]["verdict"] == "degraded"
    cut = frame[~((frame.setting == "L4") & (frame.score == 0))]
    report = analyze(cut, StatsOptions(resamples=100, unpaired="drop"))
    rows = by_setting(report)
    assert rows["L4"]["verdict"] == "inconclusive" and rows["L4"]["n_missing"] == 24
    assert rows["L4"]["n_needed"] is None  # more examples do not bring the missing rows back
    assert rows["L8"]["verdict"] == "equivalent"
    assert report["operating_point"]["setting"] == "L8"
    without = frame[~((frame.setting == "full") & (frame.example_id < 24))]
    rows = by_setting(analyze(without, StatsOptions(resamples=100, unpaired="drop")))
    assert rows["L4"]["verdict"] != "equivalent" and rows["L4"]["n_unpaired"] == 24


def test_rows_that_full_lacks_too_do_not_make_a_setting_safe():
    """Neither int4 nor full has the 24 examples in which int4 lost; another setting's rows tell that they were run."""
    full = np.ones(400)
    frame = records({"full": full, "L8": full, "L4": np.r_[np.zeros(24), np.ones(376)], "L2": 0 * full})
    cut = frame[~(frame.setting.isin(["full", "L4"]) & (frame.example_id < 24))]
    rows = by_setting(analyze(cut, StatsOptions(resamples=100, unpaired="drop")))
    assert (rows["L4"]["n_missing"], rows["L4"]["n_unpaired"]) == (24, 0)
    assert (rows["L8"]["n_missing"], rows["L8"]["n_unpaired"]) == (0, 24)
    assert rows["L4"]["verdict"] == "inconclusive" and rows["full"]["n_missing"] == 0


def test_a_task_that_full_lacks_is_refused():
    frame = planted(2, 60)
    cut = frame[~((frame.setting == "full") & (frame.task == "task1"))]
    for unpaired, words in (
        ("error", "rows without a partner"),
        ("drop", "task task1 has no row under full"),
    ):
        with pytest.raises(UsageError, match=words):
            analyze(cut, StatsOptions(resamples=100, unpaired=unpaired))


@pytest.mark.filterwarnings("error")
def test_a_setting_may_lack_a_whole_task():
    frame = planted(2, 300)
    cut = frame[~((frame.setting == "L6") & (frame.task == "task1"))]
    row = by_setting(analyze(cut, StatsOptions(resamples=100, unpaired="drop")))["L6"]
    assert row["verdict"] == "inconclusive" and row["n_missing"] == 100


def clustered(documents: int, questions: int = 5) -> pd.DataFrame:
    """All ties, several questions a document, and a grid point that loses everything."""
    full = np.ones(documents * questions)
    frame = records({"full": full, "L8": full, "L2": 0 * full})
    return frame.assign(cluster=frame["example_id"] // questions)


def test_questions_that_share_a_document_are_one_cluster():
    report = analyze(clustered(40), FEW)
    assert (report["n_examples"], report["n_clusters"]) == (200, 40)
    assert by_setting(report)["L8"]["verdict"] == "inconclusive"
    assert report["warnings"] == [
        "200 examples share a document with another and count with it as one cluster"
    ]
    assert by_setting(analyze(clustered(100), FEW))["L8"]["verdict"] == "equivalent"


def test_equal_prompts_under_other_ids_are_one_cluster():
    frame = clustered(40).drop(columns="cluster")
    frame["prompt_hash"] = (frame["example_id"] // 5).astype(str)
    report = analyze(frame, FEW)
    assert report["n_clusters"] == 40
    assert report["warnings"] == ["200 examples have the prompt of another and count with it as one cluster"]
    frame["prompt_hash"] = frame["example_id"].astype(str)
    assert analyze(frame, FEW)["n_clusters"] == 200 and not analyze(frame, FEW)["warnings"]


def test_one_document_in_two_tasks_is_one_cluster():
    """Every document is asked about in both tasks: 120 questions are 60 documents, and 198 are 99."""
    for documents, verdict in ((60, "inconclusive"), (99, "equivalent")):
        full = np.ones(2 * documents)
        frame = records({"full": full, "L8": full, "L2": 0 * full}, ["a", "b"] * documents)
        frame["cluster"] = [f"d{i // 2}" for i in frame["example_id"]]
        report = analyze(frame, FEW)
        assert (report["n_examples"], report["n_clusters"]) == (2 * documents, documents)
        assert by_setting(report)["L8"]["verdict"] == verdict
        assert report["warnings"] == [
            f"{2 * documents} examples share a document or prompt with one of another task and count with it as one "
            "cluster"
        ]
        prompts = frame.drop(columns="cluster").assign(prompt_hash=frame["cluster"])
        assert analyze(prompts, FEW)["n_clusters"] == documents
    # as wide as that of the documents by themselves, each lost in both tasks or in neither
    lost = np.repeat(np.arange(99) % 20 == 0, 2)
    frame.loc[frame.setting == "L8", "score"] = 1.0 - lost
    both = by_setting(analyze(frame, FEW))["L8"]["diff_ci"]
    single = records({"full": np.ones(99), "L8": 1.0 - lost[::2], "L2": np.zeros(99)})
    assert both == pytest.approx(by_setting(analyze(single, FEW))["L8"]["diff_ci"], abs=2e-3)
    # an example's own name joins nothing, nor does a cluster that is just that
    own = frame.assign(example_id=frame["example_id"] // 2).drop(columns="cluster")
    assert (
        analyze(own, FEW)["n_clusters"]
        == analyze(own.assign(cluster=own.example_id), FEW)["n_clusters"]
        == 198
    )


def test_a_document_is_all_in_one_half():
    documents = np.repeat(np.arange(50), 2)
    for split in "abc":
        first, second = _halves(np.tile([0, 1], 50), split, documents)
        assert len(first) == len(second) == 50
        assert not set(documents[first]) & set(documents[second])


def test_examples_weigh_alike_however_large_their_document():
    """The average of a task is that of its examples; a document of nine weighs nine times as much as one of one."""
    frame = clustered(20)
    frame["cluster"] = np.where(frame["example_id"] < 9, "long", frame["example_id"].astype(str))
    frame.loc[(frame.setting == "L8") & (frame.example_id < 9), "score"] = 0.0
    row = by_setting(analyze(frame, FEW))["L8"]
    assert row["diff"] == pytest.approx(-9 / 100)
    alone = by_setting(analyze(frame.drop(columns="cluster"), FEW))["L8"]
    assert alone["diff"] == row["diff"] and alone["diff_ci"][0] > row["diff_ci"][0]


def test_a_micro_average_over_documents_is_that_of_the_questions():
    """Tasks of 90 and 10 questions, five to a document: micro weighs questions, the interval counts documents."""
    full = np.ones(100)
    low = np.r_[np.zeros(10), np.ones(90)]
    frame = records({"full": full, "L8": low, "L2": 0 * full}, ["a"] * 90 + ["b"] * 10)
    frame["cluster"] = frame["example_id"] // 5
    micro = StatsOptions(resamples=100, average="micro", sensitivity="run")
    row = by_setting(analyze(frame, micro))["L8"]
    assert row["diff"] == pytest.approx(-0.1) and row["n_clusters"] == 20
    macro = replace(micro, average="macro")
    assert by_setting(analyze(frame, macro))["L8"]["diff"] == pytest.approx(-1 / 9 / 2)
    alone = by_setting(analyze(frame.drop(columns="cluster"), micro))["L8"]
    assert alone["diff"] == row["diff"] and alone["n_clusters"] == 100
    # two of 20 documents are lost, not ten of 100 questions: the interval is that of the documents
    assert row["diff_ci"][0] < alone["diff_ci"][0] and row["diff_ci"][1] > alone["diff_ci"][1]
    documents = records({"full": np.ones(20), "L8": np.r_[0, 0, np.ones(18)], "L2": np.zeros(20)})
    assert row["diff_ci"] == pytest.approx(by_setting(analyze(documents, micro))["L8"]["diff_ci"], abs=0.02)


def dead_tasks(loss: float, dead: float = 0.04, examples: int = 180) -> pd.DataFrame:
    """Five tasks, four with a reference of ``dead``; L4 loses ``loss`` of all on the living one, L2 all of it."""
    place = np.arange(5 * examples)
    task, number = place % 5, place // 5
    full = np.where(task == 0, number < 0.7 * examples, number < dead * examples).astype(float)
    lost = (task == 0) & (number < loss * examples)
    scores = {"full": full, "L8": full, "L4": np.where(lost, 0.0, full), "L2": np.where(task == 0, 0.0, full)}
    return records(scores, [f"task{code}" for code in task])


def test_tasks_that_cannot_react_do_not_dilute_a_loss():
    report = analyze(dead_tasks(0.1), FEW)
    rows = by_setting(report)
    assert rows["L4"]["verdict"] == "degraded" and rows["L4"]["diff"] == pytest.approx(-0.1)
    assert rows["L8"]["verdict"] == "equivalent" and rows["L8"]["n_clusters"] == 180
    assert report["assay"]["tasks"] == ["task0"]
    assert sorted(report["assay"]["dead_tasks"]) == ["task1", "task2", "task3", "task4"]
    assert "L2 is not shown to lower it" in report["assay"]["dead_tasks"]["task1"]
    assert set(report["tasks"]) == {f"task{code}" for code in range(5)}
    whole = analyze(dead_tasks(0.1), StatsOptions(resamples=100, sensitivity="run"))
    assert by_setting(whole)["L4"]["diff"] == pytest.approx(-0.02)


def test_a_task_at_chance_cannot_react_and_living_tasks_all_count():
    chance = {f"task{code}": 0.25 for code in range(1, 5)}
    report = analyze(dead_tasks(0.1, dead=0.25), FEW, chance=chance)
    assert "above its chance level of 0.25" in report["assay"]["dead_tasks"]["task3"]
    assert not analyze(planted(2), FEW)["assay"]["dead_tasks"]


def test_rows_without_a_partner():
    frame = planted(2, 60)
    frame = frame[~((frame.setting == "full") & (frame.example_id == 7))]
    with pytest.raises(UsageError, match=r"1 of 60 rows without a partner.*example 7.*stats\.unpaired=drop"):
        analyze(frame, FEW)
    report = analyze(frame, StatsOptions(resamples=100, unpaired="drop"))
    assert report["n_clusters"] == 59
    assert by_setting(report)["L4"]["n_unpaired"] == 1


def test_other_prompts_and_unread_caches_are_refused():
    frame = planted(2, 20)
    frame["prompt_hash"] = "p" + frame["example_id"].astype(str)
    analyze(frame, FEW)
    changed = frame.copy()
    changed.loc[(changed.setting == "L4") & (changed.example_id == 3), "prompt_hash"] = "other"
    with pytest.raises(UsageError, match=r"setting L4 answered another prompt than full .* example 3"):
        analyze(changed, FEW)
    frame["quantized_reads"] = np.where(frame.setting == "L6", 0, 5)
    with pytest.raises(UsageError, match="setting L6 never read its quantized cache"):
        analyze(frame, FEW)


def test_runaways_are_paired_by_cluster():
    full = np.ones(200)
    runaway = {"full": [i == 199 for i in range(200)], "L4": [i < 8 for i in range(200)]}
    frame = records({"full": full, "L4": full}, runaway=runaway, kl={"full": [0] * 200, "L4": [0.5] * 200})
    row = by_setting(analyze(frame, FEW))["L4"]
    assert row["runaway_p"] == 0.0390625
    assert row["runaway_rate"] == pytest.approx(0.04)
    assert row["kl"] == pytest.approx(0.5)
    assert row["top1_agreement"] is None
    twice = pd.concat([frame.assign(seed=s, prediction=str(s)) for s in range(2)])
    assert by_setting(analyze(twice, FEW))["L4"]["runaway_p"] == 0.0390625


def test_agreement_of_answers_is_averaged_over_clusters():
    ones, mixed = [1.0] * 100, [0.25, 0.75] * 50
    frame = records({"full": ones, "L4": ones}).assign(agreement=ones + mixed)
    low, high = by_setting(analyze(frame, FEW))["L4"]["agreement_ci"]
    # Spread 0.25 over 100 clusters, one at 0 and one at 1 added: 0.5 +- t(0.975) * sqrt(6.75 / 101 / 102).
    assert (high + low) / 2 == pytest.approx(0.5) and (high - low) / 2 == pytest.approx(0.0508, abs=5e-4)
    assert by_setting(analyze(frame, FEW))["L4"]["agreement"] == pytest.approx(0.5)
    full = by_setting(analyze(frame, FEW))["full"]
    assert (full["agreement"], full["agreement_ci"]) == (1.0, [None, None])
    twice = pd.concat([frame.assign(turn=0), frame.assign(turn=1)])
    assert by_setting(analyze(twice, FEW))["L4"]["agreement_ci"] == pytest.approx([low, high])
    assert by_setting(analyze(frame.drop(columns="agreement"), FEW))["L4"]["agreement"] is None


def test_where_and_how_answers_part_is_averaged_over_those_that_do():
    """Of 100 answers 40 part by another token, after 2 or 6 equal ones, 10 by an end after 4, and 50 do not."""
    ones = [1.0] * 100
    by = [None] * 100 + ["token"] * 40 + ["end"] * 10 + [None] * 50
    at = [None] * 100 + [2, 6] * 20 + [4] * 10 + [None] * 50
    frame = records({"full": ones, "L4": ones}).assign(agreement=1.0, parted_by=by, parted_at=at)
    rows = by_setting(analyze(frame, FEW))
    parting = rows["L4"]["parting"]
    assert rows["full"]["parting"] is None
    assert (parting["by_token"], parting["by_end"]) == pytest.approx((0.4, 0.1))
    assert parting["by_token_ci"][0] < 0.4 < parting["by_token_ci"][1] and parting["by_end_ci"][0] < 0.1
    assert parting["place"] == pytest.approx(4)
    # 50 places of variance 3.2: 4 +- 1.96 * sqrt(3.2 / 50).
    assert parting["place_ci"] == pytest.approx([3.5, 4.5], abs=0.1)
    frame.loc[frame.setting == "L4", "agreement"] = None
    assert by_setting(analyze(frame, FEW))["L4"]["parting"] is None
    none = frame.assign(agreement=1.0, parted_by=None, parted_at=None)
    parting = by_setting(analyze(none, FEW))["L4"]["parting"]
    assert (parting["by_token"], parting["by_end"], parting["place"], parting["place_ci"]) == (
        0,
        0,
        None,
        [None] * 2,
    )


def test_kl_has_an_interval_over_clusters():
    ones = [1.0] * 100
    frame = records({"full": ones, "L4": ones}, kl={"full": [0.0] * 100, "L4": [0.1, 0.3] * 50})
    rows = by_setting(analyze(frame, FEW))
    assert rows["full"]["kl_ci"] == [None, None]
    assert rows["L4"]["kl_ci"] == pytest.approx([0.18, 0.22], abs=0.005)


def test_bootstrap_against_the_known_spread():
    x = np.r_[np.ones(25), np.zeros(75)][:, None]
    means = resample_means(x, np.zeros(100, int), "macro", 20_000, 0)
    # binomial: standard deviation sqrt(0.25 * 0.75 / 100), 2.5 % point 17, 97.5 % point 34
    assert means.std() == pytest.approx(np.sqrt(0.25 * 0.75 / 100), rel=0.03)
    low, high = percentile_interval(means, 0.95)
    assert (low[0], high[0]) == (pytest.approx(0.17, abs=0.01), pytest.approx(0.335, abs=0.011))
    assert np.array_equal(means, resample_means(x, np.zeros(100, int), "macro", 20_000, 0))


def test_resamples_are_joint_and_stratified():
    x = np.c_[np.arange(6.0), 2 * np.arange(6.0)]
    x[0, 1] = np.nan
    tasks = np.array([0, 0, 0, 1, 1, 1])
    means = resample_means(np.c_[x[:, 0], 2 * x[:, 0]], tasks, "macro", 50, 1)
    assert means[:, 1] == pytest.approx(2 * means[:, 0])
    constant = np.repeat([1.0, 3.0], 3)[:, None]
    assert resample_means(constant, tasks, "macro", 50, 1) == pytest.approx(np.full((50, 1), 2.0))
    assert np.isfinite(resample_means(x, tasks, "macro", 500, 1)).all()
