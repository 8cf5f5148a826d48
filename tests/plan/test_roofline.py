"""Estimates for accelerators: what they hang on, and that they are bounds of the kind they say."""

import json

import pytest

from semkv_bench.cli import main
from semkv_bench.config.compose import compose_config
from semkv_bench.errors import UsageError
from semkv_bench.plan.memory import weights_of
from semkv_bench.plan.plan import make_plan
from semkv_bench.plan.roofline import ACCELERATORS, estimate_on, this_cpu


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
    assert a100.coding > h100.coding > h200.coding


def test_a_model_larger_than_the_memory_does_not_fit(plan, monkeypatch):
    from dataclasses import replace

    huge = replace(weights_of(plan), parameters=10**11)
    assert not estimate_on(plan, huge, "H100").fits and estimate_on(plan, weights_of(plan), "H100").fits


def test_this_cpu_is_measured():
    cpu = this_cpu()
    assert 1e9 < cpu.peak < 1e14 and 1e8 < cpu.bandwidth < 1e13 and cpu.of_peak == 1


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
