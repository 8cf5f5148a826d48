"""Every command and Python block of README.md and docs/ is checked as it is written and run at a small scale."""

import itertools
import json
import re
import shutil
import tomllib
from collections.abc import Iterator
from functools import cache, partial

import pytest
from guides import PAGES, ROOT, blocks, commands, shown_files, write_files
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from semkv_bench.cli import main
from semkv_bench.config.choices import choices, conf_dir, search_path
from semkv_bench.config.compose import build, check_sweeps, compose_config
from semkv_bench.config.overrides import as_overrides
from semkv_bench.config.own import joined
from semkv_bench.errors import MissingError
from semkv_bench.importers import FORMATS, split_arguments
from semkv_bench.plan.settings import planned_settings
from semkv_bench.stats.options import stats_options
from semkv_bench.sweep.launchers import LAUNCHER_PACKAGES, launcher_of

CONFIGS = {"cliff-report": "cliff_report", "plan": "sweep", "export": "sweep", "score": "sweep"}
RUNS_SWEEPS = ("sweep", "plan", "recipe", "regress")
# A random model has no cliff to be found, which a recipe reports with exit code 1.
EXPECTED = {"recipe": (1, "no cliff|insensitive|cliff")}
# Not run: what it would take, and who runs it instead. Their overrides are composed all the same.
NOT_RUN = {
    "compare": "takes two runs of different methods; tests/report/test_report_methods.py makes and compares them",
    "export": "tests/sweep/test_exchange.py writes prompts and scores answers",
    "score": "tests/sweep/test_exchange.py writes prompts and scores answers",
    "regress": "minutes against a committed baseline; tests/regress/test_regress.py runs it on a small model",
    "calibrate": "tests/sweep/test_calibrate.py fits every method to a small model",
    "search": "two sweeps of many settings; tests/search/test_search.py runs it on a small model",
    "atlas": "takes folders of several runs; tests/report/test_atlas.py makes one of them",
    "doctor": "examines the machine that it runs on; tests/doctor/test_doctor.py runs it",
}
SKIPPED = re.compile(r"\.\.\.|COMMAND|key=value")


def _documented() -> list[tuple[str, list[str]]]:
    found = {}
    for page in PAGES:
        for command in commands(page):
            if not SKIPPED.search(" ".join(command)):
                found.setdefault(tuple(command), page.name)
    return [(page, list(command)) for command, page in found.items()]


DOCUMENTED = _documented()


def _named(command: list[str]) -> str:
    return " ".join(command)[:90]


def _split(command: list[str]) -> tuple[str, list[str], list[str], list[str]]:
    """Name, overrides, options, and the folders of --conf."""
    name, *rest = command
    folders = [b for a, b in itertools.pairwise(rest) if a == "--conf"]
    rest = [a for a in rest if a not in folders]
    return name, [a for a in rest if not a.startswith("-")], [a for a in rest if a.startswith("-")], folders


