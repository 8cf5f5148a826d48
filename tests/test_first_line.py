"""What a command has imported when it says its first line: nothing that it does not need, and torch least of all."""

import json
import os
import subprocess
import sys

import pytest
from thinned import thinned

HEAVY = {"torch", "transformers", "pandas", "scipy", "statsmodels", "matplotlib", "datasets", "accelerate"}
# Writes what is imported at the first character that goes to stdout or stderr, and ends there.
_UNTIL_FIRST_LINE = """
import json, os, sys
class Watched:
    encoding = "utf-8"
    def __init__(self, descriptor): self.descriptor = descriptor
    def isatty(self): return bool(os.environ.get("TERMINAL"))
    def fileno(self): return self.descriptor
    def flush(self): pass
    def write(self, text):
        if text.strip("\\x1b[?25l \\n"):
            os.write(1, json.dumps({"line": text, "modules": sorted(sys.modules)}).encode())
            os._exit(0)
sys.stdout, sys.stderr = Watched(1), Watched(2)
from semkv_bench.__main__ import main
sys.argv = ["semkv-bench", *sys.argv[1:]]
main()
"""


def _first_line(arguments, folder, terminal=False):
    """The first line of a command, and what of ``HEAVY`` was imported by then."""
    env = {**os.environ, "HF_HUB_CACHE": str(folder), "TERM": "xterm", "TERMINAL": "1" if terminal else ""}
    ran = subprocess.run(
        [sys.executable, "-c", _UNTIL_FIRST_LINE, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder,
        env=env,
    )
    assert ran.stdout.startswith("{"), ran.stderr
    told = json.loads(ran.stdout)
    return told["line"], HEAVY & set(told["modules"])


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    ("command", "line"),
    [
        ([], "semkv-bench measures"),
        (["--version"], "semkv-bench 0."),
        (["storage"], "bits per value"),
        pytest.param(
            ["storage", "tokens=1000", "grid.levels=[6,5]"], "bits per value", marks=pytest.mark.slow
        ),
        pytest.param(["storage", "--json", "quantizer.group_size=32"], "[", marks=pytest.mark.slow),
        pytest.param(["storage", "quantizer=turboquant"], "bits per value", marks=pytest.mark.slow),
        pytest.param(
            ["storage", "quantizer=kvquant", "tokens=1000"], "bits per value", marks=pytest.mark.slow
        ),
        (["storage", "allocation=two_level", "allocation.metric=surprisal"], "bits per value"),
        pytest.param(
            ["storage", "allocation=evict", "allocation.score=[snapkv,h2o]"],
            "bits per value",
            marks=pytest.mark.slow,
        ),
        (["models"], "models"),
        pytest.param(["models", "--json"], "[", marks=pytest.mark.slow),
        (["doctor"], "ok"),
        (["completion", "bash"], "#"),
        (["sweep", "--help"], "semkv-bench sweep"),
        (["sweep", "--cfg", "job"], "model:"),
        (["sweep", "nope=1"], "there is no key 'nope'"),
        pytest.param(["plan", "task=nope"], "there is no task 'nope'", marks=pytest.mark.slow),
        pytest.param(["recipe", "grid=nope"], "there is no grid 'nope'", marks=pytest.mark.slow),
        pytest.param(["regress", "nope=1"], "there is no key 'nope'", marks=pytest.mark.slow),
        (["measure", "run=nope"], "nope does not exist"),
        (["regress", "run=nope"], "nope does not exist"),
        pytest.param(["compare", "runs=[nope,nope]"], "nope does not exist", marks=pytest.mark.slow),
        pytest.param(["atlas", "runs=[nope]"], "nope does not exist", marks=pytest.mark.slow),
        pytest.param(
            ["export", "nope=1", "out=prompts.jsonl"], "there is no key 'nope'", marks=pytest.mark.slow
        ),
        (["cliff-report", "run=nope"], "nope does not exist"),
        pytest.param(
            ["show", "run=nope", "setting=affine-L4"], "nope does not exist", marks=pytest.mark.slow
        ),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_no_command_waits_for_libraries_that_its_first_line_does_not_need(command, line, tmp_path):
    said, imported = _first_line(command, tmp_path)
    assert line in said and not imported


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "command",
    thinned(
        [
            "sweep",
            "recipe",
            "search",
            "regress",
            "plan",
            "measure",
            "export out=p.jsonl",
            "storage model=smollm2",
        ],
        "sweep",
        "storage model=smollm2",
    ),
)
@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipe"])
def test_what_needs_torch_says_that_it_loads_it(command, terminal, tmp_path):
    said, imported = _first_line(command.split(), tmp_path, terminal)
    assert "loading torch" in said and not imported


def test_a_library_that_was_imported_is_seen(tmp_path):
    (tmp_path / "scores.csv").write_text("task,example_id,setting,code_bits,score\nqa,1,full,16,1.5\n")
    said, imported = _first_line(["cliff-report", "records=scores.csv"], tmp_path)
    assert "score" in said and "pandas" in imported
