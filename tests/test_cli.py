import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from io import StringIO

import pandas as pd
import pytest
import yaml

from semkv_bench import cli
from semkv_bench.cli import main
from semkv_bench.commands import COMMANDS, Command
from semkv_bench.console import LastingConsole
from semkv_bench.records.folder import read_run
from semkv_bench.records.runs import newest_run

pytestmark = pytest.mark.usefixtures("without_figures")

QUICK = ["per_task=3", "task.length=300", "max_new_tokens=4", "grid.levels=[16,4,2]"]


def _sweep(folder, out, *more: str) -> list[str]:
    return ["sweep", "model=custom", f"model.path={folder}", f"out={out}", *QUICK, *more]


def _lines(capsys) -> tuple[str, str]:
    captured = capsys.readouterr()
    return captured.out, captured.err


@pytest.fixture(scope="module")
def run(tmp_path_factory, local_folder):
    """A finished run of the small random model."""
    out = tmp_path_factory.mktemp("runs") / "run"
    assert main(_sweep(local_folder, out)) == 0
    return out


def test_a_run_folder_holds_everything(run):
    frame, protocol = read_run(run)
    assert len(frame) == 4 * 6 == len(protocol["settings"]) * protocol["examples"]["count"]
    assert set(frame.setting) == {"full", "affine-L16", "affine-L4", "affine-L2"}
    assert frame.score.between(0, 1).all() and frame.prompt_tokens.between(200, 300).all()
    quantized = frame[frame.setting != "full"]
    assert (quantized.quantized_reads > 0).all() and (quantized.kl > 0).all()
    assert (frame[frame.setting == "full"].kl == 0).all()
    low, high = (frame[frame.setting == f"affine-L{level}"].kl.mean() for level in (16, 2))
    assert low < high
    assert {"config.yaml", "protocol.yaml", "environment.json"} <= {p.name for p in run.iterdir()}
    assert yaml.safe_load((run / "config.yaml").read_text())["per_task"] == 3


def test_report_of_a_run(run, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("semkv_bench.report.figures.FIGURE_NAMES", ("score_vs_bits",))
    assert main(["cliff-report", f"run={run}", f"out={tmp_path}"]) == 0
    out, _ = _lines(capsys)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["preregistered"] is True and report["margin"] == 0.03
    assert "affine-L16" in out
    for name in ("report.md", "report.html", "figures/score_vs_bits.svg", "figures/score_vs_bits.png"):
        assert (tmp_path / name).stat().st_size > 500
    assert (
        main(["cliff-report", f"run={run}", f"out={tmp_path}", "stats.margin=0.05", "stats.alpha=0.1"]) == 0
    )
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["preregistered"], report["margin"], report["alpha"]) == (False, 0.05, 0.1)


def test_a_finished_run_is_not_run_again(run, local_folder, capsys):
    before = {p: p.read_bytes() for p in run.glob("records-*")}
    assert main(_sweep(local_folder, run)) == 0
    assert "nothing left to run" in _lines(capsys)[0]
    assert {p: p.read_bytes() for p in run.glob("records-*") if p.stat().st_size} == before


def test_another_protocol_in_the_same_folder_is_refused(run, local_folder, capsys):
    before = {p: p.read_bytes() for p in run.iterdir() if p.is_file()}
    assert main(_sweep(local_folder, run, "seeds=[1]")) == 2
    assert "another protocol" in _lines(capsys)[1]
    assert {p: p.read_bytes() for p in run.iterdir() if p.is_file()} == before