def _value(overrides: list[str], key: str) -> str | None:
    return next((o.partition("=")[2] for o in overrides if o.partition("=")[0] == key), None)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A working folder with the files that the pages show, and a folder in LongBench's layout."""
    folder = tmp_path_factory.mktemp("documented")
    for page in PAGES:
        write_files(page, folder)
    shutil.copytree(ROOT / "docs" / "examples", folder / "docs" / "examples")
    (folder / "book.txt").write_text("Every ship that came in with the tide was written down. " * 40)
    (folder / "longbench").mkdir()
    for task in ("hotpotqa", "qasper"):
        rows = [
            {
                "input": f"Which colour has lamp {i}?",
                "context": f"Lamp {i} is red. " * 30,
                "answers": ["red"],
                "length": 90,
                "dataset": task,
                "language": "en",
                "all_classes": None,
                "_id": f"{task}-{i}",
            }
            for i in range(2)
        ]
        (folder / "longbench" / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def tiny_run(place, local_folder):
    """A finished run of the small random model."""
    out = place / "finished"
    assert main(_cheap(["sweep", f"out={out}", "grid.levels=[4,2]"], local_folder, None)) == 0
    return out


@pytest.fixture
def here(place, monkeypatch):
    """The working folder, and the hub out of reach."""
    monkeypatch.chdir(place)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return place


def _cheap(command: list[str], model, run) -> list[str]:
    """The same command on the small random model, with few examples and short prompts."""
    name, overrides, options, folders = _split(command)
    options = [part for folder in folders for part in ("--conf", folder)] + [
        o for o in options if o != "--conf"
    ]
    if name == "cliff-report":
        kept = [f"run={run}" if o.startswith("run=") else o for o in overrides]
        kept = [f"runs=[{run}]" if o.startswith("runs=") else o for o in kept]
        kept += [] if {"run", "runs", "records"} & {o.partition("=")[0] for o in kept} else [f"run={run}"]
        return [name, *options, *kept, "stats.resamples=200"]
    if name == "show":
        kept = [o for o in overrides if not o.startswith("run=")]
        return [name, f"run={run}", *(kept or ["setting=affine-L4"])]
    if name == "badge":
        return [name, *options, f"run={run}"]
    if name == "measure":
        return [name, *options, f"run={run}", "setting=affine-L4", "examples=1"]
    if name in ("storage", "models"):
        named = any(o.startswith("model=") for o in overrides)
        kept = [o for o in overrides if not o.startswith("model")]
        return [name, *options, *kept, *(["model=custom", f"model.path={model}"] if named else [])]
    dropped = (
        "model",
        "hydra",
        "seeds",
        "per_task",
        "task.length",
        "max_prompt_tokens",
        "subset",
        "task.path",
    )
    own_items = _value(overrides, "task") not in (None, *_shipped_tasks())
    kept = [o for o in overrides if not o.startswith(dropped) or (own_items and o.startswith("task.path="))]
    kept += [
        "model=custom",
        f"model.path={model}",
        "seeds=[0]",
        "per_task=1",
        "engine.noise_examples=0",
        "engine.teacher_tokens=2",
    ]
    kept += _short_prompts(overrides)
    # Heads of the small random model are smaller than the groups of most methods.
    kept = ["methods=[affine,turboquant]" if o.startswith("methods=") else o for o in kept]
    kept = [o for o in kept if not o.startswith("method.")]
    if "quantizer=turned_kivi" in kept:
        kept += ["quantizer.values.group.channels=16"]
    if name == "recipe":
        kept += ["per_task=4", "stats.resamples=200"]
    return [name, *options, *kept]


@cache
def _shipped_tasks() -> list[str]:
    return choices("sweep")["task"]


def _short_prompts(overrides: list[str]) -> list[str]:
    task = _task_of(overrides)
    if task.startswith("longbench"):
        return [
            "task.path=longbench",
            "prompts=own",
            "subset=[hotpotqa]",
            "max_prompt_tokens=150",
            "max_new_tokens=3",
        ]
    short = {
        "synthetic": ["subset=[niah_noise]", "task.length=200", "max_new_tokens=3"],
        "ruler": ["subset=[niah_single_1]", "task.length=300", "max_new_tokens=3"],
        "synthetic_multiturn": [
            "subset=[multiturn_noise]",
            "task.length=300",
            "task.turns=2",
            "max_new_tokens=3",
        ],
        "text": ["task.path=book.txt", "task.length=40"],
        "longform": ["subset=[longform_count]", "max_new_tokens=40"],
    }
    return short.get(task, ["max_new_tokens=3"])


def _task_of(overrides: list[str]) -> str:
    """The task that the overrides and their experiment choose."""
    return _value(overrides, "task") or _task_of_experiment(_value(overrides, "experiment"))


@cache
def _task_of_experiment(experiment: str | None) -> str:
    """The task of an experiment; of the defaults where there is none. The cases are made in every process."""
    composed = compose_config("sweep", [] if experiment is None else [f"experiment={experiment}"])
    names = {"LongBench": "longbench", "SyntheticMultiturn": "synthetic_multiturn"}
    kind = composed.task["_target_"].rpartition(".")[2]
    return names.get(kind, kind.lower())


def _written() -> Iterator:
    """Every documented command; all but the first of each name are slow."""
    seen = set()
    for page, command in DOCUMENTED:
        often = command[0] not in seen
        seen.add(command[0])
        yield pytest.param(page, command, marks=[] if often else [pytest.mark.slow], id=_named(command))


@pytest.mark.parametrize(("page", "command"), _written())
def test_as_it_is_written(page, command, here):
    """Every choice, key and value exists, and the settings that they name can be built."""
    name, overrides, options, folders = _split(command)
    if (
        name in ("models", "doctor", "show", "atlas", "badge")
        or not overrides
        or set(options) & {"-h", "--help"}
    ):
        return
    if name == "score":
        overrides = [o for o in overrides if "=" in o]
    if name == "plan":
        overrides = [o for o in overrides if not o.startswith("on=")]
    if any(o.startswith("import=") for o in overrides):
        kind, logs, _, overrides = split_arguments(overrides, ("stats", "out"))
        assert kind in FORMATS and logs[0].name == "full"
    overrides = [
        f"records_{o}" if name == "cliff-report" and o.startswith("model=") else o for o in overrides
    ]
    launching = [o for o in overrides if o.startswith("hydra")]
    overrides = [o for o in overrides if o not in launching]
    with joined(folders):
        if {"-m", "--multirun"} & set(options):
            configs = check_sweeps("sweep", overrides)
            assert len(configs) > 1
        else:
            config_name = CONFIGS.get(name, name)
            configs = [compose_config(config_name, as_overrides(overrides, config_name))]
        for config in configs if name != "measure" else ():
            assert stats_options(config) if name in ("cliff-report", "compare") else _settings(config)
        if launching:
            _check_launcher(launching)


def _settings(config):
    """What is compared; of an engine that simulates nothing, its own; what is fitted."""
    if "sequences" in config:
        fitted = build(config.quantizer, "quantizer")
        return fitted.keys.calibrated or fitted.values.calibrated
    if "engine" not in config:
        return planned_settings(config)
    return build(config.engine, "engine").settings(partial(planned_settings, config))


def _served(command: list[str]) -> bool:
    """Is it a server that answers? tests/engine/served runs llama.cpp, and a server that lies."""
    return (_value(command, "engine") or "transformers") != "transformers" or bool(_value(command, "import"))


def _check_launcher(overrides: list[str]) -> None:
    """The launcher is known, and where it is installed so are its keys."""
    assert _value(overrides, "hydra/launcher") in LAUNCHER_PACKAGES
    try:
        launcher_of(overrides)
    except MissingError:
        return
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        composed = compose("sweep", overrides=[*overrides, *search_path()], return_hydra_config=True)
    assert composed.hydra.launcher._target_


def _cases() -> list:
    """The commands to run, those that come to the same only once."""
    cases, seen = [], set()
    for page, command in DOCUMENTED:
        if _value(command, "experiment") and all(
            o.startswith(("experiment=", "model=")) for o in command[1:]
        ):
            # tests/sweep/test_experiments.py runs every experiment.
            continue
        cheap = tuple(sorted(o for o in _cheap(command, "M", "R") if not o.startswith("out=")))
        if command[0] not in NOT_RUN and not _served(command) and cheap not in seen:
            seen.add(cheap)
            cases.append(pytest.param(page, command, id=_named(command)))
    return cases


@pytest.mark.slow
@pytest.mark.parametrize(("page", "command"), _cases())
def test_at_a_small_scale(page, command, here, tiny_run, local_folder, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("SEMKV_CACHE", str(tmp_path / "cache"))
    for name in ("mine", "longbench", "scores.csv", "book.txt", "docs"):
        (tmp_path / name).symlink_to(here / name)
    monkeypatch.chdir(tmp_path)
    code, told = EXPECTED.get(command[0], (0, ""))
    if "--help" in command:
        code, told = 0, ""
    assert main(_cheap(command, local_folder, tiny_run)) == code, capsys.readouterr().err
    assert re.search(told, capsys.readouterr().err)


def test_all_kinds_of_commands_are_documented():
    from semkv_bench.commands import COMMANDS

    assert {command[0] for _, command in DOCUMENTED} <= set(COMMANDS)
    assert {"sweep", "cliff-report", "recipe", "storage", "plan"} <= {c[0] for _, c in DOCUMENTED}
    assert len(DOCUMENTED) > 40


def test_lines_of_other_programs():
    """``make`` names targets that exist, ``pip install .[EXTRA]`` extras that exist; nothing else is told to be run."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for page in PAGES:
        for target in re.findall(r"^make (\w+)", page.read_text(), re.MULTILINE):
            assert target in targets, f"{page.name}: make {target}"
        for extra in re.findall(r'"\.\[([\w,]+)\]"', page.read_text()):
            assert set(extra.split(",")) <= set(extras), f"{page.name}: {extra}"


def _python_blocks() -> list:
    shown = {text for page in PAGES for text in shown_files(page).values()}
    found = [block for page in PAGES for block in blocks(page) if block.language == "python"]
    return [pytest.param(b, id=f"{b.page}-{i}") for i, b in enumerate(found) if b.text not in shown]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("block", _python_blocks())
def test_python_blocks_run(block, here, local_folder, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(local_folder)
    tokenizer = AutoTokenizer.from_pretrained(local_folder)
    inputs = tokenizer("One two three four five six.", return_tensors="pt")
    code = re.sub(r'"[\w-]+/Llama-3.1-8B-Instruct"', repr(str(local_folder)), block.text)
    code = re.sub(r"per_task=\d+", "per_task=1", code)
    names = {"model": model, "tokenizer": tokenizer, "inputs": inputs}
    exec(compile(code, block.page, "exec"), names)
    if "cache" in names:
        assert names["cache"].nbytes.packed > 0
        assert names["output"].shape[1] > names["inputs"]["input_ids"].shape[1]


def test_quoted_lines_of_reports_stand_in_the_reports():
    text = (ROOT / "docs/tutorial.md").read_text()
    reports = [
        (ROOT / f"results/small/recipe/{name}").read_text().replace("\\[", "[")
        for name in ("uniform/report.md", "recipe.md")
    ]
    quoted = [
        line
        for block in blocks(ROOT / "docs/tutorial.md")
        if block.language == "text"
        for line in block.text.splitlines()
    ]
    assert len(quoted) >= 5 and "results/small/recipe/uniform/report.md" in text
    for line in quoted:
        assert any(line in report for report in reports), line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_named_files_exist(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / target).exists(), target
    for named in re.findall(
        r"`((?:conf|semkv_bench|tests|scripts|benchmarks|results/(?:small|benchmarks))/[\w./-]*)`", text
    ):
        assert (ROOT / named).exists(), named


def test_every_experiment_is_in_the_table_of_the_paper():
    text = (ROOT / "docs/paper.md").read_text()
    for folder in ("paper", "small"):
        for path in (ROOT / "conf/experiment" / folder).glob("*.yaml"):
            assert f"experiment={folder}/{path.stem}" in text
