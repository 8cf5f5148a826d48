"""Sweeps that hold rows as codes, or read prompts together: the records of any sweep."""

import json

import pytest

from semkv_bench.cli import main

pytestmark = pytest.mark.slow

# Of random weights: what a settings' answer says may flip by rounding, what it costs and holds may not.
EXACT = ("example_id", "seed", "setting", "prompt_tokens", "quantized_reads", "cache_bytes", "token_layers")


def _records(folder):
    lines = [line for file in folder.glob("records-*.jsonl") for line in file.read_text().splitlines()]
    return sorted(map(json.loads, lines), key=lambda record: (record["example_id"], record["setting"]))


@pytest.fixture
def sweep(local_folder, tmp_path):
    def run(name, *given):
        command = ["sweep", "model=custom", f"model.path={local_folder}", f"out={tmp_path / name}"]
        command += [
            "subset=[niah_noise]",
            "per_task=9",
            "task.length=300",
            "grid.levels=[16,3]",
            "max_new_tokens=4",
        ]
        assert main([*command, "engine.noise_examples=2", *given]) == 0
        sessions = json.loads((tmp_path / name / "environment.json").read_text())["sessions"]
        notes = {key: value for session in sessions for key, value in session.items()}
        return _records(tmp_path / name), notes

    return run


def test_records_are_those_of_rows_one_by_one(sweep, tmp_path):
    expected, _ = sweep("rows", "engine.store=rows")
    together = ("engine.prompts=4", "stats.race=true", "stats.looks=[5]")
    for name, given in (("codes", ("engine.store=packed",)), ("together", ("engine.prompts=4",))):
        records, notes = sweep(name, *given)
        assert notes.get("stores") == (["packed"] if name == "codes" else None)
        assert ("prompts_read_together" in notes) == (name == "together")
        assert [[r[key] for key in EXACT] for r in records] == [[r[key] for key in EXACT] for r in expected]
        for record, other in zip(records, expected, strict=True):
            assert record["kl"] == pytest.approx(other["kl"], rel=0.01, abs=1e-5)
        assert sum("alone_kl" in record for record in records) == 2
    raced, _ = sweep("raced", *together)
    assert {r["example_id"] for r in raced} == {r["example_id"] for r in expected}
    # Killed behind the first examples: the same command ends what is missing, in the plan's order.
    before = _records(tmp_path / "together")
    (file,) = (tmp_path / "together").glob("records-*.jsonl")
    file.write_text("".join(file.read_text().splitlines(keepends=True)[: 3 * 2 + 1]))
    again, _ = sweep("together", "engine.prompts=4")
    key = ("example_id", "setting", "score", "prediction")
    assert [[record[k] for k in key] for record in again] == [[record[k] for k in key] for record in before]
