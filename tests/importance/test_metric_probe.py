"""A metric of a user's own is tried before anything is prefilled."""

import pytest

from semkv_bench.cli import main
from semkv_bench.errors import UsageError
from semkv_bench.importance.probe import probe_own_metrics

HEAD = """
import torch
from dataclasses import dataclass
from semkv_bench.importance.{family} import {base}

@dataclass(frozen=True)
class Own({base}):
    name = "own"
    {body}
"""
CACHE, CONTROL = ("key_value", "CacheMetric"), ("model_free", "ControlMetric")
NORM = "keys.float().norm(dim=-1).mean(0)"
LOT = "torch.rand(len(ids), generator=torch.Generator().manual_seed(seed))"
SOUND = {
    "a norm": (CACHE, f"score = lambda self, keys, values: {NORM}"),
    "a seeded draw": (CONTROL, f"seeded = True; score = lambda self, ids, seed: {LOT}"),
    "surprisal": (("logits", "LogitMetric"), "score = lambda self, surprisal, entropy: surprisal - entropy"),
    "hidden": (
        ("hidden", "HiddenMetric"),
        "score = lambda self, before, after: (after - before).norm(dim=-1)",
    ),
}
FAULTS = {
    "seed unsaid": (
        CONTROL,
        f"score = lambda self, ids, seed: {LOT}",
        "another seed; say so by `seeded = True`",
    ),
    "draws": (CONTROL, "score = lambda self, ids, seed: torch.rand(len(ids))", "when asked again"),
    "too few": (CACHE, f"score = lambda self, keys, values: {NORM}[1:]", r"shape \[23\] for 24 tokens"),
    "NaN": (CACHE, f"score = lambda self, keys, values: {NORM} / 0 * 0", "NaN or infinity"),
    "in place": (CACHE, f"score = lambda self, keys, values: {NORM} + keys.mul_(0).sum()", "work on a copy"),
    "parts": (
        CACHE,
        "score = lambda self, keys, values: (keys - keys.mean(1, True)).norm(dim=-1).mean(0)",
        "in parts",
    ),
    "fails": (
        CACHE,
        "score = lambda self, keys, values: keys @ values",
        "fails on plain random values: RuntimeError",
    ),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    def write(family, body):
        module = f"own_{abs(hash((family, body)))}"
        (tmp_path / "metric").mkdir()
        (tmp_path / f"{module}.py").write_text(HEAD.format(family=family[0], base=family[1], body=body))
        (tmp_path / "metric/own.yaml").write_text(f"_target_: {module}.Own\n")
        monkeypatch.setenv("SEMKV_CONF", str(tmp_path))
        monkeypatch.syspath_prepend(tmp_path)
        return tmp_path

    return write


@pytest.mark.parametrize("kind", SOUND)
def test_a_sound_metric_passes(kind, folder):
    folder(*SOUND[kind])
    probe_own_metrics(["own", "key_norm"], 16)


@pytest.mark.parametrize("kind", FAULTS)
def test_each_fault_is_named(kind, folder):
    *given, told = FAULTS[kind]
    folder(*given)
    with pytest.raises(UsageError, match=told) as refused:
        probe_own_metrics(["own"], 16)
    assert "\n" not in str(refused.value) and "metric own (Own)" in str(refused.value)


def test_a_sweep_refuses_it_before_a_run_folder_is_made(folder, local_folder, tmp_path, capsys):
    folder(*FAULTS["in place"][:2])
    mix = ["allocation=two_level", "allocation.high=16", "allocation.low=4", "allocation.metric=own"]
    model = [
        "model=custom",
        f"model.path={local_folder}",
        "per_task=1",
        "task.length=300",
        "max_new_tokens=2",
    ]
    assert main(["sweep", *model, *mix, f"out={tmp_path / 'run'}"]) == 2
    assert capsys.readouterr().err.strip().endswith("changes the values that it is given; work on a copy")
    assert not (tmp_path / "run").exists()
