import json
from types import SimpleNamespace

import pytest
import torch

from semkv_bench.cli import main
from semkv_bench.config.shard import Shard
from semkv_bench.engine.options import EngineOptions
from semkv_bench.models.load import PretrainedModel
from semkv_bench.models.shape import ModelShape
from semkv_bench.plan import memory, timing
from semkv_bench.plan.memory import Weights, estimate_memory, weights_of
from semkv_bench.plan.plan import Plan
from semkv_bench.plan.timing import Calibration, estimate_time
from semkv_bench.protocols import Prefill
from semkv_bench.quantizers import Affine
from semkv_bench.settings.sets import uniform_settings
from semkv_bench.settings.setting import FULL
from semkv_bench.tasks import Example

# 64 bytes of cache a token; a row of 100 + 20 + 1 tokens, allocated as 256, and 8 bytes for each of 4 x 50 logits:
# 17,984 bytes.
SHAPE = ModelShape.alike(2, 1, 8)
WEIGHTS = Weights(parameters=1000, itemsize=2, hidden=8, intermediate=16, vocabulary=50)
MEASURED = Calibration("m", 1000, "bfloat16", "here", 100, 3, 0.01, 0.001, 0.1, 0.02, "2000-01-01")


def _plan(examples=None, shard=None, **engine) -> Plan:
    examples = examples or (Example("t", "0", 0, tuple(range(100)), ("x",), 20),)
    return Plan(
        source=PretrainedModel("org/m", label="m", device_map="cpu"),
        shape=SHAPE,
        settings=(FULL, *uniform_settings(Affine(), Affine(), [4, 2])),
        task=None,
        examples=examples,
        protocol=Prefill(),
        engine=EngineOptions(teacher_tokens=4, **engine),
        charter={},
        shard=shard,
    )


def _memory(monkeypatch, available: int, **engine):
    monkeypatch.setattr(memory, "memory_total", lambda device: available)
    monkeypatch.setattr(PretrainedModel, "config", lambda self: _config("llama"))
    return estimate_memory(_plan(**engine), WEIGHTS)


def _config(kind: str) -> SimpleNamespace:
    config = SimpleNamespace(model_type=kind)
    config.get_text_config = lambda decoder: config
    return config


def test_memory_by_hand(monkeypatch):
    found = _memory(monkeypatch, 1_000_000)
    assert (found.weights, found.prompt, found.rows, found.activations) == (2000, 6400, 3 * 17_984, 19_200)
    assert found.needed == 81_552 and found.fits and found.advice is None and found.batch_rows == 3
    # In chunks: a tenth, and a mask of 10 x 100 truth values and as many numbers of two bytes.
    assert _memory(monkeypatch, 1_000_000, prefill_chunk=10).activations == 1920 + 3000
    assert _memory(monkeypatch, 1_000_000, prefill_chunk=None).activations == 19_200
    assert _memory(monkeypatch, 1_000_000, max_rows=2).batch_rows == 2
    assert _memory(monkeypatch, 80_000).batch_rows == 2 and _memory(monkeypatch, 80_000).fits


def test_a_gpu_reads_long_prompts_in_chunks(monkeypatch):
    monkeypatch.setattr(memory, "target_device", lambda device_map: torch.device("cuda"))
    plan, config = _plan(), _config("llama")
    monkeypatch.setattr(PretrainedModel, "config", lambda self: config)
    activations = [memory._activations(plan, WEIGHTS, tokens) for tokens in (2048, 2049, 100_000)]
    assert activations == [2048 * 192, 2048 * (192 + 3 * 2049), 2048 * (192 + 300_000)]
    config.model_type = "jamba"
    assert memory._activations(plan, WEIGHTS, 100_000) == 100_000 * 192


def test_the_store_is_told_and_is_the_engines(monkeypatch):
    """A prompt of 2,000 tokens: 132,672 bytes a row, 131,496 packed at four levels."""
    long = (Example("t", "0", 0, tuple(range(2000)), ("x",), 20),)

    def found(available, **engine):
        monkeypatch.setattr(memory, "memory_total", lambda device: available)
        monkeypatch.setattr(PretrainedModel, "config", lambda self: _config("llama"))
        return estimate_memory(_plan(long, memory_fraction=0.5, **engine), WEIGHTS)

    scarce = found(264_000)
    assert (scarce.store, scarce.batches, scarce.batch_rows) == ("packed", 3, 1) and scarce.rows == 131_496
    assert found(264_000, store="rows").store == "rows" and found(10**6).store == "rows"
    assert found(10**6, store="packed").rows < found(10**6).rows


@pytest.mark.parametrize(
    ("available", "advice"),
    [
        (50_000, "engine.max_rows=1 would fit"),
        (40_000, "max_prompt_tokens=78 with engine.max_rows=1 would fit"),
        (1_999, "the weights alone take"),
    ],
)
def test_what_would_fit(monkeypatch, available, advice):
    found = _memory(monkeypatch, available, memory_fraction=1.0)
    assert not found.fits and advice in found.advice


