"""The wheel holds all that the commands need: unpacked elsewhere and run from another folder, it works alone."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """Folder with nothing but the wheel's content."""
    pytest.importorskip("hatchling")
    made = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(made)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = made.glob("*.whl")
    target = tmp_path_factory.mktemp("installed")
    zipfile.ZipFile(wheel).extractall(target)
    return target


def ran(unpacked: Path, folder: Path, *command: str) -> str:
    """What a command of the unpacked wheel prints, run in ``folder``."""
    found = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(unpacked)},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_every_configuration_is_in_the_wheel(unpacked):
    shipped = unpacked / "semkv_bench" / "conf"
    ours = {p.relative_to(ROOT / "conf") for p in (ROOT / "conf").rglob("*.yaml")}
    assert {p.relative_to(shipped) for p in shipped.rglob("*.yaml")} == ours


@pytest.mark.slow
def test_sweep_and_report_of_an_unpacked_wheel(unpacked, local_folder, tmp_path):
    model = ["model=custom", f"model.path={local_folder}", "grid.levels=[4]", "max_new_tokens=2"]
    # One process, because an import of torch takes longer than the commands.
    commands = [
        ["sweep", *model, "task.length=200", "per_task=1", "out=run"],
        ["cliff-report", "run=run"],
        ["regress", "quick=true"],
    ]
    code = f"""
import semkv_bench
from semkv_bench.cli import main
print(semkv_bench.__file__)
assert [main(command) for command in {commands}] == [0, 0, 0]
"""
    told = ran(unpacked, tmp_path, "-c", code)
    assert Path(told.splitlines()[0]).is_relative_to(unpacked) and "SAME" in told
    assert json.loads((tmp_path / "run" / "report.json").read_text())["n_examples"] == 2
