"""Raced runs: settings shown degraded leave at a look, and everything downstream knows the plan."""

import json
from collections import Counter

import pytest
from planted_runs import QUICK, Run, examples_of
from rich.console import Console

from semkv_bench.cli import main
from semkv_bench.errors import UsageError
from semkv_bench.plan.stages import arrange
from semkv_bench.records.folder import RunFolder, read_looks, read_run
from semkv_bench.regress.snapshot import from_run
from semkv_bench.report.command import run_report
from semkv_bench.stats import StatsOptions
from semkv_bench.stats.sequential import LookDecision
from semkv_bench.sweep import interim
from semkv_bench.sweep.interim import check_looks, in_order, progress_words

pytestmark = pytest.mark.usefixtures("without_figures")
QUIET = Console(quiet=True)


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda number: None)


def raced(path, **changes) -> Run:
    """100 examples of two tasks; L4 loses a half and L2 nine tenths; the first look is too early to end the run."""
    return Run(path, **{"looks": (60, 90), "per_task": 60, "lost": 0.5, "race": True, **changes})


@pytest.mark.slow
def test_degraded_settings_leave_and_nothing_else_changes(tmp_path):
    run, plain = raced(tmp_path / "r"), raced(tmp_path / "p", race=False)
    assert run.sweep() == plain.sweep() == 120
    looks = read_looks(tmp_path / "r")
    assert [look["leave"] for look in looks] == [["L4", "L2"], [], []]
    assert "leave" not in read_looks(tmp_path / "p")[0]
    frame, charter = read_run(tmp_path / "r")
    assert charter["stats"]["race"] is True
    assert Counter(frame["setting"]) == {"full": 120, "L16": 120, "L8": 120, "L4": 60, "L2": 60}
    assert "rows run: 480 of 600; shown degraded and left: L4, L2 at look 1" in progress_words(run.folder)
    mine, theirs = (run_report(tmp_path / name, QUIET)[0] for name in ("r", "p"))
    assert [(row.setting, row.verdict) for row in mine.settings] == [
        (row.setting, row.verdict) for row in theirs.settings
    ]
    assert (mine.cliff.status, mine.cliff.lower_setting, mine.cliff.upper_setting) == ("located", "L4", "L8")
    assert mine.operating_point == theirs.operating_point
    assert [row.left_at_look for row in mine.settings] == [None, None, None, 1, 1]
    assert [row.n for row in mine.settings] == [120, 120, 120, 60, 60]
    assert (mine.sequential.run_rows, mine.sequential.planned_rows) == (480, 600)
    assert mine.n_examples == 120 and mine.preregistered and not mine.warnings
    for name in ("L16", "L8"):  # those that stay are judged as without racing
        one, other = (next(r for r in report.settings if r.setting == name) for report in (mine, theirs))
        assert (one.diff, one.diff_ci, one.p_no_worse_raw) == (
            other.diff,
            other.diff_ci,
            other.p_no_worse_raw,
        )
    text = (tmp_path / "r" / "report.md").read_text()
    assert "L4, L2 at look 1; 480 of 600 rows were run" in text.replace("L2, L4", "L4, L2")


@pytest.mark.slow
def test_a_setting_that_left_is_judged_at_its_own_look(tmp_path):
    run = raced(tmp_path)
    run.sweep(70)
    early = run_report(tmp_path, QUIET)[0]
    raced(tmp_path).sweep()
    late = run_report(tmp_path, QUIET)[0]
    for name in ("L4", "L2"):
        one, other = (next(r for r in report.settings if r.setting == name) for report in (early, late))
        assert (one.diff, one.diff_ci, one.score_ci) == (other.diff, other.diff_ci, other.score_ci)
        assert one.p_degraded == other.p_degraded and other.verdict == "degraded"
        assert other.detectable_drop == one.detectable_drop


@pytest.mark.slow
@pytest.mark.parametrize("killed_after", [60, 75, 119])
def test_a_killed_run_comes_to_the_same_records(tmp_path, killed_after):
    whole, broken = raced(tmp_path / "whole"), raced(tmp_path / "broken")
    whole.sweep()
    broken.sweep(killed_after)
    with (tmp_path / "broken" / "records-0.jsonl").open("a") as file:
        file.write('{"task": "a", "exam')  # a kill in the middle of a line
    assert raced(tmp_path / "broken").sweep() == 120 - killed_after
    first, second = (read_run(tmp_path / n)[0].drop(columns="record_file") for n in ("whole", "broken"))
    assert first.equals(second)
    assert (tmp_path / "broken" / "looks.json").read_bytes() == (
        tmp_path / "whole" / "looks.json"
    ).read_bytes()