@pytest.mark.slow
def test_default_folder_resumes_the_newest_unfinished(local_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = _sweep(local_folder, "", "per_task=1", "grid.levels=[4]")
    arguments = [a for a in arguments if not a.startswith("out=")]
    assert main(arguments) == 0
    (first,) = (tmp_path / "results/runs").iterdir()
    records = first / "records-0.jsonl"
    whole = records.read_bytes()
    records.write_bytes(whole[: len(whole) // 2])
    assert main(arguments) == 0
    assert [p.name for p in (tmp_path / "results/runs").iterdir()] == [first.name]
    assert sorted(records.read_bytes().splitlines()) == sorted(whole.splitlines())
    capsys.readouterr()
    assert main(["cliff-report"]) == 0
    assert (first / "report.json").exists()
    before = _content(first)
    capsys.readouterr()
    assert main(arguments) == 0
    assert f"nothing left to run: results/runs/{first.name} is complete; fresh=true" in _lines(capsys)[0]
    assert [p.name for p in (tmp_path / "results/runs").iterdir()] == [first.name] and _content(
        first
    ) == before
    for count in (2, 3):
        assert main([*arguments, "fresh=true"]) == 0
        assert len(list((tmp_path / "results/runs").iterdir())) == count


def _content(run) -> dict:
    return {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.stat().st_size}


@pytest.mark.slow
def test_a_run_that_cannot_be_read_does_not_block_its_configuration(
    local_folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    arguments = [a for a in _sweep(local_folder, "", "per_task=1") if not a.startswith("out=")]
    assert main(arguments) == 0
    (first,) = (tmp_path / "results/runs").iterdir()
    (first / "protocol.yaml").write_text(": [")
    assert main(arguments) == 0
    err = _lines(capsys)[1]
    assert "not continued" in err and "protocol.yaml is damaged" in err
    assert len(list((tmp_path / "results/runs").iterdir())) == 2
    assert main(arguments) == 0
    assert len(list((tmp_path / "results/runs").iterdir())) == 2


def test_runs_of_regress_are_neither_continued_nor_the_newest(local_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = [a for a in _sweep(local_folder, "", "per_task=1") if not a.startswith("out=")]
    assert main(arguments) == 0
    runs = tmp_path / "results/runs"
    (first,) = runs.iterdir()
    later = first.rename(runs / f"regress-{first.name}")
    assert newest_run() is None
    assert main(["cliff-report"]) == 3
    assert main(arguments) == 0
    (again,) = set(runs.iterdir()) - {later}
    os.utime(later / "records-0.jsonl", (2e9, 2e9))
    assert newest_run() == again.relative_to(tmp_path)


def test_multirun_makes_a_run_each(local_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = [a for a in _sweep(local_folder, "", "grid.levels=[4]") if not a.startswith("out=")]
    assert main([*arguments, "-m", "quantizer=affine,turboquant", "per_task=1"]) == 0
    runs = [read_run(path)[1] for path in (tmp_path / "results/runs").iterdir()]
    assert len(runs) == 2 and len({r["hash"] for r in runs}) == 2


def test_longbench_from_a_local_folder(local_folder, tmp_path, capsys):
    data = tmp_path / "data"
    data.mkdir()
    item = {"context": "The lamp is red. " * 40, "input": "Which colour?", "answers": ["red"], "length": 160}
    rows = [
        {
            **item,
            "dataset": "hotpotqa",
            "language": "en",
            "all_classes": None,
            "_id": f"id{i}",
            "input": f"Colour {i}?",
        }
        for i in range(4)
    ]
    (data / "hotpotqa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = _sweep(local_folder, tmp_path / "run", "task=longbench", f"task.path={data}", "prompts=own")
    command = [a for a in command if not a.startswith("task.length")]
    assert main([*command, "subset=[hotpotqa]", "max_prompt_tokens=120"]) == 0
    frame, protocol = read_run(tmp_path / "run")
    assert (
        set(frame.task) == {"hotpotqa"} and set(frame.prompts) == {"own"} and frame.prompt_tokens.max() <= 120
    )
    assert protocol["prompts"] == "own" and frame.truncated.all()
    assert main([*command, "subset=[qasper]", "out=" + str(tmp_path / "other")]) == 3
    assert "qasper" in _lines(capsys)[1]


@pytest.mark.quick_cases(15)
@pytest.mark.parametrize(
    ("command", "code", "told"),
    [
        (["swep"], 2, "choose from sweep"),
        (["sweep", "model"], 2, "not of the form key=value"),
        (["sweep", "--fast"], 2, "unknown option --fast"),
        (["swep"], 2, "did you mean sweep?"),
        (["plan", "--jsno"], 2, "did you mean --json?"),
        (["plan", "--cfg", "hydra"], 2, "choose from"),
        (["models", "per_task=3"], 2, "takes model=... and model.path=... only"),
        (["models", "model=no/where/at/all"], 3, "model.path=no/where/at/all does not exist"),
        (["cliff-report", "/nowhere"], 3, "/nowhere does not exist"),
        (["cliff-report", "/nowhere", "/else"], 2, "runs=[DIR,DIR]"),
        (["doctor", "all"], 2, "doctor takes --json only"),
        (["show", "run=a", "run=b", "setting=x"], 2, "show takes one run, not a and b"),
        (["show", "run=a", "settings=x"], 2, "show takes run, setting and only, not settings=x"),
        (["atlas", "runs=a", "out=b", "out=c"], 3, "a"),
        (["badge", "a", "b"], 2, "badge takes one run, not a and b"),
        (["completion", "fish"], 2, "bash and zsh"),
        (["sweep", "model=nope"], 2, "there is no model 'nope'"),
        (["sweep", "grid.levels=[]"], 2, "no levels given"),
        (["sweep", "grid.levels=[1]"], 2, "whole numbers from 2"),
        (["sweep", "quantizer.group_size=48"], 2, "legal sizes are 2, 4, 8, 16, 32, 64"),
        (["sweep", "stats.margin=1"], 2, "stats.margin"),
        (["sweep", "subset=[needles]"], 2, "niah_noise"),
        (["sweep", "seeds=[1,1]"], 2, "names a seed twice"),
        (["sweep", f"seeds=[{2**63}]"], 2, "whole numbers of at most 64 bits"),
        (["sweep", f"stats.resamples={10**9}"], 2, "from 100 to 100000"),
        (["regress", "baseline=nowhere.json"], 3, "write it with --update added to this command"),
        (["sweep", "max_prompt_tokens=3"], 2, "max_prompt_tokens"),
        (["sweep", "task.length=9000"], 2, "beyond the 8192 positions"),
        (["sweep", "allocation=prune", "allocation.keep=0"], 2, "allocation.keep=0"),
        (["sweep", "allocation=two_level", "allocation.fraction=[]"], 2, "empty list"),
        (["sweep", "experiment=nope"], 2, "small/affine_uniform"),
        (["sweep", "seeds=3"], 2, "seeds must be a list"),
        (["sweep", "out=/etc/passwd"], 2, "is a file"),
        (["sweep", "fresh=true", "out=x"], 2, "leave one of fresh=true and out=... out"),
        (["recipe", "fresh=true", "out=x"], 2, "leave one of fresh=true and out=... out"),
        (["sweep", "fresh=true", "shard=1/2"], 2, "would give every shard a folder"),
        (["sweep", "-m", "per_task=1,0"], 2, "per_task=0"),
        pytest.param(
            ["sweep", "-m", "task.length=300,9000", "per_task=1"],
            2,
            "task.length=9000",
            marks=pytest.mark.slow,
        ),
        (["sweep", "-m", "out=/etc/passwd/a,/etc/passwd/b"], 2, "/etc/passwd is a file"),
        (["sweep", "-m", "out=x", "per_task=1,2"], 2, "can hold one"),
        (["sweep", "model=custom", "model.path=x", "model.attention=foo"], 2, "model.attention=foo"),
        (["plan", "grid=null"], 2, "Config group override must be"),
        (["storage", "context=[-1]"], 2, "context=[-1]"),
        (["sweep", "model=custom", "model.path=/nowhere"], 3, "does not exist"),
        (["sweep", "model=llama31"], 3, "hf download meta-llama/Llama-3.1-8B-Instruct"),
        (["sweep", "task=longbench"], 3, "LongBench"),
        (["cliff-report", "run=/nowhere"], 3, "/nowhere does not exist"),
        (["cliff-report", "run=/etc/passwd"], 2, "records=FILE for scores made elsewhere"),
        (["cliff-report", "run=/nowhere", "out=/etc/passwd"], 2, "out=/etc/passwd is a file"),
        (["cliff-report", "run=/nowhere", "out=/etc/passwd/r"], 2, "/etc/passwd is a file"),
        (["cliff-report", "records=/nowhere.csv", "out=/etc/passwd/r"], 2, "/etc/passwd is a file"),
        (["sweep", "model.path=/nowhere", "model=custom", "out=/etc/passwd/r"], 2, "/etc/passwd is a file"),
        (["recipe", "model.path=/nowhere", "model=custom", "out=/etc/passwd/r"], 2, "/etc/passwd is a file"),
        (["regress", "model.path=/nowhere", "model=custom", "out=/etc/passwd/r"], 2, "/etc/passwd is a file"),
        (["regress", "--update", "baseline=/etc/passwd/b.json"], 2, "baseline=/etc/passwd is a file"),
        (["sweep", "out=/proc/nowhere/run", "per_task=1"], 3, "cannot write"),
        (["cliff-report", "run=/nowhere", "model=m"], 2, "model=NAME chooses a model of records=FILE"),
        (["cliff-report", "runs=[/nowhere]", "model=m"], 2, "model=NAME chooses a model of records=FILE"),
        (["cliff-report", "records=/nowhere.csv"], 3, "/nowhere.csv"),
        (["cliff-report", "run=a", "records=b"], 2, "not both"),
        (["storage", "head_dim=0"], 2, "head_dim=0"),
        (["storage", "+quantizer.layers.levels={1: 256}"], 2, "give model=NAME"),
        (["storage", "head_dim=12", "quantizer.group_size=5"], 2, "legal sizes"),
    ],
)
def test_wrong_usage_is_one_line_with_its_exit_code(command, code, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(command) == code
    out, err = _lines(capsys)
    err = err.removeprefix("loading torch and transformers\n")  # where no test before this one did
    assert told in err and len(err.strip().splitlines()) == 1 and err.startswith("semkv-bench: ") and not out
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("told_where", [True, False])
def test_what_nobody_expected_is_no_failed_check(told_where, monkeypatch, capsys):
    monkeypatch.setitem(cli.COMMANDS, "models", Command(lambda given: given.arguments[1], "fails"))
    monkeypatch.setenv("SEMKV_TRACEBACK", "1" if told_where else "")
    assert main(["models"]) == 3
    err = _lines(capsys)[1]
    assert "semkv-bench: unexpected IndexError" in err and ("Traceback" in err) == told_where


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["--help"], 0),
        (["models"], 0),
        (["models", "--json"], 0),
        (["storage", "--json"], 0),
        (["sweep", "--help"], 0),
        (["regress", "quick=true"], 0),
        # The name of a baseline holds options, and there is none of this.
        (["regress", "quick=true", "quantizer.group_size=32"], 3),
    ],
)
def test_a_reader_that_leaves_early_changes_no_exit_code(command, code, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert main(command) == code


def test_no_run_yet(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["cliff-report"]) == 3
    assert "semkv-bench sweep" in _lines(capsys)[1]


@pytest.mark.parametrize("command", ["sweep", "cliff-report", "storage", "plan"])
def test_help_lists_groups_and_choices(command, capsys):
    assert main([command, "--help"]) == 0
    out = _lines(capsys)[0]
    assert "stats=default" in out or "quantizer=affine" in out


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("command", [name for name, row in COMMANDS.items() if row.config])
def test_the_composed_configuration_can_be_seen_and_nothing_is_run(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for option in (["--cfg", "job"], ["--cfg=job"]) if command == "sweep" else (["--cfg", "job"],):
        given = {"storage": [], "measure": [], "compare": ["out=here"]}.get(command, ["out=here"])
        assert main([command, *option, *given]) == 0
        told = yaml.safe_load(_lines(capsys)[0])
        assert told.get("out", "here") == "here" and {"stats", "grid", "setting", "sequences"} & set(told)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("semkv-bench st", ["storage"]),
        ("semkv-bench sweep quantizer=turboquant_p", ["quantizer=turboquant_prod"]),
        ("semkv-bench plan protocol.hist", ["protocol.history="]),
        ("semkv-bench plan --cal", ["--calibrate"]),
        ("semkv-bench models model.p", ["model.path="]),
    ],
)
def test_a_shell_s_request_is_answered(line, expected, tmp_path):
    answers = tmp_path / "answers"
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "IFS": "\n"}
    asked |= {"_ARGCOMPLETE_STDOUT_FILENAME": str(answers), "_ARGCOMPLETE_COMP_WORDBREAKS": ""}
    subprocess.run([sys.executable, "-m", "semkv_bench"], env={**os.environ, **asked}, check=True, timeout=60)
    assert [word.strip() for word in answers.read_text().replace("\x0b", "\n").split()] == expected


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_is_a_script_of_the_shell(shell, capsys):
    assert main(["completion", shell]) == 0
    script = _lines(capsys)[0]
    assert "semkv-bench" in script and "_ARGCOMPLETE" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["quantizer=affine", "allocation=two_level", "allocation.high=6", "allocation.low=5"],
            {
                "code_bits": 2.388,
                "packed_bits": 2.4,
                "effective_bits": 2.65,
                "compression": 6.04,
                "aligned_bits": 2.667,
            },
        ),
        (
            [
                "quantizer=turboquant",
                "allocation=two_level",
                "allocation.high=4",
                "allocation.low=3",
                "allocation.fraction=0.75",
            ],
            {"code_bits": 1.896, "packed_bits": 1.9, "effective_bits": 2.025, "compression": 7.90},
        ),
        (
            ["grid.levels=[5]"],
            {"code_bits": 2.322, "packed_bits": 2.3333, "effective_bits": 2.5833, "compression": 6.19},
        ),
        (["allocation=prune"], {"effective_bits": 4.0, "compression": 4.0}),
        (
            ["quantizer=turboquant", "grid.levels=[4]"],
            {"code_bits": 2, "packed_bits": 2, "effective_bits": 2.125},
        ),
    ],
)
def test_storage_reproduces_the_known_figures(overrides, expected, capsys):
    assert main(["storage", *overrides, "head_dim=128", "--json"]) == 0
    got = json.loads(_lines(capsys)[0])
    for name, value in expected.items():
        digits = len(str(value).partition(".")[2])
        assert round(got[name], digits) == value, name


def test_options_in_a_setting_s_name_are_shown(capsys):
    assert main(["storage", "quantizer.group_size=32", "grid.levels=[16]", "head_dim=64"]) == 0
    assert "affine[g32]" in capsys.readouterr().out


def test_storage_of_a_model_and_several_levels(capsys):
    assert main(["storage", "model=smollm2", "grid.levels=[8,5]", "context=[1000]", "--json"]) == 0
    high, low = json.loads(_lines(capsys)[0])
    assert high["full_bytes"]["1000"] == 2 * 30 * 3 * 64 * 1000 * 2
    assert low["cache_bytes"]["1000"] == pytest.approx(
        high["full_bytes"]["1000"] * low["effective_bits"] / 16, abs=1
    )
    assert main(["storage", "model=smollm2"]) == 0


def test_plan_loads_no_weights(capsys, monkeypatch):
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)
    assert main(["plan", "per_task=2"]) == 0
    out = _lines(capsys)[0]
    assert "niah_noise" in out and "30 of 30 layers quantized" in out


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["per_task=49"], "98 examples cannot show that any setting is equivalent at stats.margin=0.03"),
        (["per_task=56", "task.questions=4"], "112 examples about 28 documents cannot show that any setting"),
        (
            ["per_task=49", "task.perturb=case"],
            "196 examples about 98 documents cannot show that any setting",
        ),
        pytest.param(["per_task=50"], None, marks=pytest.mark.slow),
        pytest.param(["per_task=25", "seeds=[0,1]"], None, marks=pytest.mark.slow),
        (["per_task=14", "stats.margin=0.1"], "that takes 29"),
        (["per_task=60", "allocation=two_level", "allocation.high=16", "allocation.low=14"], "takes 122"),
        pytest.param(["per_task=60", "allocation=prune"], "takes 122", marks=pytest.mark.slow),
    ],
)
def test_a_plan_says_when_no_outcome_could_be_enough(overrides, told, capsys):
    """0.97^99 is the first below 0.05, 0.9^29 at a margin of 0.1; beside mixes the grid has half of alpha."""
    assert main(["plan", "--json", "task.length=200", *overrides]) == 0
    warning = json.loads(capsys.readouterr().out)["too_few"]
    assert warning is None if told is None else told in warning


