"""Prompts out, answers in: an engine that nobody wrote an adapter for."""

import json

import pytest

from semkv_bench.cli import main
from semkv_bench.records.folder import read_run

MODEL = (
    "model=custom",
    "task=synthetic",
    "subset=[niah_noise]",
    "task.length=200",
    "seeds=[0]",
    "per_task=3",
)


@pytest.fixture
def exported(tmp_path, local_folder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "prompts.jsonl"
    assert main(["export", *MODEL, f"model.path={local_folder}", f"out={out}"]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def _answers(tmp_path, rows):
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _all(prompts):
    texts = {"full": "right", "q4": "wrong"}
    return [
        {"id": p["id"], "setting": name, "text": text, "bits": 16 if name == "full" else 4.5}
        for p in prompts
        for name, text in texts.items()
    ]


def test_answers_become_a_run_folder(tmp_path, exported):
    assert len(exported) == 3 and all(p["prompt"] and p["prompt_ids"] for p in exported)
    rows = _all(exported)
    assert main(["score", _answers(tmp_path, rows), f"out={tmp_path / 'run'}"]) == 0
    frame, charter = read_run(tmp_path / "run")
    assert set(frame.setting) == {"full", "q4"} and set(frame.protocol) == {"engine"}
    assert set(frame[frame.setting == "q4"].code_bits) == {4.5} and charter["engine"]["name"] == "answers"
    assert frame.kl.isna().all() and frame.agreement.isna().all()
    assert set(frame[frame.setting == "q4"].prediction) == {"wrong"}


def test_a_file_may_have_any_name_and_a_refusal_leaves_no_folder(tmp_path, exported, capsys):
    path, run = tmp_path / "model=tiny, it's q4.jsonl", tmp_path / "run"
    rows = [json.dumps(row) for row in _all(exported)]
    path.write_text("\n".join(rows[:-1]))
    assert main(["score", path.name, f"out={run}"]) == 2
    assert "has no answer to 1 of 3 prompts under q4" in capsys.readouterr().err
    assert not run.exists()
    path.write_text("\n".join(rows))
    assert main(["score", path.name, f"out={run}"]) == 0
    assert len(read_run(run)[0]) == len(rows)


SPOILT = [
    (lambda rows: rows[:-1], "has no answer to 1 of 3 prompts under q4"),
    (lambda rows: rows[: len(rows) // 2], "has no answer to"),
    (lambda rows: [*rows, {**rows[0], "id": "else"}], "line 7: prompts.jsonl has no prompt else"),
    (lambda rows: [{**rows[0], "prompt_hash": "0"}, *rows[1:]], "line 1: its prompt_hash is another"),
    (lambda rows: [*rows, rows[0]], "is answered twice"),
    (lambda rows: [r for r in rows if r["setting"] != "full"], "no answers of the reference"),
    (lambda rows: [{**rows[0], "text": 5}, *rows[1:]], "text must be a text"),
    (lambda rows: [{**rows[0], "bits": 99}, *rows[1:]], "bits must be a number"),
    (lambda rows: [{**r, "bits": None} for r in rows], "are not known; give them"),
]


@pytest.mark.slow
def test_answers_that_do_not_fit_are_one_line(tmp_path, exported, capsys):
    for number, (spoil, words) in enumerate(SPOILT):
        run = tmp_path / f"run{number}"
        assert main(["score", _answers(tmp_path, spoil(_all(exported))), f"out={run}"]) == 2
        assert words in capsys.readouterr().err
        assert not run.exists()


def test_score_without_its_export_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["score", _answers(tmp_path, []), "out=run"]) == 2
    assert "holds no export" in capsys.readouterr().err
    assert main(["score", "nowhere.jsonl", "out=run"]) == 3
    assert "nowhere.jsonl cannot be read" in capsys.readouterr().err
    assert main(["score"]) == 2 and main(["export", "out=prompts.txt"]) == 2