@pytest.mark.slow
def test_lost_looks_are_taken_again(tmp_path):
    run = raced(tmp_path)
    run.sweep()
    before = (tmp_path / "looks.json").read_bytes()
    (tmp_path / "looks.json").unlink()
    again = raced(tmp_path)
    assert again.sweep() == 0 and again.folder.complete
    assert (tmp_path / "looks.json").read_bytes() == before


@pytest.mark.slow
def test_what_a_writer_ran_ahead_of_a_look_does_not_count(tmp_path):
    one, two = raced(tmp_path / "two"), raced(tmp_path / "two")
    for run in (one, two):
        run.folder.start()
    first_half = [e for i, e in enumerate(one.examples) if i % 2]
    fast = in_order(one.stages, one.folder, first_half)
    for _ in range(40):
        one.folder.append(one.records(next(fast)))
    for example in in_order(two.stages, two.folder, [e for i, e in enumerate(two.examples) if not i % 2]):
        two.folder.refresh()
        two.folder.append(two.records(example))
    one.folder.refresh()
    for example in fast:
        one.folder.refresh()
        one.folder.append(one.records(example))
    assert one.folder.complete
    one.folder.close(), two.folder.close()
    frame, _ = read_run(tmp_path / "two")
    assert 60 < (frame["setting"] == "L2").sum() < 120
    raced(tmp_path / "alone").sweep()
    report, alone = (run_report(tmp_path / name, QUIET)[0] for name in ("two", "alone"))
    assert report.settings == alone.settings and report.cliff == alone.cliff
    assert (report.sequential.run_rows, report.sequential.planned_rows) == (480, 600)


@pytest.mark.slow
def test_rows_missing_within_the_plan_are_refused_still(tmp_path):
    """By a unit of a later stage that says it holds one setting less than is planned."""
    run = raced(tmp_path)
    run.sweep()
    path = tmp_path / "records-0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    at = next(i for i, line in enumerate(lines) if line["look"] == 2 and line["setting"] == "L8")
    unit = [
        line
        for line in lines
        if line["example_id"] == lines[at]["example_id"] and line["task"] == lines[at]["task"]
    ]
    for line in unit:
        line["of_unit"] = len(unit) - 1
    path.write_text("".join(json.dumps(line) + "\n" for i, line in enumerate(lines) if i != at))
    result = RunFolder.open(tmp_path, run.folder.charter, "a: 1\n")
    result.refresh()
    assert not result.complete and len(result.done) == 119
    with pytest.raises(
        UsageError, match=r"look 2 was taken; by the records its examples are not all recorded"
    ):
        run_report(tmp_path, QUIET)
    (tmp_path / "looks.json").unlink()
    assert raced(tmp_path).sweep() == 1  # L8 alone is run again
    assert run_report(tmp_path, QUIET)[0].settings[2].n == 120


@pytest.mark.slow
@pytest.mark.parametrize(
    ("leave", "told"), [(["L8", "L4", "L2"], "L2, L4 left at it"), (["L2"], "L2, L4 left at it")]
)
def test_a_setting_that_left_against_the_records_is_refused(tmp_path, leave, told):
    run = raced(tmp_path)
    run.sweep(60)
    looks = read_looks(tmp_path)
    assert len(looks) == 0
    run.sweep(1)
    looks = read_looks(tmp_path)
    (tmp_path / "looks.json").write_text(json.dumps({"looks": [{**looks[0], "leave": leave}]}))
    for reads in (lambda: check_looks(run.folder), lambda: run_report(tmp_path, QUIET)):
        with pytest.raises(UsageError, match=f"look 1 was taken; by the records {told}"):
            reads()


@pytest.mark.slow
def test_the_lowest_grid_point_stays_until_all_tasks_react(tmp_path):
    """Task b cannot lose anything, so L2 must go on to say so; L4 need not."""

    class Half(Run):
        def all_records(self, example):
            found = super().all_records(example)
            full = found[0]["score"]
            return found if example.task == "a" else [{**record, "score": full} for record in found]

    run = Half(tmp_path, looks=(100, 140), per_task=100, lost=0.7, race=True)
    run.sweep()
    left = {name: look["look"] for look in read_looks(tmp_path) for name in look["leave"]}
    assert left == {"L4": 1}
    result, _ = run_report(tmp_path, QUIET)
    assert list(result.assay.dead_tasks) == ["b"]
    assert {row.setting: row.verdict for row in result.settings}["L4"] == "degraded"