def test_foreign_scores_from_a_csv(tmp_path, capsys):
    rows = [
        {
            "task": "qa",
            "example_id": i,
            "setting": setting,
            "code_bits": bits,
            "score": float(good or i % 10 == 0),
        }
        for i in range(80)
        for setting, bits, good in (("full", 16, True), ("L4", 2.0, True), ("L2", 1.0, False))
    ]
    path = tmp_path / "scores.csv"
    pd.DataFrame(rows).to_csv(path, index=False)
    assert main(["cliff-report", f"records={path}", f"out={tmp_path / 'r'}", "stats.margin=0.05"]) == 0
    report = json.loads((tmp_path / "r/report.json").read_text())
    assert report["cliff"]["status"] == "located"
    assert (report["cliff"]["lower_bits"], report["cliff"]["upper_bits"]) == (1.0, 2.0)
    assert report["operating_point"]["setting"] == "L4"


def test_a_file_of_several_models_asks_which_one(tmp_path, capsys):
    rows = [
        {"model": m, "task": "qa", "example_id": i, "setting": s, "code_bits": b, "score": 1.0}
        for m in ("org/a", "b")
        for i in range(5)
        for s, b in (("full", 16), ("L4", 2.0))
    ]
    path = tmp_path / "scores.csv"
    pd.DataFrame(rows).to_csv(path, index=False)
    assert main(["cliff-report", f"records={path}"]) == 2
    assert "model=b" in _lines(capsys)[1]
    assert main(["cliff-report", f"records={path}", "model=org/a", f"out={tmp_path / 'r'}"]) == 0
    assert json.loads((tmp_path / "r/report.json").read_text())["model"] == "org/a"


