"""A run knows its model: other weights or another way to generate are not mixed into it."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from semkv_bench.cli import main
from semkv_bench.records.folder import read_run, read_sessions
from semkv_bench.records.prompts import answers_hash, read_prompts

QUICK = ["per_task=1", "task.length=300", "max_new_tokens=3", "grid.levels=[16,4]", "stats.margin=0.3"]


@pytest.fixture(scope="module")
def finished(local_folder, tmp_path_factory):
    """A model's folder and the folder of a finished run of it."""
    place = tmp_path_factory.mktemp("identity")
    shutil.copytree(local_folder, place / "model")
    assert (
        main(["sweep", "model=custom", f"model.path={place / 'model'}", *QUICK, f"out={place / 'run'}"]) == 0
    )
    return place / "model", place / "run"


@pytest.fixture
def copied(finished, tmp_path):
    for folder in finished:
        shutil.copytree(folder, tmp_path / folder.name)
    return tmp_path / "model", tmp_path / "run"


def _again(model, run) -> int:
    return main(["sweep", "model=custom", f"model.path={model}", *QUICK, f"out={run}"])


def _other_weights(model) -> None:
    changed = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        changed.lm_head.weight[5, 5] += 1
    changed.save_pretrained(model)


def _other_end(model) -> None:
    path = model / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [2, 5]}))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_other_weights, "weights.sha256: "),
        (_other_end, "generation_config.eos_token_id: 2 there, [2, 5] here"),
    ],
)
def test_what_was_replaced_under_the_same_path_is_refused_and_named(copied, capsys, change, told):
    model, run = copied
    before = (run / "records-0.jsonl").read_bytes()
    change(model)
    assert _again(model, run) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "holds a run of another protocol (different: " in error and told in error
    assert (run / "records-0.jsonl").read_bytes() == before


@pytest.mark.parametrize(("name", "value"), [("code_bits", 3.5), ("effective_bits", 4.0), ("kind", "mixed")])
def test_records_of_other_bits_than_the_protocol_says_are_refused(copied, capsys, name, value):
    _, run = copied
    path = run / "records-0.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    changed = [record | ({name: value} if record["setting"] == "affine-L16" else {}) for record in records]
    path.write_text("".join(json.dumps(record) + "\n" for record in changed))
    assert main(["cliff-report", f"run={run}"]) == 2
    error = capsys.readouterr().err.strip()
    assert "\n" not in error
    assert f"line 2: setting affine-L16 has {name} {value}, not the " in error and "of protocol.yaml" in error


def test_damage_beside_the_records_costs_one_line_at_most(copied, capsys, without_figures):
    _, run = copied
    nested = "[" * 5000 + "]" * 5000
    (run / "config.yaml").write_text(nested)
    sessions = [{"seconds": "long"}, {"seconds": 2, "finished": [1]}]
    (run / "environment.json").write_text(json.dumps({"sessions": sessions}))
    assert main(["cliff-report", f"run={run}"]) == 0
    for name in ("records-7.jsonl", "prompts-7.jsonl"):
        (run / name).mkdir()
        capsys.readouterr()
        assert main(["cliff-report", f"run={run}"]) == 2
        error = capsys.readouterr().err.strip()
        assert "\n" not in error and f"{name} cannot be read: " in error
        (run / name).rmdir()


def test_every_record_leads_to_what_was_asked_and_expected(finished):
    frame, charter = read_run(finished[1])
    prompts = read_prompts(finished[1])
    assert set(frame["charter"]) == {charter["hash"][:16]}
    for record in frame.to_dict("records"):
        line = prompts[record["task"], record["example_id"], record["prompt_hash"], record["turn"]]
        assert answers_hash(line["answers"]) == record["answers_hash"] == line["answers_hash"]
        assert line["answers"][0] in line["prompt"] and line["question"] in line["prompt"]
        assert record["cluster"] not in (record["example_id"], "")
    assert len(prompts) == 2


def test_what_ran_is_written_down(finished):
    session = read_sessions(finished[1])[0]
    assert session["requested"] == {
        "dtype": "auto",
        "attention": None,
        "device_map": None,
        "kernels": "auto",
    }
    assert session["effective"] == {
        "dtype": "float32",
        "attention": "sdpa",
        "device_map": {"": "cpu"},
        "kernels": "reference",
    }


def test_metadata_beyond_float16_is_counted_and_said(local_folder, tmp_path, capsys):
    model = tmp_path / "model"
    shutil.copytree(local_folder, model)
    changed = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        changed.model.layers[0].self_attn.v_proj.weight *= 1e7
    changed.save_pretrained(model)
    assert _again(model, tmp_path / "run") == 0
    count = read_sessions(tmp_path / "run")[1]["saturated_metadata"]
    assert count > 0
    assert (
        f"{count} scales, zeros or norms were beyond float16 and stored as 65504" in capsys.readouterr().err
    )


def test_nothing_is_said_where_float16_holds_all(finished):
    assert read_sessions(finished[1])[1]["saturated_metadata"] == 0
