"""Records as Parquet and CSV, and reports in experiment trackers."""

import json

import pandas as pd
import pytest

import semkv_bench as sb
from semkv_bench.cli import main
from semkv_bench.errors import MissingError, UsageError
from semkv_bench.report.export import exported, formats_of
from semkv_bench.report.loggers import MLflow, WandB

pytestmark = pytest.mark.usefixtures("without_figures")


@pytest.fixture(scope="module")
def scores(tmp_path_factory):
    """A file of scores of three settings, one with options in its name."""
    path = tmp_path_factory.mktemp("scores") / "scores.jsonl"
    rows = [
        {"task": "t", "example_id": f"e{i}", "setting": name, "code_bits": bits, "score": float(i % 9 >= lost),
         "cache_bits": bits + 0.5, "quantizer": None if name == "full" else "affine[g32]", "prediction": "a,\n\"b\" é"}
        for i in range(40)
        for name, bits, lost in (("full", 15.5, 0), ("affine[g32]-L8", 3.0, 0), ("affine[g32]-L2", 1.0, 9))
    ]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.parametrize("name", ["csv", "parquet"])
def test_what_is_exported_says_what_the_records_say(name, scores, tmp_path, capsys):
    assert main(["cliff-report", f"records={scores}", f"out={tmp_path / 'r'}", f"export={name}"]) == 0
    assert f"records: {tmp_path / 'r'}/records.{name}" in capsys.readouterr().out
    before, after = sb.read_records(scores), sb.read_records(tmp_path / f"r/records.{name}")
    pd.testing.assert_frame_equal(
        before.dropna(axis=1, how="all"), after.dropna(axis=1, how="all"), check_dtype=False, check_like=True
    )


def test_lists_mappings_and_mixed_columns_are_json_in_their_cells(tmp_path):
    frame = pd.DataFrame(
        {
            "depths": [[0.1], [], None],
            "options": [{"group_size": 32}, None, None],
            "levels": [5, {"keys": 8, "values": 4}, None],
            "score": [1, 0.5, None],
        }
    )
    for name, content in exported(frame, ["parquet", "csv"]).items():
        path = tmp_path / name
        path.write_bytes(content)
        back = pd.read_parquet(path) if name.endswith("parquet") else pd.read_csv(path)
        assert json.loads(back["options"][0]) == {"group_size": 32} and json.loads(back["depths"][0]) == [0.1]
        assert [json.loads(cell) for cell in back["levels"][:2]] == [5, {"keys": 8, "values": 4}]
        assert list(back["score"][:2]) == [1, 0.5] and back.isna().iloc[2].all()


@pytest.mark.parametrize("wrong", ["excel", "[csv,excel]", "7"])
def test_another_format_is_refused_before_anything_is_written(wrong, scores, tmp_path, capsys):
    assert main(["cliff-report", f"records={scores}", f"out={tmp_path / 'r'}", f"export={wrong}"]) == 2
    assert "export" in capsys.readouterr().err and not (tmp_path / "r").exists()
    assert formats_of(None) == () and formats_of(["csv", "csv"]) == ("csv",)
    with pytest.raises(UsageError):
        formats_of(7)


@pytest.fixture
def report(scores, tmp_path):
    return sb.report(scores, out=tmp_path / "r"), tmp_path / "r"


@pytest.mark.parametrize(("name", "package"), [("mlflow", "mlflow"), ("wandb", "wandb")])
def test_a_tracker_that_is_not_installed_is_named(name, package, report, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(MissingError, match=rf"\+log={name} needs .*pip install"):
        {"mlflow": MLflow, "wandb": WandB}[name]().log(*report)


def test_an_unknown_tracker_is_refused(scores, tmp_path, capsys):
    assert main(["cliff-report", f"records={scores}", f"out={tmp_path / 'r'}", "+log=tensorboard"]) == 2
    assert "there is no log 'tensorboard'" in capsys.readouterr().err
    assert (
        main(["cliff-report", f"records={scores}", f"out={tmp_path / 'r'}", "+log=wandb", "log.mode=on"]) == 2
    )
    assert "log.mode=on" in capsys.readouterr().err and not (tmp_path / "r").exists()


def test_mlflow_has_settings_numbers_and_files(scores, tmp_path, capsys, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlruns").as_uri()
    command = ["cliff-report", f"records={scores}", f"out={tmp_path / 'r'}", "+log=mlflow"]
    assert main([*command, f"log.tracking_uri={uri}", "log.experiment=mine"]) == 0
    assert "logged: MLflow experiment mine" in capsys.readouterr().out
    (run,) = mlflow.search_runs(experiment_names=["mine"], output_format="list")
    told = json.loads((tmp_path / "r/report.json").read_text())
    rows = {row["setting"]: row for row in told["settings"]}
    assert run.data.metrics["affine_g32_-L2/score"] == rows["affine[g32]-L2"]["score"] == 0
    assert run.data.metrics["affine_g32_-L8/cache_bits"] == 3.5
    assert run.data.params["cliff"] == told["cliff"]["status"]
    assert {file.path for file in mlflow.artifacts.list_artifacts(run_id=run.info.run_id)} >= {"report.json"}


def test_wandb_writes_offline(scores, tmp_path, capsys, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    assert main(["cliff-report", f"records={scores}", f"out={tmp_path / 'r'}", "+log=wandb"]) == 0
    assert "logged: Weights & Biases project semkv-bench" in capsys.readouterr().out
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    assert list(folder.glob("*.wandb")) and (folder / "files/report.json").exists()
