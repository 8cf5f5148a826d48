"""The real llama.cpp on the embedded model's GGUF file: a cliff that is there, and what the server says of itself."""

import json

import pytest

from semkv_bench.cli import main
from semkv_bench.records.folder import read_run

pytest.importorskip("xllamacpp")


@pytest.mark.slow
def test_a_run_on_llamacpp(tmp_path):
    run = tmp_path / "run"
    command = [
        *(
            "sweep",
            "engine=llamacpp",
            "model=smollm2",
            "engine.types=[f16,q8_0/q4_0,q2_0]",
            "engine.threads=1",
        ),
        *("task=synthetic", "subset=[niah_noise]", "task.length=150", "per_task=2", "seeds=[0]"),
        *("engine.noise_examples=1", "engine.teacher_tokens=2", f"out={run}"),
    ]
    assert main(command) == 0
    frame, _ = read_run(run)
    wide = frame.pivot(index="example_id", columns="setting", values="score")
    assert list(wide["full"]) == [1, 1] and list(wide["q2_0"]) == [0, 0]
    kl = frame.groupby("setting").kl.mean()
    assert kl["full"] == 0 < kl["q8_0/q4_0"] < kl["q2_0"]
    assert frame[frame.setting == "full"].alone_same_tokens.dropna().tolist() == [True]
    assert frame.groupby("setting").cache_bits.mean().to_dict() == {
        "full": 16,
        "q8_0/q4_0": 6.5,
        "q2_0": 2.25,
    }
    said = json.loads((run / "environment.json").read_text())["sessions"][-1]["servers"]
    assert said["q8_0/q4_0"]["keys"] == "q8_0" and said["q2_0"]["rotated"] is True
    assert main(command) == 0 and len(read_run(run)[0]) == len(frame)


@pytest.mark.slow
def test_without_its_rotation(tmp_path):
    run = tmp_path / "run"
    command = [
        "sweep",
        "engine=llamacpp",
        "model=smollm2",
        "engine.rotation=false",
        "engine.types=[f16,q4_0]",
    ]
    small = [
        "subset=[niah_noise]",
        "task.length=150",
        "per_task=1",
        "engine.teacher_tokens=1",
        "engine.threads=1",
    ]
    assert main([*command, *small, f"out={run}"]) == 0
    said = json.loads((run / "environment.json").read_text())["sessions"][-1]["servers"]
    assert said["q4_0"]["rotated"] is False and said["q4_0"]["build"].startswith("xllamacpp 2")
    assert said["full"]["mib"] / said["q4_0"]["mib"] == pytest.approx(16 / 4.5, rel=0.01)
