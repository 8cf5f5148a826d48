"""An allocation of the user's own: one module and one choice, from ``storage`` to records and report."""

import json
import sys

import pytest

from semkv_bench.cli import main
from semkv_bench.records.folder import read_run

STEPS = '''
from dataclasses import dataclass

import torch

from semkv_bench.grid.levels import mix
from semkv_bench.settings import Allocation, Setting
from semkv_bench.settings.setting import Coded


@dataclass(frozen=True)
class Steps(Allocation):
    """The most important eighth of the tokens at 16 levels, the next at 6, the rest at 3."""

    kind = "mixed"
    metric: str = "key_norm"

    @property
    def label(self):
        return f"steps:{self.metric}"

    def parts(self, tokens):
        eighth = tokens // 8
        return [(16, eighth), (6, eighth), (3, tokens - 2 * eighth)]

    def levels(self, tokens, importance=None):
        counts = [level for level, count in self.parts(tokens) for _ in range(count)]
        found = torch.empty(tokens, dtype=torch.int64)
        found[importance.argsort(descending=True, stable=True)] = torch.tensor(counts)
        return found

    def storage(self, quantizer, head_dim, heads=1):
        return mix([(share, quantizer.storage(level, head_dim, heads)) for level, share in self.parts(8)])


@dataclass(frozen=True)
class InSteps:
    metric: str

    def settings(self, keys, values):
        way = Steps(self.metric)
        name = f"{keys.name}-{way.label}"
        return [Setting(name, way.kind, keys.name, Coded(keys, way), Coded(values, way))]
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The folder with the two files, and nothing else."""
    (tmp_path / "mine/allocation").mkdir(parents=True)
    (tmp_path / "mine/own_steps.py").write_text(STEPS)
    (tmp_path / "mine/allocation/steps.yaml").write_text(
        "_target_: own_steps.InSteps\nmetric: key_norm  # importance metric\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("own_steps", None)


def test_an_allocation_is_two_files(own, local_folder, capsys):
    files = [path for path in (own / "mine").rglob("*") if path.is_file()]
    assert len(files) == 2
    assert main(["storage", "--conf", "mine", "allocation=steps", "head_dim=64", "--json"]) == 0
    # Packed bits of 16, 6 and 3 levels are 4, 13/5 and 8/5, and two float16 serve 64 values.
    assert json.loads(capsys.readouterr().out)["effective_bits"] == pytest.approx(
        4 / 8 + 2.6 / 8 + 1.6 * 6 / 8 + 0.5
    )
    sweep = [
        "sweep",
        "--conf",
        "mine",
        f"model={local_folder}",
        "out=run",
        "allocation=steps",
        "grid.levels=[16,3]",
    ]
    small = [
        "per_task=1",
        "subset=[niah_noise]",
        "task.length=200",
        "max_new_tokens=2",
        "engine.noise_examples=0",
    ]
    assert main([*sweep, *small]) == 0, capsys.readouterr().err
    frame, charter = read_run(own / "run")
    kl = frame.set_index("setting").kl
    assert 0 < kl["affine-L16"] < kl["affine-steps:key_norm"] < kl["affine-L3"]
    assert list(charter["own_code"]) == ["own_steps.Steps"]
