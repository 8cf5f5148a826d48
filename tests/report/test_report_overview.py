"""Several runs side by side: rows, marks, files, and what is refused."""

import copy
import io
import json

import pytest
from rich.console import Console
from typed import overview_rows

from semkv_bench.cli import main
from semkv_bench.report import figures, overview
from semkv_bench.report.command import portable
from semkv_bench.report.output import json_bytes
from semkv_bench.report.overview import draw_overview, show_overview, write_overview
from semkv_bench.report.side_by_side import SIDE_BY_SIDE, shared_formats
from semkv_bench.stats.plain import plain

SERVED = dict.fromkeys(("type", "mib", "cells", "bits", "build", "effect")) | {"rotated": True}


def variants(report) -> list[tuple[str, dict]]:
    """Four reports: another protocol, another model without a cliff, one above the grid with another margin."""
    base, turns, other, odd = (copy.deepcopy(report) for _ in range(4))
    turns["protocol"] = "multiturn"
    other |= {"model": "Llama-3.1-8B-Instruct", "operating_point": None, "quantizer": "turboquant"}
    other["cliff"] |= {"status": "undetermined", "lower_bits": None, "upper_bits": None, "probability": None}
    odd |= {"margin": 0.03, "model": "Llama-3.1-8B-Instruct"}
    odd["cliff"] |= {"status": "above_grid", "lower_bits": 4.0, "upper_bits": None}
    return [("a", base), ("b", turns), ("c", other), ("d", odd)]


def test_rows_are_grouped_and_never_pooled(report):
    rows = overview_rows(variants(report))
    assert [(row.model[:5], row.protocol, row.run) for row in rows] == [
        ("Llama", "prefill", "d"),
        ("Llama", "prefill", "c"),
        ("SmolL", "multiturn", "b"),
        ("SmolL", "prefill", "a"),
    ]
    assert [row.differs for row in rows] == [("margin 0.03",), (), (), ()]
    assert rows[3].operating_point.setting == report["operating_point"]["setting"]
    assert rows[3].lower_bits == report["cliff"]["lower_bits"] and rows[3].full_score is not None


def test_every_quantizer_has_a_row(report):
    for row in report["settings"]:
        row["quantizer"] = "turboquant" if row["setting"] in ("affine-L4", "affine-L3") else "affine"
    report["cliffs"] = {"affine": report["cliff"], "turboquant": {**report["cliff"], "status": "below_grid"}}
    affine, turbo = overview_rows([("a", report)])
    assert (affine.quantizer, turbo.quantizer) == ("affine", "turboquant")
    assert affine.operating_point is not None and turbo.operating_point is None
    assert turbo.grid_bits == (pytest.approx(1.585, abs=1e-3), 2.0)


def test_files_and_figure(report, tmp_path):
    rows = overview_rows(variants(report))
    paths = write_overview(rows, ["Left out: e (no finished example yet)."], tmp_path)
    assert json.loads(paths["report.json"].read_text())["overview"] == plain(rows)
    page = paths["report.html"].read_text(encoding="utf-8")
    text = paths["report.md"].read_text(encoding="utf-8")
    for words in (
        "Llama-3.1-8B-Instruct",
        "no: margin 0.03",
        "above the grid",
        "Left out: e",
        "(2.322, 2.807]",
    ):
        assert words in page and words in text
    assert "http://" not in page and "https://" not in page and "<script" not in page
    again = draw_overview(rows)
    assert paths["figures/cliff_overview.png"].read_bytes() == again.png


@pytest.mark.parametrize("whole", [8.0, None])
def test_a_saving_names_what_it_is_of(report, tmp_path, whole):
    report["operating_point"] |= {
        "effective_bits": 4.0,
        "cache_bits": whole,
        "compression": 16 / (whole or 4.0),
    }
    text = write_overview(overview_rows([("a", report)]), [], tmp_path)["report.md"].read_text(
        encoding="utf-8"
    )
    heads, row = (
        [cell.strip() for cell in line.split("|")]
        for line in text.splitlines()
        if line.startswith(("| run |", "| a |"))
    )
    cells = dict(zip(heads, row, strict=True))
    assert cells["coded part"] == "4.00x" and cells.get("whole cache") == (whole and "2.00x")


def test_names_of_users_are_shown_as_text(report, tmp_path):
    hostile = "<b>|`$x_{$\x1b[31m"
    report |= {"model": hostile, "protocol": hostile}
    paths = write_overview(overview_rows([(hostile, report)]), [], tmp_path)
    page = paths["report.html"].read_text(encoding="utf-8")
    assert "<b>" not in page and "\x1b" not in page


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_terminal_table_fits(report, width):
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    show_overview(overview_rows(variants(report)), [], console)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width and any("2.322" in line for line in lines)