def test_the_model_that_an_error_proposes_can_be_given_as_printed(tmp_path, capsys):
    names = ("[c],d=e", "it's")
    rows = [f'"{m}",qa,{i},{s},{b},1\n' for m in names for i in (1, 2) for s, b in (("full", 16), ("L4", 2))]
    path = tmp_path / "scores.csv"
    path.write_text("model,task,example_id,setting,code_bits,score\n" + "".join(rows))
    assert main(["cliff-report", f"records={path}"]) == 2
    proposed = shlex.split(_lines(capsys)[1].partition("choose one with ")[2])
    for argument, name in ((*proposed, names[0]), (f'model="{names[1]}"', names[1])):
        assert main(["cliff-report", f"records={path}", argument, f"out={tmp_path / 'r'}"]) == 0
        assert json.loads((tmp_path / "r/report.json").read_text())["model"] == name


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("environment.json", "{"),
        pytest.param("environment.json", "[1]", marks=pytest.mark.slow),
        ("environment.json", '{"sessions": [null]}'),
        pytest.param("config.yaml", ": [", marks=pytest.mark.slow),
        ("config.yaml", None),
    ],
)
def test_a_report_does_not_depend_on_what_only_describes(run, tmp_path, name, content, capsys):
    damaged = tmp_path / "run"
    shutil.copytree(run, damaged)
    (damaged / name).unlink()
    if content is not None:
        (damaged / name).write_text(content)
    assert main(["cliff-report", f"run={damaged}"]) == 0


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("command", [[], *([name] for name in cli.COMMANDS)])
def test_help_fits_a_terminal_of_80_columns(command, monkeypatch):
    shown = StringIO()
    monkeypatch.setattr(cli, "OUT", LastingConsole(file=shown, force_terminal=True, width=80))
    assert main([*command, "--help"]) == 0
    assert max(map(len, shown.getvalue().splitlines())) <= 80 and shown.getvalue().count("\n") > 2


