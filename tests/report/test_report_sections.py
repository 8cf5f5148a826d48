"""Mixes on their line, rankings and deletion in all forms of the report."""

import io
import itertools
import math

import numpy as np
import pandas as pd
import pytest
from rich.console import Console
from typed import (
    analyze,
    as_report,
    draw_all,
    draw_rankings,
    draw_turns,
    incomplete,
    remarks,
    sections,
    show,
    write,
)

from semkv_bench.report import figures
from semkv_bench.report.marks import series_of, spread
from semkv_bench.report.output import json_bytes
from semkv_bench.stats import StatsOptions

pytestmark = pytest.mark.usefixtures("without_figures")

METRICS = ("attention_received", "attention_window", "hidden_drift", "hidden_norm", "key_norm", "logit_entropy",
           "random", "recency", "surprisal", "value_norm")  # fmt: skip
GAIN = {"attention_received": 0.45, "attention_window": 0.4, "key_norm": 0.2, "recency": -0.1}


def planned(metrics=METRICS) -> list[tuple]:
    """Setting, kind, code bits, effective bits and chance of a right answer."""
    low = math.log2(5)
    plan = [("full", "full", 16.0, 16.0, 0.97), ("affine-L64", "uniform", 6.0, 6.5, 0.97)]
    plan += [("affine-L16", "uniform", 4.0, 4.5, 0.95), ("affine-L5", "uniform", low, 2.83, 0.1)]
    for (high, bits), metric in itertools.product(((64, 6.0), (16, 4.0)), metrics):
        right = 0.3 + GAIN.get(metric, 0.0)
        code = 0.25 * bits + 0.75 * low
        plan.append((f"affine-L{high}/5@0.25:{metric}", "mixed", code, code + 0.5, right))
    for metric in metrics[:4]:
        plan.append((f"prune@0.25:{metric}", "prune", None, 4.0, 0.1))
    return plan


def run(metrics=METRICS, examples=40) -> tuple[pd.DataFrame, dict]:
    random = np.random.default_rng(0)
    rows = []
    for i in range(examples):
        fragility = random.random()
        for name, kind, code, effective, right in planned(metrics):
            rows.append(
                {
                    "task": f"task{i % 2}",
                    "example_id": i,
                    "setting": name,
                    "kind": kind,
                    "quantizer": "affine" if kind in ("uniform", "mixed") else None,
                    "code_bits": code,
                    "effective_bits": effective,
                    "score": float(0.7 * fragility + 0.3 * random.random() < right),
                }
            )
    frame = pd.DataFrame(rows)
    return frame, analyze(frame, StatsOptions(margin=0.1, resamples=200))


@pytest.fixture(scope="module")
def made():
    return run()


@pytest.fixture(scope="module")
def written(made, tmp_path_factory):
    frame, report = made
    return write(report, frame, {}, tmp_path_factory.mktemp("sections"))


def printed(report, width):
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    show(report, {}, console)
    return console.file.getvalue()


def test_every_comparison_is_in_a_table(made):
    _, report = made
    by_name = {section.name: section for section in sections(report)}
    assert list(by_name) == ["residual", "interpolation", "rankings", "deletion"]
    ((_, table),) = by_name["interpolation"].tables
    assert {row[0] for row in table.rows} == {row["setting"] for row in report["interpolation"]}
    captions = [caption for caption, _ in by_name["rankings"].tables]
    assert captions[0].startswith("affine-L64/5@0.25: 25.0% of the tokens at 64 levels, the rest at 5, 3.7")
    for group, (_, table) in zip(report["rankings"], by_name["rankings"].tables, strict=True):
        assert [row[0] for row in table.rows] == [row["metric"] for row in group["metrics"]]
        best = table.rows[0]
        assert best[table.titles.index("difference to the best")] == "–"
    assert by_name["deletion"].finding.startswith("8 comparisons: ")


def test_a_report_without_comparisons_has_no_sections(report):
    assert sections(report) == []
    report |= {"interpolation": [], "rankings": [], "deletion": []}
    assert sections(report) == []


def test_the_files_hold_the_sections_and_figure(made, written):
    for name in ("report.md", "report.html"):
        text = written[name].read_text(encoding="utf-8")
        for heading in (
            "Mixes against the line",
            "Importance metrics ranked",
            "Deletion against low-precision",
        ):
            assert heading in text
    assert written["figures/metric_ranking.png"].stat().st_size > 10_000
    assert written["report.json"].read_bytes() == json_bytes(made[1])


@pytest.mark.parametrize("width", [80, 120])
def test_the_terminal_tables_fit(made, width):
    lines = printed(made[1], width).splitlines()
    assert max(len(line) for line in lines) <= width
    assert any(line.startswith("attention_received") and " a " in line for line in lines)


@pytest.mark.slow
def test_ten_metrics_in_two_groups_stay_apart(made, monkeypatch):
    from semkv_bench.report import rankings_turns

    kept = []
    monkeypatch.setattr(rankings_turns, "freeze_layout", lambda figure: kept.append(figure))
    assert draw_rankings(made[1])
    (figure,) = kept
    figure.canvas.draw()
    for axes in figure.axes:
        boxes = [label.get_window_extent() for label in axes.get_yticklabels()]
        assert not any(one.overlaps(other) for one, other in itertools.pairwise(boxes))
        words = [text.get_window_extent() for text in axes.texts]
        assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 for box in boxes + words)
        assert all(figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1 for box in boxes + words)
    assert [len(axes.get_yticklabels()) for axes in figure.axes] == [10, 10, 4]


