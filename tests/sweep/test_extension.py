"""A run takes more examples, seeds or settings by the same command; what is there is not run again, and it is said."""

import json

import pytest
import yaml

from semkv_bench.cli import main
from semkv_bench.errors import UsageError
from semkv_bench.records.folder import read_run
from semkv_bench.report.command import analysed_run

PLAIN = (
    "model=custom",
    "task=synthetic",
    "subset=[niah_noise]",
    "task.length=150",
    "engine.noise_examples=0",
    "stats.resamples=200",
    "seeds=[0]",
)


@pytest.fixture
def run(tmp_path, local_folder, capsys):
    out = tmp_path / "run"

    def sweep(*given, code=0):
        ended = main(["sweep", *PLAIN, f"model.path={local_folder}", f"out={out}", *given])
        assert code is None or ended == code
        return capsys.readouterr()

    sweep.out = out
    return sweep


def _records(out):
    files = sorted(out.glob("records-*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def _lines(out):
    return [line for file in sorted(out.glob("records-*.jsonl")) for line in file.read_text().splitlines()]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("first", "then", "added"),
    [
        (("per_task=2",), ("per_task=4",), 2),
        (("per_task=2",), ("per_task=2", "seeds=[0,3]"), 2),
        (("per_task=2",), ("per_task=3", "seeds=[3,0]"), 4),
    ],
)
def test_more_examples_leave_what_is_there(run, first, then, added):
    run("grid.levels=[16,4]", *first)
    before = _lines(run.out)
    run("grid.levels=[16,4]", *then)
    after = _lines(run.out)
    assert after[: len(before)] == before and len(after) == len(before) + 3 * added
    (amendment,) = yaml.safe_load((run.out / "protocol.yaml").read_text())["amendments"]
    assert amendment["examples"] == [2, 2 + added] and amendment["recorded"] == 2
    assert not amendment["reported"]
    frame, charter = read_run(run.out)
    assert len(frame) == 3 * charter["examples"]["count"] == 3 * (2 + added)


def test_more_grid_points_run_alone(run):
    run("grid.levels=[16,4]", "per_task=2")
    before = _lines(run.out)
    run("grid.levels=[16,8,4,3]", "per_task=2")
    new = _records(run.out)[len(before) :]
    assert _lines(run.out)[: len(before)] == before
    assert [record["setting"] for record in new] == ["affine-L8", "affine-L3"] * 2
    frame, _ = read_run(run.out)
    assert frame.groupby("example_id")["setting"].nunique().tolist() == [5, 5]


@pytest.mark.slow
def test_added_settings_answer_as_in_one_run(run, tmp_path):
    run("grid.levels=[16,4]", "per_task=2")
    run("grid.levels=[16,8,4,3]", "per_task=2")
    run("grid.levels=[16,8,4,3]", "per_task=2", f"out={tmp_path / 'whole'}")
    key = ["example_id", "setting"]
    told = ["prediction", "score", "cache_bits", "prompt_hash"]
    apart, whole = (
        read_run(path)[0].sort_values(key).set_index(key) for path in (run.out, tmp_path / "whole")
    )
    assert apart[told].to_dict() == whole[told].to_dict()
    assert apart["kl"].to_numpy() == pytest.approx(whole["kl"].to_numpy(), abs=1e-4)


@pytest.mark.slow
def test_both_and_twice(run):
    run("grid.levels=[16]", "per_task=1")
    run("grid.levels=[16,4]", "per_task=2")
    run("grid.levels=[16,4,3]", "per_task=3")
    frame, charter = read_run(run.out)
    assert [a["examples"] for a in charter["amendments"]] == [[1, 2], [2, 3]]
    assert [a["settings"] for a in charter["amendments"]] == [["affine-L4"], ["affine-L3"]]
    assert frame.groupby("example_id")["setting"].nunique().tolist() == [4, 4, 4]
    assert len(_records(run.out)) == 12
    assert "nothing left to run" in run("grid.levels=[16,4,3]", "per_task=3").out


@pytest.mark.slow
def test_an_extension_that_is_cut_short_goes_on(run):
    run("grid.levels=[16]", "per_task=2")
    run("grid.levels=[16,4,3]", "per_task=2")
    file = run.out / "records-0.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-1]) + lines[-1][:20])
    frame, _ = read_run(run.out)
    assert frame["example_id"].nunique() == 2 and set(frame["setting"]) == {"full", "affine-L16"}
    report = analysed_run(run.out, {})
    assert (
        report.n_examples == 2
        and "extension by affine-L3 and affine-L4 is not finished" in report.warnings[-1]
    )
    assert "ran 1 example" in run("grid.levels=[16,4,3]", "per_task=2").out
    assert read_run(run.out)[0].groupby("example_id")["setting"].nunique().tolist() == [4, 4]


@pytest.mark.slow
def test_the_report_says_so_and_is_exploratory(run, capsys, without_figures):
    run("grid.levels=[16,4]", "per_task=2")
    assert analysed_run(run.out, {}).preregistered
    assert main(["cliff-report", f"run={run.out}"]) == 0
    run("grid.levels=[16,8,4]", "per_task=3")
    report = analysed_run(run.out, {})
    assert not report.preregistered and report.extensions[0].reported
    assert main(["cliff-report", f"run={run.out}"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "extended on" in said
        and "from 2 to 3 examples and by affine-L8, when 2 were known and analysed" in said
    )
    written = json.loads((run.out / "report.json").read_text())
    assert written["extensions"][0]["examples"] == [2, 3]


@pytest.mark.slow
def test_what_was_extended_before_anything_was_known_stands(run):
    run("grid.levels=[16,4]", "per_task=2")
    for file in run.out.glob("records-*.jsonl"):
        file.write_text("")
    run("grid.levels=[16,4]", "per_task=3")
    report = analysed_run(run.out, {})
    assert report.extensions[0].recorded == 0 and report.preregistered


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    "given",
    [
        ("per_task=1",),
        ("per_task=3", "stats.margin=0.2"),
        ("per_task=3", "task.length=160"),
        ("per_task=3", "grid.levels=[4]"),
        ("per_task=3", "seeds=[1]"),
        ("per_task=3", "quantizer.group_size=8"),
        ("per_task=3", "stats.looks=[2,3]"),
    ],
)
def test_what_contradicts_the_protocol_is_refused(run, given):
    run("grid.levels=[16,4]", "per_task=2")
    before = {path.name: path.read_bytes() for path in run.out.iterdir() if path.suffix != ".lock"}
    said = run("grid.levels=[16,4]", *given, code=UsageError.exit_code).err
    assert "another protocol" in said and said.strip().count("\n") == 0
    assert {path.name: path.read_bytes() for path in run.out.iterdir() if path.suffix != ".lock"} == before


@pytest.mark.slow
def test_the_order_of_settings_is_no_part_of_a_run(run):
    run("methods=[affine,turboquant]", "grid.levels=[16]", "per_task=2")
    before = _lines(run.out)
    said = run("methods=[turboquant,affine]", "grid.levels=[16]", "per_task=2").out
    assert "nothing left to run" in said and _lines(run.out) == before
    run("methods=[turboquant,affine]", "grid.levels=[8,16]", "per_task=3")
    assert _lines(run.out)[: len(before)] == before
    frame, _ = read_run(run.out)
    assert len(frame) == 3 * 5 and len(_lines(run.out)) == 3 * 5


@pytest.mark.slow
def test_an_extension_that_nothing_was_recorded_under_is_taken_back(run):
    run("grid.levels=[16,4]", "per_task=1")
    run("grid.levels=[16,4]", "per_task=2")
    kept, charter = _lines(run.out), (run.out / "protocol.yaml").read_bytes()
    run("grid.levels=[16,4,3]", "per_task=200", "shard=200/200", "engine.noise_examples=0", code=None)
    for file in run.out.glob("records-*.jsonl"):
        file.write_text("".join(f"{line}\n" for line in kept) if file.name == "records-0.jsonl" else "")
    assert (run.out / "protocol.yaml").read_bytes() != charter
    assert "nothing left to run" in run("grid.levels=[16,4]", "per_task=2").out
    assert (run.out / "protocol.yaml").read_bytes() == charter
    run("grid.levels=[16,4]", "per_task=3")
    assert run("grid.levels=[16,4]", "per_task=2", code=UsageError.exit_code).err


@pytest.mark.slow
@pytest.mark.parametrize("measured_first", [True, False])
def test_a_measurement_stands_when_the_run_is_extended(run, measured_first):
    measure = ["measure", str(run.out), "setting=affine-L4", "examples=1"]
    run("grid.levels=[4]", "per_task=1")
    if measured_first:
        assert main(measure) == 0
    run("grid.levels=[4]", "per_task=2")
    if not measured_first:
        assert main(measure) == 0
    assert analysed_run(run.out, {}).measured.setting == "affine-L4"


def test_what_contradicts_is_named_and_not_what_may_grow(run):
    run("grid.levels=[16,4]", "per_task=2")
    said = run("grid.levels=[16,4]", "per_task=3", "stats.margin=0.2", code=UsageError.exit_code).err
    assert "stats.margin" in said and "per_task" not in said and "examples" not in said


def test_an_extension_by_prompts_that_were_changed_amends_nothing(local_folder, tmp_path, capsys):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "run"
    given = ["sweep", f"model={local_folder}", "task=jsonl", f"task.path={prompts}", "grid.levels=[16]"]
    given += ["engine.noise_examples=0", "max_new_tokens=4", f"out={out}"]
    lines = [json.dumps({"id": str(n), "prompt": f"What is {n}?", "answers": [str(n)]}) for n in range(4)]
    prompts.write_text("\n".join(lines[:2]) + "\n")
    assert main(given) == 0
    before = (out / "protocol.yaml").read_bytes()
    changed = [lines[0].replace("What is", "Whatever is"), *lines[1:3]]
    prompts.write_text("\n".join(changed) + "\n")
    capsys.readouterr()
    assert main(given) == UsageError.exit_code and "prompt" in capsys.readouterr().err
    assert (out / "protocol.yaml").read_bytes() == before
    prompts.write_text("\n".join(lines) + "\n")
    assert main(given) == 0
    assert read_run(out)[0]["example_id"].nunique() == 4


@pytest.mark.slow
def test_a_margin_given_afterwards_is_not_called_fixed(run, without_figures, capsys):
    run("grid.levels=[16,4]", "per_task=2")
    run("grid.levels=[16,4]", "per_task=3")
    assert main(["cliff-report", f"run={run.out}", "stats.margin=0.3"]) == 0
    assert "was fixed" not in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_a_sequential_run_keeps_its_size(run):
    run("grid.levels=[16,4]", "per_task=20", "stats.looks=[10]")
    said = run("grid.levels=[16,4]", "per_task=30", "stats.looks=[10]", code=UsageError.exit_code).err
    assert "another protocol" in said