def test_what_is_folded_goes_on_below_its_column():
    line = "  out=null          run folder; null names one of its own under results/runs, by time and hash"
    first, second = cli._wrapped(line, 80).splitlines()
    assert len(first) <= 80 and second.startswith(" " * line.index("run folder")) and second.strip()
    first, second = cli._wrapped(f"  experiment: {', '.join(['paper/affine_uniform'] * 5)}", 80).splitlines()
    assert len(first) <= 80 and second.startswith("    paper/")
    assert cli._wrapped("", 80) == "" and cli._wrapped("  grid: a", 80) == "  grid: a"


@pytest.mark.parametrize("content", [b": [", b"\xff\xfe", b"", b"[]"])
def test_a_damaged_protocol_is_one_line(run, local_folder, tmp_path, content, capsys):
    damaged = tmp_path / "run"
    shutil.copytree(run, damaged)
    (damaged / "protocol.yaml").write_bytes(content)
    assert main(["cliff-report", f"run={damaged}"]) == 2
    assert main(_sweep(local_folder, damaged)) == 2
    err = _lines(capsys)[1].strip().splitlines()
    assert all("protocol.yaml" in line for line in err) and len(err) == 2


def test_a_report_of_foreign_scores_does_not_replace_a_runs(run, tmp_path, capsys):
    path = tmp_path / "scores.csv"
    path.write_text("task,example_id,setting,code_bits,score\nqa,1,full,16,1\nqa,1,L4,2,1\n")
    assert main(["cliff-report", f"records={path}", f"out={run}"]) == 2
    assert "folder of a run" in _lines(capsys)[1]


