import importlib.util
import json
import sys
from pathlib import Path

import pytest

from semkv_bench.cli import main

ROOT = Path(__file__).resolve().parents[1]


def _script(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


faults = _script("plant_faults")
AFFINE_FAULTS = [fault for fault in faults.FAULTS if fault.quantizer == "affine"]
CODER = {"codes", "values"}
# What a fault breaks in the code; what it does to scores is measured by the script.
SEEN_BY = {
    "rounding half up": CODER | {"packed"},
    "scale (max - min)/L": CODER | {"metadata", "packed", "rows"},
    "clamp one too low": CODER | {"packed", "rows"},
    "keys and values swapped": {"rows"},
    "one layer left unquantized": {"rows"},
    "levels one too many": CODER | {"metadata", "packed", "rows"},
    "clamp one too high": CODER,
    "states of keys and values swapped": {"rows"},
    "one layer taken for unquantized": {"rows"},
    "levels one too few in the settings": {"rows", "storage"},
    "zeros not counted as stored": {"storage"},
    "digits packed in reverse": {"packed"},
}

# Enough settings for a cliff of five points, few enough tokens for a test.
QUICK = ["task.length=300", "per_task=6", "max_new_tokens=3", "judge.min_examples=6"]
GRID = ["grid.levels=[16,6,3,16]", "grid.key_levels=[16,6,3,16]", "grid.value_levels=[16,6,3,8]"]


def _regress(folder, *more: str) -> list[str]:
    return ["regress", "model=custom", f"model.path={folder}", *QUICK, *GRID, *more]


@pytest.fixture(scope="module")
def place(tmp_path_factory, local_folder):
    """A baseline of the small random model, and the run that it was made of."""
    place = tmp_path_factory.mktemp("regress")
    files = [f"baseline={place / 'baseline.json'}", f"out={place / 'run'}"]
    assert main(_regress(local_folder, *files, "--update")) == 0
    return place


def test_an_unchanged_tree_is_the_same(place, local_folder, tmp_path, capsys):
    files = [f"baseline={place / 'baseline.json'}", f"out={tmp_path}"]
    assert main(_regress(local_folder, *files)) == 0
    out = capsys.readouterr().out
    assert "SAME: affine on" in out and "every record is alike on 12 examples" in out
    content = json.loads((tmp_path / "regress.json").read_text())
    assert (content["status"], content["exit_code"], content["findings"]) == ("same", 0, [])


def _quick(place, local_folder, *more: str) -> list[str]:
    return _regress(local_folder, f"baseline={place / 'baseline.json'}", "quick=true", *more)


def test_code_alone_is_compared_in_seconds(place, local_folder, capsys):
    assert main(_quick(place, local_folder)) == 0
    assert "code and storage only" in capsys.readouterr().out


@pytest.mark.parametrize("fault", AFFINE_FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_turns_it_red(fault, place, local_folder, tmp_path, capsys):
    with faults.planted(fault):
        assert main(_quick(place, local_folder, f"out={tmp_path}")) == 1
    content = json.loads((tmp_path / "regress.json").read_text())
    assert {finding["witness"] for finding in content["findings"]} == SEEN_BY[fault.name]
