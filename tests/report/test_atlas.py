"""The atlas: every method of every run is a row with its cliff and its cheapest safe cache."""

import json
import shutil
from pathlib import Path

import pytest

from semkv_bench.cli import main
from semkv_bench.report.atlas import entries_of
from semkv_bench.stats.result import Report

SMALL = Path(__file__).parents[2] / "results" / "small"


def test_committed_reports_become_one_page_and_one_json(tmp_path, capsys):
    assert (
        main(["atlas", f"runs=[{SMALL}/affine_uniform,{SMALL}/turboquant_uniform]", f"out={tmp_path}"]) == 0
    )
    assert "methods: 2; runs: 2" in capsys.readouterr().out
    content = json.loads((tmp_path / "atlas.json").read_text())
    page = (tmp_path / "atlas.html").read_text()
    for folder, entry in zip(("affine_uniform", "turboquant_uniform"), content["atlas"], strict=True):
        report = json.loads((SMALL / folder / "report.json").read_text())
        cliff = report["cliffs"][entry["method"]]
        assert (entry["status"], entry["lower_bits"], entry["upper_bits"]) == (
            cliff["status"], cliff["lower_bits"], cliff["upper_bits"],
        )  # fmt: skip
        safe = [
            s
            for s in report["settings"]
            if s["kind"] == "uniform" and s["verdict"] in ("equivalent", "no_worse")
        ]
        cheapest = min(safe, key=lambda s: s.get("cache_bits") or s["effective_bits"])
        assert entry["safe"] == cheapest["setting"] and entry["n"] == report["n_examples"]
        assert entry["run"] == folder and entry["model"] == report["model"]
        assert cheapest["setting"] in page and folder in page
    assert "<script" not in page and "http" not in page.replace("http-equiv", "")


def test_a_folder_without_a_report_is_named_or_left_out(tmp_path, capsys):
    shutil.copytree(SMALL / "affine_uniform", tmp_path / "runs" / "good")
    (tmp_path / "runs" / "empty").mkdir()
    assert main(["atlas", f"runs={tmp_path}/runs/*", f"out={tmp_path / 'atlas'}"]) == 0
    assert "Left out: empty" in capsys.readouterr().out
    assert main(["atlas", f"runs=[{tmp_path}/runs/good,{tmp_path}/runs/empty]", f"out={tmp_path / 'b'}"]) == 3
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ([], "atlas takes folders"),
        (["runs=[nowhere]"], "does not exist"),
        (["margin=1"], "takes runs and out"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments, word, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["atlas", *arguments]) in (2, 3)
    told = capsys.readouterr().err.strip()
    assert word in told and "\n" not in told


def test_nothing_safe_is_said_so():
    content = json.loads((SMALL / "affine_uniform" / "report.json").read_text())
    for setting in content["settings"]:
        if setting["kind"] != "full":
            setting["verdict"] = "degraded"
    (entry,) = entries_of(Report.from_json(content), "run", None)
    assert entry.safe is None and entry.safe_bits is None and entry.date is None