def test_a_report_of_a_run_does_not_replace_anothers(run, tmp_path, capsys):
    other = tmp_path / "other"
    other.mkdir()
    (other / "protocol.yaml").write_text("{}")
    assert main(["cliff-report", f"run={run}", f"out={other}"]) == 2
    assert "folder of a run" in _lines(capsys)[1] and len(list(other.iterdir())) == 1
    (tmp_path / "same").symlink_to(run)
    assert main(["cliff-report", f"run={run}", f"out={tmp_path / 'same'}"]) == 0


def test_another_margin_leaves_the_report_of_the_fixed_one_as_it_is(run, tmp_path, capsys):
    own = tmp_path / "a[/red]"
    shutil.copytree(run, own)
    assert main(["cliff-report", f"run={own}"]) == 0
    before = (own / "report.json").read_bytes()
    assert main(["cliff-report", f"run={own}", "stats.margin=0.3"]) == 0
    assert (own / "report.json").read_bytes() == before
    assert json.loads((own / "exploratory/report.json").read_text())["margin"] == 0.3
    assert f"{own}/exploratory/report.html" in _lines(capsys)[0]


def test_whole_statistics_given_at_once_count_as_changed(run, tmp_path):
    assert main(["cliff-report", f"run={run}", f"out={tmp_path}", "stats={margin:0.2}"]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["margin"], report["preregistered"]) == (0.2, False)
    assert main(["cliff-report", f"run={run}", f"out={tmp_path}", "stats.resamples=500"]) == 0
    assert json.loads((tmp_path / "report.json").read_text())["preregistered"] is True