@pytest.mark.slow
def test_a_race_without_looks_lets_settings_leave_at_thirds_and_goes_on_to_the_end(tmp_path):
    """300 examples decide all; a run with looks would end there."""
    run = Run(tmp_path, looks=None, per_task=150, lost=0.5, race=True)
    assert [stage.examples for stage in run.stages] == [100, 200, 300]
    assert run.sweep() == 300
    looks = read_looks(tmp_path)
    assert [look["stop"] for look in looks] == [False] * 3 and looks[0]["leave"] == ["L4", "L2"]
    assert "every grid point is decided" in looks[1]["reason"]
    result, _ = run_report(tmp_path, QUIET)
    assert [row.n for row in result.settings] == [300, 300, 300, 100, 100]
    assert result.operating_point.setting == "L8" and result.sequential.stopped is False


@pytest.mark.parametrize("count", [1, 2])
def test_a_plan_too_small_for_thirds_is_run_without_looks(count):
    assert arrange(examples_of(count, tasks=("a", "b", "c", "d")), StatsOptions(race=True)) == ()


def test_race_is_fixed_by_the_sweep(tmp_path, capsys):
    Run(tmp_path, looks=(60, 90), per_task=60).sweep()
    assert main(["cliff-report", f"run={tmp_path}", "stats.race=true"]) == 2
    assert main(["cliff-report", f"run={tmp_path}", "stats.race=true", "stats.looks=[3]"]) == 2
    assert "fixed by sweep" in capsys.readouterr().err


def test_a_raced_sweep_from_the_command_line(local_folder, tmp_path, capsys, monkeypatch):
    """L2 is said to leave at the first look; later examples are run, recorded and reported without it."""

    def take(frame, options, chance, look):
        return LookDecision(False, "so", (), ("affine-L2",) if look.number == 1 else ())

    monkeypatch.setattr(interim, "take_look", take)
    out = tmp_path / "r"
    command = ["sweep", "model=custom", f"model.path={local_folder}", *QUICK, f"out={out}"]
    command += ["stats.looks=[4]", "stats.race=true"]
    assert main(command) == 0
    assert "rows run: 28 of 32; shown degraded and left: affine-L2 at look 1" in capsys.readouterr().out
    frame, protocol = read_run(out)
    assert protocol["stats"]["race"] is True
    names = {look: set(frame[frame.look == look]["setting"]) for look in (1, 2)}
    assert names[1] - names[2] == {"affine-L2"} and len(frame) == 28
    assert main(command) == 0
    assert "nothing left to run" in capsys.readouterr().out
    records = (out / "records-0.jsonl").read_text().splitlines(keepends=True)
    (out / "records-0.jsonl").write_text(
        "".join(records[:-2])
    )  # killed in its last example, before the last look
    (out / "looks.json").write_text(json.dumps({"looks": read_looks(out)[:1]}))
    assert main(command) == 0
    assert len(read_run(out)[0]) == 28
    assert main(["cliff-report", f"run={out}"]) == 0
    assert main(["show", f"run={out}", "setting=affine-L2"]) == 0
    assert "4 examples under affine-L2" in capsys.readouterr().out


@pytest.mark.slow
def test_runs_side_by_side_may_be_raced_and_methods_are_compared_over_whole_runs(tmp_path, capsys):
    for name in ("one", "two"):
        raced(tmp_path / name).sweep()
        run_report(tmp_path / name, QUIET)
    folders = f"runs=[{tmp_path / 'one'},{tmp_path / 'two'}]"
    assert main(["cliff-report", folders, f"out={tmp_path / 'o'}"]) == 0
    capsys.readouterr()
    assert main(["compare", folders, f"out={tmp_path / 'c'}"]) == 2
    assert (
        "one is a sequential run, whose settings leave when its own methods are decided"
        in capsys.readouterr().err
    )
    frame, charter = read_run(tmp_path / "one")
    with pytest.raises(
        UsageError, match="a raced run has settings that left early; regress compares whole runs"
    ):
        from_run(frame, charter, None, {}, {}, seeded=False)


def test_scores_from_elsewhere_are_not_raced(tmp_path, capsys):
    rows = [("a", k, name, bits, 1.0) for k in range(4) for name, bits in (("full", 16), ("L4", 2))]
    lines = ["task,example_id,setting,code_bits,score", *(",".join(map(str, row)) for row in rows)]
    (tmp_path / "s.csv").write_text("\n".join(lines))
    assert main(["cliff-report", f"records={tmp_path / 's.csv'}", "stats.race=true"]) == 2
    assert "stats.race plans a sweep" in capsys.readouterr().err
    # Columns of these names mean nothing there: rows that are missing are refused.
    lines = [
        f"{line},{last}"
        for line, last in zip(lines, ["look,last_look", *["1,1", "1,1", "2,2", "2,1"] * 2], strict=True)
    ]
    (tmp_path / "s.csv").write_text("\n".join(line for line in lines if not line.endswith("2,1")))
    assert main(["cliff-report", f"records={tmp_path / 's.csv'}"]) == 2
    assert "L4 lacks 2" in capsys.readouterr().err
