"""Estimates for accelerators: what they hang on, and that they are bounds of the kind they say."""

import json
from dataclasses import replace

import pytest

from semkv_bench.cli import main
from semkv_bench.config.compose import compose_config
from semkv_bench.errors import UsageError
from semkv_bench.plan import accelerators
from semkv_bench.plan.accelerators import ACCELERATORS, Accelerator, this_cpu
from semkv_bench.plan.memory import Weights, weights_of
from semkv_bench.plan.plan import make_plan
from semkv_bench.plan.roofline import Forward, estimate_on


@pytest.fixture(scope="module")
def planned(local_folder):
    def plan(*given):
        overrides = ["model=custom", f"model.path={local_folder}", "subset=[niah_noise]", *given]
        return make_plan(compose_config("sweep", overrides))

    return plan


@pytest.fixture(scope="module")
def plan(planned):
    return planned("per_task=4", "task.length=300", "grid.levels=[16,8,4]")


def _seconds(plan, name="H100"):
    return estimate_on(plan, weights_of(plan), name)


def test_time_grows_with_examples_in_proportion(planned, plan):
    twice = planned("per_task=8", "task.length=300", "grid.levels=[16,8,4]")
    one, two = _seconds(plan).seconds, _seconds(twice).seconds
    assert two[0] == pytest.approx(2 * one[0], rel=0.02) and one[0] < one[1]


def test_settings_cost_no_prefill(planned, plan):
    wide = planned("per_task=4", "task.length=300", "grid.levels=[16,14,12,10,8,6,4]")
    one, more = _seconds(plan).stages, _seconds(wide).stages
    assert more.prefill == one.prefill
    assert more.coding == pytest.approx(one.coding * 7 / 3) and more.decoding[1] > one.decoding[1]


def test_prefill_is_arithmetic_and_decoding_is_bandwidth(plan):
    weights = weights_of(plan)
    a100, h100, h200 = (estimate_on(plan, weights, name).stages for name in ("A100", "H100", "H200"))
    assert h200.decoding[1] == pytest.approx(h100.decoding[1] * 3.35 / 4.8)
    assert h200.prefill > h100.prefill * 3.35 / 4.8
    assert a100.coding > h100.coding > h200.coding


@pytest.mark.parametrize("name", ["h100", "Mi300x", "CPU"])
def test_names_are_known_in_either_case(plan, name):
    assert estimate_on(plan, weights_of(plan), name).accelerator.name.lower() in (name.lower(), "this cpu")


def test_a_model_larger_than_the_memory_does_not_fit(plan, monkeypatch):
    huge = replace(weights_of(plan), parameters=10**11)
    assert not estimate_on(plan, huge, "H100").fits and estimate_on(plan, weights_of(plan), "H100").fits


def test_a_pass_by_hand():
    """1,000 weights of 2 bytes, 400 of them the head's; one layer. 100 operations and 50 bytes a second."""
    slow = Accelerator("slow", 200, 200, 50, 1e9, of_peak=0.5, of_bandwidth=1.0)
    forward = Forward(slow, Weights(1000, 2, hidden=8, intermediate=0, vocabulary=50), layers=1)
    passed = 32 * 8 * 2 / 50  # of each token
    # Of two rows of three tokens: products wait for arithmetic, 2 x 600 x 6 operations, and attention for 4 x 8 x 39.
    assert forward.seconds(2, 3, before=5) == pytest.approx(72 + 12.48 + 6 * passed)
    # Of one token: products wait for their 1,200 bytes, and for 2,000 where logits are asked for.
    one = forward.seconds(1, 1)
    assert one == pytest.approx(24 + 0.16 + passed)
    assert forward.seconds(1, 1, logits=1) - one == pytest.approx(16 + 50 * 4 * 8 / 50)
    assert forward.seconds(1, 1, read=50) - one == pytest.approx(1 - 0.16)
    assert forward.seconds(1, 1, calls=2) - one == pytest.approx(24)
    started = replace(forward, at=replace(slow, starting=3), layers=1)
    assert started.seconds(1, 1, calls=2) - forward.seconds(1, 1, calls=2) == pytest.approx(6)


def test_this_cpu_is_measured(monkeypatch):
    monkeypatch.setattr(accelerators, "_BEYOND_CACHES", 2**22)
    monkeypatch.setattr(accelerators, "_MEASURED", 0.01)
    cpu = this_cpu(Weights(1000, 4, 64, 128, 50), heads=2, head_dim=16, rows=3)
    assert 1e9 < cpu.peak < 1e14 and 1e8 < cpu.bandwidth < 1e13 and cpu.of_peak == 1
    assert 0 < cpu.thin <= cpu.peak and 1e8 < cpu.attending < 1e13 and 0 <= cpu.starting < 0.1


def test_the_command(local_folder, capsys):
    given = [
        "model=custom",
        f"model.path={local_folder}",
        "subset=[niah_noise]",
        "per_task=2",
        "task.length=300",
    ]
    assert main(["plan", *given, "on=[H100,MI300X]", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["estimated_on"]
    assert set(told) == {"H100", "MI300X"} and told["H100"]["least_s"] <= told["H100"]["most_s"]
    assert main(["plan", *given, "on=H100"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "on H100:" in said and "not measurements" in said
    assert main(["plan", *given]) == 0
    assert "on H100" not in capsys.readouterr().out
    assert main(["plan", *given, "on=[H99]"]) == UsageError.exit_code
    assert "choose from A100" in capsys.readouterr().err


def test_the_accelerators_are_named_as_people_name_them():
    assert list(ACCELERATORS) == ["A100", "H100", "H200", "MI300X"]
