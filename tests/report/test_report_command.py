"""Reports of run folders: what was fixed beforehand, and what given afterwards makes them exploratory."""

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from semkv_bench.records.folder import RunFolder
from semkv_bench.report.command import analysed_run
from semkv_bench.stats import StatsOptions

pytestmark = pytest.mark.usefixtures("without_figures")

EXAMPLES = 240
GRID = {"full": 16.0, "L8": 3.0, "L4": 2.0, "L2": 1.0}
FIXED = StatsOptions(resamples=100)


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch):
    """Every append waits for the disk otherwise."""
    monkeypatch.setattr("os.fsync", lambda number: None)


def planted_run(path: Path, model: str = "m") -> Path:
    """A finished run of two tasks: L8 loses 1 % of the answers and wins as many, L4 and L2 lose most."""
    charter = {
        **{"model": model, "prompts": "own", "seeds": [0], "chance": {}},
        "settings": {name: {"code_bits": bits} for name, bits in GRID.items()},
        "examples": {"count": EXAMPLES},
        "stats": {name: value for name, value in asdict(FIXED).items() if name != "looks"},
    }
    folder, rng = RunFolder.open(path, charter, ""), np.random.default_rng(0)
    folder.start()
    for i in range(EXAMPLES):
        scores = {
            "full": i % 6 < 5,
            "L8": (i % 6 < 5) != (i % 100 == 7),
            "L4": rng.random() < 0.3,
            "L2": False,
        }
        common = {"task": "ab"[i % 2], "example_id": str(i), "seed": 0, "turn": 0, "quantizer": "q"}
        folder.append(
            [
                {**common, "setting": name, "kind": "full" if name == "full" else "uniform"}
                | {"code_bits": GRID[name], "effective_bits": GRID[name], "score": float(score)}
                for name, score in scores.items()
            ]
        )
    folder.close()
    return path


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param("margin", 0.05, marks=pytest.mark.slow),
        ("alpha", 0.1),
        pytest.param("average", "micro", marks=pytest.mark.slow),
        pytest.param("confidence", 0.99, marks=pytest.mark.slow),
        ("seed", 1),
        ("unpaired", "drop"),
        pytest.param("sensitivity", "run", marks=pytest.mark.slow),
        pytest.param("at_bits", (3.0,), marks=pytest.mark.slow),
    ],
)
def test_what_decides_makes_a_report_exploratory_when_given_afterwards(tmp_path, name, value):
    run = planted_run(tmp_path / "run")
    assert analysed_run(run, {}).preregistered is True
    assert analysed_run(run, {name: value}).preregistered is False
    assert analysed_run(run, {name: getattr(FIXED, name), "resamples": 200}).preregistered is True


@pytest.mark.slow
def test_examples_are_halved_by_the_hash_of_the_charter_and_by_nothing_else(tmp_path):
    run = planted_run(tmp_path / "run")
    first = analysed_run(run, {}).operating_point.confirmation
    assert (first.setting, first.clusters_to_choose, first.clusters_to_test) == ("L8", 120, 120)
    for given in ({"seed": 7}, {"resamples": 333}, {"unpaired": "drop"}):
        assert analysed_run(run, given).operating_point.confirmation == first
    others = [
        analysed_run(planted_run(tmp_path / model, model), {}).operating_point.confirmation for model in "abc"
    ]
    assert {other.setting for other in others} == {"L8"} and any(other != first for other in others)
