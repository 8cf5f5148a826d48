"""What the packed cache takes of a run: real buffers, the sweep's answers, and what cannot be measured."""

import json
import shutil

import pytest
from thinned import thinned

from semkv_bench.cli import main
from semkv_bench.errors import UsageError
from semkv_bench.sweep.measure import _plan_of

pytestmark = pytest.mark.usefixtures("without_figures")

QUICK = ["per_task=2", "task.length=300", "max_new_tokens=6", "stats.margin=0.3"]


@pytest.fixture(scope="module")
def finished(local_folder, tmp_path_factory):
    """A finished run of a small random model in float32."""
    out = tmp_path_factory.mktemp("measured") / "run"
    own = ["model=custom", f"model.path={local_folder}", "grid.levels=[8,5]", "allocation=two_level"]
    ranked = ["allocation.metric=attention_received", "allocation.high=8", "allocation.low=5"]
    assert main(["sweep", *own, *ranked, *QUICK, f"out={out}"]) == 0
    return out


def _measured(run):
    return json.loads((run / "measure.json").read_text())


@pytest.mark.parametrize("attention", thinned(["dequantize", "packed"], "packed"))
@pytest.mark.parametrize("setting", ["affine-L5", "affine-L8/5@0.25:attention_received"])
def test_bytes_are_those_of_the_records_and_answers_those_of_the_sweep(finished, capsys, setting, attention):
    capsys.readouterr()
    assert main(["measure", str(finished), f"setting={setting}", "examples=3", f"attention={attention}"]) == 0
    told, content = capsys.readouterr().out, _measured(finished)
    assert content["setting"] == setting and len(content["examples"]) == 3
    held = content["bytes"]
    assert held["total"] == sum(size for part, size in held.items() if part != "total")
    assert held["codes"] > held["metadata"] > 0 and content["plain_bytes"] > held["total"]
    # Little is held in full here: the last token, the answer, and room for a few more.
    assert content["times_smaller"]["measured"] == pytest.approx(
        content["times_smaller"]["predicted"], rel=0.05
    )
    assert content["answers_as_in_sweep"] == {"packed": 3, "plain": 3}
    assert all(row["packed"]["first_difference"] is None for row in content["examples"])
    assert "measured" in told and "predicted" in told and "3 of 3 packed" in told


def test_an_answer_that_is_not_the_sweeps_is_counted(finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    path = run / "records-0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line["prediction"] += " and more" if line["setting"] == "affine-L5" else ""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["measure", f"run={run}", "setting=affine-L5", "examples=2"]) == 0
    content = _measured(run)
    assert content["answers_as_in_sweep"] == {"packed": 0, "plain": 2}
    assert [row["packed"]["first_difference"] for row in content["examples"]] == [
        row["packed"]["new_tokens"] for row in content["examples"]
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["setting=affine-L7"], 2, "affine-L8"),
        (["setting=full"], 2, "codes nothing"),
        ([], 3, "cliff-report"),
        (["setting=affine-L5", "examples=0"], 2, "at least 1"),
        (["setting=affine-L5", "attention=fast"], 2, "dequantize or packed"),
    ],
)
def test_what_cannot_be_measured_is_said_in_one_line(finished, capsys, arguments, code, word):
    capsys.readouterr()
    assert main(["measure", f"run={finished}", *arguments]) == code
    told = capsys.readouterr().err.strip()
    assert word in told and "\n" not in told and "unexpected" not in told


def test_the_operating_point_is_the_reports(finished, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    (run / "report.json").write_text(json.dumps({"operating_point": {"setting": "affine-L8"}}))
    assert main(["measure", f"run={run}", "examples=1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["setting"] == "affine-L8"
    (run / "report.json").write_text(json.dumps({"operating_point": None}))
    assert main(["measure", f"run={run}"]) == 1
    (run / "report.json").write_text("{")
    assert main(["measure", f"run={run}"]) == 2


def test_a_run_whose_configuration_was_changed_is_refused(finished, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    path = run / "config.yaml"
    path.write_text(path.read_text().replace("length: 300", "length: 310"))
    assert main(["measure", f"run={run}", "setting=affine-L5"]) == 2
    assert "length" in capsys.readouterr().err


def test_the_report_shows_what_was_measured_beside_its_prediction(finished, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    assert main(["measure", str(run), "setting=affine-L5", "examples=2"]) == 0
    assert f"next: semkv-bench cliff-report run={run}" in capsys.readouterr().out
    path = run / "measure.json"
    # Figures that nothing but this file holds.
    content = _measured(run)
    content["times_smaller"] |= {"measured": 4.56, "predicted": 4.67}
    content["tokens_per_second"] |= {"packed": 7.25, "plain": 9.75}
    path.write_text(json.dumps(content))
    assert main(["cliff-report", str(run)]) == 0
    told, page = capsys.readouterr().out, (run / "report.md").read_text()
    for text in (told, page):
        assert "Measured in the packed cache" in text and "7.2 tokens a second packed, 9.8 plain" in text
        assert "affine-L5 on 2 examples, cpu, float32" in text
    found = json.loads((run / "report.json").read_text())["measured"]
    assert (found["times_smaller"], found["predicted_times_smaller"]) == (4.56, 4.67)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", thinned(["{", '{"charter": 1}', None], "{"))
def test_a_measurement_of_another_run_or_a_damaged_one_is_left_out(wrong, finished, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    assert main(["measure", str(run), "setting=affine-L5", "examples=1"]) == 0
    other = json.dumps(_measured(run) | {"charter": "of another run"})
    (run / "measure.json").write_text(other if wrong is None else wrong)
    assert main(["cliff-report", str(run)]) == 0
    assert "packed cache" not in capsys.readouterr().out.partition("next:")[2]
    assert json.loads((run / "report.json").read_text())["measured"] is None


@pytest.mark.parametrize("content", [b"a: [", b"- a\n- b\n", b"word", b"\xff\xfe\x00"])
def test_a_damaged_configuration_is_one_line(tmp_path, content):
    (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(UsageError, match=r"config\.yaml is damaged"):
        _plan_of(tmp_path)