def test_series_are_told_apart(made):
    rows = [row for row in as_report(made[1]).settings if row.kind != "full"]
    series = series_of(rows)
    looks = {(one.colour, one.marker) for one in series}
    assert len(looks) == len(series) == 1 + 10 + 4
    colours = {(one.label.split(", ")[-1], one.colour) for one in series if one.kind != "uniform"}
    assert len(colours) == 10  # a metric has its colour in both kinds


def test_equal_bits_stand_side_by_side(made):
    rows = [row for row in as_report(made[1]).settings if row.kind != "full"]
    moved = spread(rows, "effective_bits")
    assert set(moved) == {row.setting for row in rows}
    assert len({round(place, 4) for place in moved.values()}) == len(rows)
    for row in rows:
        if row.kind == "uniform":
            assert moved[row.setting] == row.effective_bits
        assert abs(moved[row.setting] - row.effective_bits) < 0.4


def test_one_point_and_no_points_can_be_spread(made):
    row = as_report(made[1]).settings[-1]
    assert spread([row], "effective_bits") == {row.setting: row.effective_bits}
    assert spread([], "effective_bits") == {}


def test_the_lines_between_the_ends_are_drawn(made, monkeypatch):
    kept = []
    monkeypatch.setattr(figures, "FIGURE_NAMES", ("quality_vs_effective_bits",))
    monkeypatch.setattr(figures, "freeze_layout", lambda figure: kept.append(figure))
    (quality,) = draw_all(made[1])
    assert "affine-L64/5@0.25:random 0." in quality.description
    scores = {row["setting"]: row["score"] for row in made[1]["settings"]}
    dotted = [line for line in kept[0].axes[0].lines if line.get_label() == "line between a mix's ends"]
    ends = {(tuple(line.get_xdata()), tuple(line.get_ydata())) for line in dotted}
    assert ends == {
        ((2.83, 6.5), (scores["affine-L5"], scores["affine-L64"])),
        ((2.83, 4.5), (scores["affine-L5"], scores["affine-L16"])),
    }


def test_many_groups_leave_a_figure_of_bounded_height(made):
    drawn = draw_rankings({**made[1], "rankings": made[1]["rankings"] * 20})
    height = float(drawn.svg.split('height="')[1].split("pt")[0]) / 72
    assert height < 15


@pytest.mark.slow
def test_hostile_metric_names_are_shown_as_text(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "FIGURE_NAMES", ("metric_ranking",))
    metrics = ("<b>$x_{1$|`", "random", "\x1b[31m red")
    frame, report = run(metrics, examples=12)
    paths = write(report, frame, {}, tmp_path)
    page = paths["report.html"].read_text(encoding="utf-8")
    assert "<b>" not in page and "\x1b" not in page
    assert "\x1b" not in printed(report, 100)


def talk() -> dict:
    """A report of conversations of three turns, of which 20 of 25 are recorded."""
    random = np.random.default_rng(1)
    rows = [
        {
            "task": "talk",
            "example_id": i,
            "turn": turn,
            "setting": name,
            "code_bits": bits,
            "score": float(random.random() > loss * (turn + 1)),
            "runaway": loss > 0.2,
            "prediction": "x",
        }
        for i in range(20)
        for turn in range(3)
        for name, bits, loss in (
            ("full", 16.0, 0.0),
            ("q-L16", 4.0, 0.0),
            ("q-L4", 2.0, 0.1),
            ("q-L2", 1.0, 0.3),
        )
    ]
    return analyze(pd.DataFrame(rows), StatsOptions(margin=0.1, resamples=200))


@pytest.mark.slow
def test_turns_are_a_table_and_a_figure(monkeypatch):
    report = talk()
    (section,) = [section for section in sections(report) if section.name == "turns"]
    (_, table), *_ = section.tables
    assert table.titles[:4] == ("setting", "turn 1", "turn 2", "turn 3")
    last = report["turns"][2]["settings"]["q-L2"]
    row = next(row for row in table.rows if row[0] == "q-L2")
    assert row[3] == f"{last['score']:.3f} ({last['diff']:+.3f})"
    assert section.finding.endswith(".") and not section.finding.endswith("..")
    drawn = draw_turns(report)
    assert "Turn 3: " in drawn.description and "q-L2" in drawn.description


def test_turns_do_not_count_as_examples():
    report = talk()
    assert report["n_examples"] == 60
    assert incomplete(report | {"planned_examples": 25}).startswith(
        "The run is not finished: 20 of 25 planned"
    )
    assert incomplete(report | {"planned_examples": 20}) == ""


def test_the_detector_of_runaways_is_judged_by_full_precision():
    (words,) = [words for words in remarks(talk()) if "runaway" in words]
    assert words.startswith(
        "Of 60 full-precision outputs, 0 count as runaway: a false-alarm rate of 0.0%, interval"
    )


def test_what_is_left_above_the_cliff_is_said(made):
    report = {**made[1], "settings": [dict(row) for row in made[1]["settings"]]}
    for row in report["settings"]:
        row |= {"residual": None, "detectable_drop": 0.125}
    assert "residual" not in [section.name for section in sections(report)]
    report["settings"][1]["residual"] = "not detected"
    section = sections(report)[0]
    assert section.finding == (
        "Of 1 setting above the cliff, none is detectably below full. "
        "A drop of 0.125 would have shown with a chance of 80%."
    )
    report["settings"][2]["residual"] = "floor"
    assert sections(report)[0].finding.startswith(
        f"Detectably below full: {report['settings'][2]['setting']}."
    )


def test_a_narrow_terminal_gets_one_table_each(made):
    lines = printed(made[1], 40).splitlines()
    assert max(map(len, lines)) <= 40
    assert sum(line.startswith("setting  ") for line in lines) == 3
    assert any("A wider terminal shows" in line for line in lines)