def test_the_advice_is_true(monkeypatch):
    assert _memory(monkeypatch, 50_000, max_rows=1).fits
    monkeypatch.setattr(memory, "memory_total", lambda device: 40_000)
    for tokens, fits in ((78, True), (79, False)):
        shorter = _plan((Example("t", "0", 0, tuple(range(tokens)), ("x",), 20),), max_rows=1)
        assert estimate_memory(shorter, WEIGHTS).fits is fits


def test_weights_are_counted_in_their_own_type(local_folder):
    source = PretrainedModel(str(local_folder), device_map="cpu")
    parameters = sum(p.numel() for p in source.load().model.parameters())
    found = weights_of(SimpleNamespace(source=source))
    assert (found.parameters, found.itemsize) == (parameters, 4)
    halved = weights_of(SimpleNamespace(source=PretrainedModel(str(local_folder), dtype="bfloat16")))
    assert (halved.parameters, halved.itemsize) == (parameters, 2)


@pytest.fixture
def calibrated(tmp_path, monkeypatch):
    """One stored measurement, of the machine called ``here``."""
    monkeypatch.setenv("SEMKV_CACHE", str(tmp_path))
    monkeypatch.setattr(timing, "machine", lambda device: "here")
    timing._store(MEASURED)
    return tmp_path


def test_time_by_hand(calibrated):
    # 100 tokens: 1 s of prefill, 0.2 s of coding for two more rows; a step of three rows takes 0.14 s;
    # the example is among those decoded alone too, at 0.1 s a step.
    found = estimate_time(_plan(), WEIGHTS, batch_rows=3)
    assert found.least == pytest.approx(1.2 + 0.14 + 0.1)
    assert found.most == pytest.approx(1.2 + 20 * 0.14 + 20 * 0.1)
    split = estimate_time(_plan(), WEIGHTS, batch_rows=2)
    assert split.most - found.most == pytest.approx(20 * (0.1 - 0.02))


def test_another_model_is_scaled_by_its_size_and_says_so(calibrated):
    timing._store(Calibration(**{**MEASURED.__dict__, "model": "big", "parameters": 100_000, "prefill": 9.0}))
    own = estimate_time(_plan(), WEIGHTS, 3)
    assert "scaled" not in own.basis
    other = Plan(**{**_plan().__dict__, "source": PretrainedModel("org/n", device_map="cpu")})
    double = estimate_time(other, Weights(2000, 2, 8, 16, 50), 3)
    assert double.most == pytest.approx(2 * own.most) and "scaled by 2" in double.basis


@pytest.mark.parametrize(("parameters", "known"), [(3000, True), (3001, False), (334, True), (333, False)])
def test_a_model_of_another_size_altogether_is_not_guessed_at(parameters, known, calibrated):
    other = Plan(**{**_plan().__dict__, "source": PretrainedModel("org/n", device_map="cpu")})
    found = estimate_time(other, Weights(parameters, 2, 8, 16, 50), 3)
    assert (found is not None) == known
    assert estimate_time(_plan(), Weights(parameters, 2, 8, 16, 50), 3) is not None


def test_a_shard_and_copied_repeats_cost_less(calibrated):
    same = [Example("t", "0", seed, tuple(range(100)), ("x",), 20) for seed in range(3)]
    once = estimate_time(_plan(tuple(same[:1]), noise_examples=0), WEIGHTS, 3)
    assert estimate_time(_plan(tuple(same), noise_examples=0), WEIGHTS, 3).most == pytest.approx(once.most)
    four = tuple(Example("t", str(i), 0, tuple(range(100)), ("x",), 20) for i in range(4))
    half = estimate_time(_plan(four, shard=Shard(1, 2), noise_examples=0), WEIGHTS, 3)
    assert half.most == pytest.approx(2 * once.most)


def test_no_calibration_of_this_machine_no_estimate(calibrated, monkeypatch):
    monkeypatch.setattr(timing, "machine", lambda device: "elsewhere")
    assert estimate_time(_plan(), WEIGHTS, 3) is None
    (calibrated / "calibration.json").write_text("{torn")
    assert timing.stored_calibrations() == []


def test_plan_measures_once_and_then_knows(local_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SEMKV_CACHE", str(tmp_path))
    command = ["plan", "model=custom", f"model.path={local_folder}", "per_task=1", "task.length=300"]
    command += ["grid.levels=[4]", "subset=[niah_noise]"]
    assert main(command) == 0
    assert "--calibrate" in capsys.readouterr().out
    assert main([*command, "--calibrate", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert 0 < first["time"]["least_s"] <= first["time"]["most_s"]
    (entry,) = json.loads((tmp_path / "calibration.json").read_text())
    assert entry["rows"] == 2 and entry["dtype"] == "float32" and entry["prefill"] > 0
    monkeypatch.setattr(torch.nn.Module, "forward", None)
    assert main([*command, "--json", "shard=1/1"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["time"] == first["time"] and again["memory"]["fits"] is True
    assert again["shard"] == {"shard": "1/1", "examples": 1}
    assert again["answer_tokens_at_most"] == 2 * again["tasks"]["niah_noise"]["answer_limit"]