@pytest.fixture
def folders(report, frame, tmp_path, monkeypatch):
    """Two folders that hold only a report.json, and one that holds nothing."""
    monkeypatch.chdir(tmp_path)
    for name, margin in (("one", 0.1), ("two", 0.05)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.json").write_bytes(json_bytes({**report, "margin": margin}))
    (tmp_path / "empty").mkdir()
    return tmp_path


def test_the_command_sets_reports_side_by_side(folders, capsys):
    assert main(["cliff-report", "runs=[one,two]"]) == 0
    assert "Not comparable with the others" in " ".join(capsys.readouterr().out.split())
    rows = json.loads((folders / "results" / "overview" / "report.json").read_text())["overview"]
    assert [row["run"] for row in rows] == ["one", "two"]
    assert main(["cliff-report", "runs=[one,two]"]) == 0  # its own overview may be replaced


def test_a_wildcard_leaves_out_what_holds_nothing(folders, capsys):
    assert main(["cliff-report", "runs='*'", "out=over"]) == 0
    assert "Left out: empty (holds neither" in capsys.readouterr().out
    assert main(["cliff-report", "runs='*'", "out=over"]) == 0
    assert "Left out: over (holds an overview)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["runs=[one,empty]"], 3, "empty holds neither a report.json nor records"),
        (["runs=[one,none]"], 3, "none does not exist"),
        (["runs=[]"], 2, "runs must name folders"),
        (["runs=[one]", "run=two"], 2, "not both"),
        (["runs=[one]", "records=two.csv"], 2, "not both"),
        (["runs='x*'"], 3, "matches no folder"),
        (["runs=[one/report.json]"], 3, "is a file; give its folder"),
        (["runs=[one]", "out=two"], 2, "out=two holds a report, which would be replaced"),
        (["runs=[one]", "stats.margin=0.2"], 2, "its margin cannot change"),
        (["runs='e*'"], 3, "none of 1 folders"),
    ],
)
def test_what_cannot_be_is_one_line(folders, capsys, arguments, code, words):
    assert main(["cliff-report", *arguments]) == code
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"schema": 2}', '{"schema": 1}', '{"schema": 1, "settings": []}']
)
def test_a_damaged_report_is_named(folders, capsys, content):
    (folders / "one" / "report.json").write_text(content)
    assert main(["cliff-report", "runs=[one,two]"]) == 2
    error = capsys.readouterr().err
    assert "one/report.json" in error and error.count("\n") == 1


def test_folders_of_equal_names_are_told_apart(folders, report):
    for parent in ("x", "y"):
        (folders / parent / "run").mkdir(parents=True)
        (folders / parent / "run" / "report.json").write_bytes(json_bytes(report))
    assert main(["cliff-report", "runs=[x/run,y/run]", "out=over"]) == 0
    rows = json.loads((folders / "over" / "report.json").read_text())["overview"]
    assert [row["run"] for row in rows] == ["x/run", "y/run"]


def test_sources_carry_no_place_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert portable(tmp_path / "results" / "a") == "results/a"
    assert portable(tmp_path.parent / "elsewhere" / "b") == "b"
    assert portable(tmp_path) == tmp_path.name


@pytest.mark.slow
def test_a_written_report_carries_no_place_of_this_machine(frame, tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "FIGURE_NAMES", ())
    (tmp_path / "data").mkdir()
    frame.to_csv(tmp_path / "data" / "scores.csv", index=False)
    elsewhere = tmp_path / "work"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert main(["cliff-report", f"records={tmp_path}/data/scores.csv", "out=r", "stats.resamples=200"]) == 0
    for name in ("report.md", "report.html", "report.json"):
        assert str(tmp_path) not in (elsewhere / "r" / name).read_text(encoding="utf-8")
    assert "scores.csv" in (elsewhere / "r" / "report.md").read_text(encoding="utf-8")


def test_simulation_and_engine_stand_side_by_side(report):
    """Formats that both have, whatever their place in the names; each keeps its own numbers."""
    ours, engine = copy.deepcopy(report), copy.deepcopy(report)
    ours["settings"][2] |= {
        "setting": "q8_0-L256",
        "quantizer": "q8_0",
        "diff": -0.01,
        "diff_ci": [-0.03, 0.01],
        "kl": 0.002,
        "kl_ci": [0.001, 0.003],
    }
    ours["settings"].append(
        copy.deepcopy(ours["settings"][2]) | {"setting": "q8_0_rotated", "quantizer": "q8_0_rotated"}
    )
    engine |= {"protocol": "engine", "served": [SERVED | {"setting": "q8_0"}]}
    engine["settings"][2] |= {
        "setting": "q8_0",
        "quantizer": "llama.cpp",
        "diff": -0.02,
        "diff_ci": [-0.05, 0.0],
    }
    for row in ours["settings"][2], ours["settings"][-1]:
        row["agreement"] = None
    engine["settings"][2]["agreement"] = 0.91
    for row in engine["settings"][3:]:
        row["setting"] = f"engine-{row['setting']}"
    rows = overview_rows([("ours", ours), ("llamacpp", engine)])
    assert [(row.protocol, row.run) for row in rows] == [("engine", "llamacpp"), ("prefill", "ours")]
    shared = dict(overview._tables(rows))[f"{report['model']}: {SIDE_BY_SIDE}"]
    assert {row[0] for row in shared.rows} == {"affine-L16", "q8_0"}
    cells = [dict(zip(shared.titles, row, strict=True)) for row in shared.rows if row[0] == "q8_0"]
    assert [(c["protocol"], c["rotated"], c["difference [interval]"], c["agreement"]) for c in cells] == [
        ("prefill", "no", "-0.010 [-0.030, +0.010]", "–"),
        ("engine", "yes", "-0.020 [-0.050, 0.000]", "91.0%"),
        ("prefill", "yes", "-0.010 [-0.030, +0.010]", "–"),
    ]
    assert cells[0]["KL [interval]"] == "0.00200 [0.00100, 0.00300]"
    assert "side by side, never pooled" in overview._head_and_limits(rows)[0]
    assert not shared_formats(overview_rows([("ours", ours), ("again", ours)]))
