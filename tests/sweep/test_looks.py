"""Sequential runs: stages, looks at real run folders, early ends, resuming, several writers, reports."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from planted_runs import GRID, QUICK, Run, examples_of
from rich.console import Console

from semkv_bench.cli import main
from semkv_bench.errors import UsageError
from semkv_bench.plan.stages import arrange, interleaved, stage_number
from semkv_bench.records.folder import read_looks, read_run
from semkv_bench.report.command import run_report
from semkv_bench.stats import StatsOptions
from semkv_bench.sweep.interim import check_looks, in_order, progress_words

pytestmark = pytest.mark.usefixtures("without_figures")


def test_stages_hold_the_mixture_of_the_plan():
    examples = [*examples_of(60, ("a",), (0, 1)), *examples_of(30, ("b",), (0, 1))]
    stages = arrange(examples, StatsOptions(looks=(45, 90)))
    assert [stage.examples for stage in stages] == [45, 90, 180]
    assert [stage.information for stage in stages] == pytest.approx([0.25, 0.5, 1.0], abs=0.02)
    assert frozenset().union(*(stage.units for stage in stages)) == {e.unit for e in examples}
    first = Counter((task, seed) for task, _, seed in stages[0].units)
    expected = {("a", 0): 15, ("a", 1): 15, ("b", 0): 7.5, ("b", 1): 7.5}
    assert first.keys() == expected.keys()
    assert all(abs(n - expected[key]) <= 1 for key, n in first.items())


def test_the_order_of_the_plan_does_not_matter_and_names_do():
    examples = examples_of()
    options = StatsOptions(looks=(40,))
    shuffled = [examples[i] for i in np.random.default_rng(0).permutation(len(examples))]
    assert arrange(shuffled, options) == arrange(examples, options)
    ids = sorted(example_id for _, example_id, _ in arrange(examples, options)[0].units)
    assert ids[-1] > "s0-050"  # not simply the first of every task


def test_an_example_keeps_its_seeds_together():
    stages = arrange(examples_of(40, seeds=(0, 1, 2), shared=True), StatsOptions(looks=(50, 100)))
    assert [(stage.examples, stage.clusters) for stage in stages] == [(51, 17), (102, 34), (240, 80)]
    for stage in stages:
        seeds = Counter((task, example_id) for task, example_id, _ in stage.units)
        assert set(seeds.values()) == {3}


def test_examples_of_one_document_come_at_one_look():
    examples = [replace(e, cluster=f"d{int(e.example_id[-3:]) // 5}") for e in examples_of(100)]
    stages = arrange(examples, StatsOptions(looks=(50, 100)))
    assert [stage.clusters for stage in stages] == [10, 20, 40]
    documents = [{(t, int(i[-3:]) // 5) for t, i, _ in stage.units} for stage in stages]
    assert sum(map(len, documents)) == len(set().union(*documents)) == 40


def test_a_plan_without_looks_has_no_stages():
    assert arrange(examples_of(), StatsOptions()) == ()
    assert stage_number((), examples_of()[0]) is None


@pytest.mark.parametrize(
    ("looks", "told"),
    [
        ((100, 300), "beyond the 200"),
        ((1, 100), "each of the 2 tasks"),
        ((15, 100), "too early"),
        ((199,), None),
    ],
)
def test_looks_that_cannot_be(looks, told):
    if told is None:
        assert len(arrange(examples_of(), StatsOptions(looks=looks))) == 2
        return
    with pytest.raises(UsageError, match=told):
        arrange(examples_of(), StatsOptions(looks=looks))
    with pytest.raises(UsageError, match="too close"):
        arrange(examples_of(40, seeds=(0, 1, 2), shared=True), StatsOptions(looks=(50, 51)))


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch):
    """Every append waits for the disk otherwise."""
    monkeypatch.setattr("os.fsync", lambda number: None)


def test_a_clear_run_ends_at_its_second_look(tmp_path):
    run = Run(tmp_path)
    assert run.sweep() == 240
    looks = read_looks(tmp_path)
    assert [(look["examples"], look["stop"]) for look in looks] == [(120, False), (240, True)]
    assert looks[0]["open"] and not looks[1]["open"]
    assert looks[0]["alpha_spent"] < looks[1]["alpha_spent"] < 0.05
    assert run.folder.complete and run.folder.stopped_after == 2
    assert "stopped at look 2 of 3, 240 of 600 examples" in progress_words(run.folder)
    assert run.sweep() == 0


@pytest.mark.slow
def test_an_unclear_run_goes_to_its_end(tmp_path):
    run = Run(tmp_path, looks=(60, 120), per_task=100, lost=0.035)
    assert run.sweep() == 200
    assert [look["stop"] for look in read_looks(tmp_path)] == [False, False, False]
    assert run.folder.complete and run.folder.stopped_after is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "killed_after",
    [pytest.param(n, marks=pytest.mark.slow) if n != 239 else n for n in (1, 120, 239, 240)],
)
def test_a_killed_run_comes_to_the_same_decision(tmp_path, killed_after):
    whole, broken = Run(tmp_path / "whole"), Run(tmp_path / "broken")
    whole.sweep()
    assert broken.sweep(killed_after) == killed_after
    assert broken.folder.complete is False
    assert Run(tmp_path / "broken").sweep() == 240 - killed_after
    for name in ("looks.json", "protocol.yaml"):
        assert (tmp_path / "broken" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    first, second = (read_run(tmp_path / name)[0] for name in ("whole", "broken"))
    first, second = (frame.drop(columns="record_file") for frame in (first, second))
    assert first.equals(second)


@pytest.mark.slow
def test_lost_looks_are_taken_again(tmp_path):
    run = Run(tmp_path)
    run.sweep()
    before = (tmp_path / "looks.json").read_bytes()
    (tmp_path / "looks.json").write_text("{")
    assert not run.folder.complete
    assert run.sweep() == 0
    assert (tmp_path / "looks.json").read_bytes() == before


@pytest.mark.slow
def test_a_look_waits_for_all_writers_and_ends_them_all(tmp_path):
    """One writer has half of the examples; the other goes on meanwhile, and the stop reaches both."""
    first, second = Run(tmp_path), Run(tmp_path)
    mine = [e for i, e in enumerate(first.examples) if i % 2]
    others = [e for i, e in enumerate(first.examples) if not i % 2]
    for run in (first, second):
        run.folder.start()
    one, two = in_order(first.stages, first.folder, mine), in_order(second.stages, second.folder, others)
    ahead = 150
    for _ in range(ahead):
        first.folder.append(first.records(next(one)))
    assert read_looks(tmp_path) == []  # more than a stage's worth, but none is whole
    slow = 0
    for example in two:
        second.folder.refresh()
        second.folder.append(second.records(example))
        slow += 1
    looks = read_looks(tmp_path)
    assert [look["stop"] for look in looks] == [False, True]
    first.folder.refresh()
    assert list(one) == []
    frame, _ = read_run(tmp_path)
    assert len(frame) // len(GRID) == ahead + slow > 240
    result, _ = run_report(tmp_path, Console(quiet=True))
    assert result.n_examples_recorded == 240
    assert result.sequential.recorded_examples == ahead + slow


@pytest.mark.slow
def test_the_report_of_an_ended_run_is_finished_and_says_so(tmp_path):
    Run(tmp_path).sweep()
    result, _ = run_report(tmp_path, Console(quiet=True))
    run = result.sequential
    assert (run.look, run.looks, run.stopped, run.planned_examples) == (2, 3, True, 600)
    assert result.cliff.status == "located" and result.operating_point.setting == "L8"
    assert result.preregistered is True
    text = (tmp_path / "report.md").read_text()
    assert "stopped at look 2 of 3 (240 of 600 planned examples)" in text
    assert "not finished" not in text


@pytest.mark.slow
def test_a_report_between_looks_rests_on_the_last_one(tmp_path):
    run = Run(tmp_path)
    run.sweep(200)
    result, _ = run_report(tmp_path, Console(quiet=True))
    assert (result.sequential.look, result.n_examples_recorded) == (1, 120)
    assert "The run is not finished: 120 of 600" in (tmp_path / "report.md").read_text()


def test_a_report_before_the_first_look_is_provisional(tmp_path):
    Run(tmp_path).sweep(60)
    result, _ = run_report(tmp_path, Console(quiet=True))
    run = result.sequential
    assert (run.complete_looks, run.looks, run.examples[:2]) == (0, 4, (60, 120))
    assert run.information[0] < run.information[1]
    assert "no look is complete yet" in (tmp_path / "report.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stops", "after", "told"),
    [
        pytest.param(
            [True],
            130,
            "look 1 ended the run; by the records it goes on; remove the file",
            marks=pytest.mark.slow,
        ),
        ([True], 60, r"look 1 ended the run; by the records its examples are not all recorded \(60\)"),
        ([False, False], None, "look 2 was taken; by the records it ends the run"),
        pytest.param(
            [False, False, False, True],
            130,
            "look 2 was taken; by the records its examples are not all",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_looks_that_do_not_follow_from_the_records_are_refused(tmp_path, stops, after, told):
    run = Run(tmp_path)
    run.sweep(after)
    forged = [{"look": n, "stop": stop, "reason": "so"} for n, stop in enumerate(stops, start=1)]
    (tmp_path / "looks.json").write_text(json.dumps({"looks": forged}))
    for reads in (lambda: check_looks(run.folder), lambda: run_report(tmp_path, Console(quiet=True))):
        with pytest.raises(UsageError, match=told):
            reads()
    (tmp_path / "looks.json").unlink()
    assert run.sweep() + (after or 240) == 240


def test_every_beginning_of_a_run_is_about_all_tasks_and_keeps_seeds_together():
    examples = examples_of(30, tasks=("a", "b", "c"), seeds=(0, 1), shared=True)
    ordered = interleaved(examples)
    assert sorted(e.unit for e in ordered) == sorted(e.unit for e in examples)
    for size in (6, 12, 60, 120):
        assert set(Counter(example.task for example in ordered[:size]).values()) == {size // 3}
    assert all(
        one.example_id == other.example_id for one, other in zip(ordered[::2], ordered[1::2], strict=True)
    )
    assert [e.seed for e in ordered[:4]] == [0, 1, 0, 1]


def test_sweep_with_looks_from_the_command_line(local_folder, tmp_path, capsys):
    command = ["sweep", "model=custom", f"model.path={local_folder}", *QUICK, f"out={tmp_path / 'r'}"]
    assert main([*command, "stats.looks=[4]"]) == 0
    assert "at look 2 of 2, 8 of 8 examples: full precision is not yet shown" in capsys.readouterr().out
    frame, protocol = read_run(tmp_path / "r")
    assert [look["examples"] for look in protocol["looks"]] == [4, 8]
    assert Counter(frame[frame.setting == "full"]["look"]) == {1: 4, 2: 4}
    assert set(frame[frame.look == 1]["task"]) == set(frame["task"])
    assert main([*command, "stats.looks=[4]"]) == 0
    assert "nothing left to run" in capsys.readouterr().out
    assert main([*command, "stats.looks=[5]"]) == 2
    assert main(["cliff-report", f"run={tmp_path / 'r'}"]) == 0
    assert main(["cliff-report", f"run={tmp_path / 'r'}", "stats.looks=[2]"]) == 2
    assert "fixed by sweep" in capsys.readouterr().err


def test_without_looks_the_protocol_is_as_before(local_folder, tmp_path):
    assert main(["sweep", "model=custom", f"model.path={local_folder}", *QUICK, f"out={tmp_path}"]) == 0
    frame, protocol = read_run(tmp_path)
    assert "looks" not in protocol and "looks" not in protocol["stats"] and "look" not in frame
    assert not (tmp_path / "looks.json").exists()