@pytest.mark.slow
def test_killed_at_random_moments_and_resumed_the_report_is_the_same(run, local_folder, tmp_path):
    """``kill -9`` ten times, at any moment from start-up on, then a run to the end."""
    assert main(["cliff-report", f"run={run}", f"out={tmp_path / 'undisturbed'}"]) == 0
    expected = (tmp_path / "undisturbed/report.json").read_bytes()
    broken = tmp_path / "broken"
    command = [sys.executable, "-m", "semkv_bench.cli", *_sweep(local_folder, broken)]
    rng, kills = random.Random(5), 0
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2")}
    while kills < 10:
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
        )
        before = _size(broken)
        target = rng.uniform(0, 9_000)
        while process.poll() is None and _size(broken) - before < target:
            time.sleep(0.001)
        if process.poll() is not None:
            assert process.returncode == 0
            # Done too early for ten kills: take the tail away, as a kill would have.
            file = broken / "records-0.jsonl"
            file.write_bytes(file.read_bytes()[: rng.randrange(_size(broken))])
        else:
            process.send_signal(signal.SIGKILL)
            process.wait()
        kills += 1
    subprocess.run(command, check=True, capture_output=True, env=environment)
    assert main(["cliff-report", f"run={broken}"]) == 0
    assert (broken / "report.json").read_bytes() == expected
    frame, protocol = read_run(broken)
    assert len(frame) == len(protocol["settings"]) * protocol["examples"]["count"]


def _size(folder) -> int:
    return sum(p.stat().st_size for p in folder.glob("records-*"))
