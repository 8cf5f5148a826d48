"""Figures: what they show, that no label covers another, and that they are repeatable."""

import io
import itertools
import math
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import matplotlib
import numpy as np
import pytest
from PIL import Image
from thinned import thinned
from typed import draw_all

from semkv_bench.records.names import describe
from semkv_bench.report import figures
from semkv_bench.report.figures import GRID_FIGURES
from semkv_bench.report.marks import draw_legend
from semkv_bench.report.plot_style import FIGURE_SIZE, drawing, new_figure, set_bits_axis

GRIDS = {
    "paper": [2, 3, 4, 5, 6, 7, 8],
    "with 16": [2, 3, 4, 5, 6, 7, 8, 16],
    "upper end": [5, 6, 7, 8],
    "every level to 40": list(range(2, 41)),
    "up to 8 bits": [2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128, 256],
    "one point": [5],
}


def labelled_axis(levels, first=()):
    """Axes with the bits axis of ``levels``, drawn; tick labels that are not empty."""
    bits = [math.log2(level) for level in levels]
    figure, axes = new_figure("title", "bits", "score")
    axes.set_xlim(min(bits) - 0.1, max(bits) + 0.1)
    set_bits_axis(
        axes,
        bits,
        [f"{value:.3f} (L={level})" for level, value in zip(levels, bits, strict=True)],
        list(first),
    )
    figure.canvas.draw()
    return figure, axes, [label for label in axes.get_xticklabels() if label.get_text()]


@pytest.mark.parametrize("levels", GRIDS.values(), ids=GRIDS)
def test_tick_labels_do_not_overlap(levels):
    with drawing("test"):
        figure, axes, labels = labelled_axis(levels)
        boxes = [label.get_window_extent() for label in labels]
        assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
        below = axes.xaxis.label.get_window_extent()
        assert not any(box.overlaps(below) for box in boxes)
        assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 and box.y0 >= 0 for box in boxes)


def test_the_whole_grid_of_the_paper_is_labelled():
    with drawing("test"):
        _, _, labels = labelled_axis(GRIDS["with 16"])
        assert [label.get_text().split("(")[1][:-1] for label in labels] == [
            f"L={level}" for level in GRIDS["with 16"]
        ]
        assert labels[3].get_text() == "2.322 (L=5)"


def test_the_ends_of_the_cliff_keep_their_labels():
    with drawing("test"):
        _, axes, labels = labelled_axis(range(2, 41), [math.log2(31), math.log2(37)])
        shown = {label.get_text().split("(")[1][:-1] for label in labels}
        assert {"L=31", "L=37"} <= shown and len(shown) < 39
        assert len(axes.get_xticks()) == 39


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["affine-L16"], "4 (L=16)"),
        (["affine-L16", "turboquant-L16"], "4 (L=16)"),
        (["int4"], "4 (int4)"),
        (["int4", "nf4"], "4"),
        (["affine-L16", "nf4"], "4"),
        (["a-very-long-name-of-a-format"], "4 (a-very-…rmat)"),
    ],
)
def test_ticks_name_levels_only_where_the_settings_do(names, text):
    rows = [
        SimpleNamespace(
            setting=name, code_bits=4.0, kind="uniform", levels=describe(name, "uniform")["levels"]
        )
        for name in names
    ]
    assert figures._tick_label(rows) == text


@pytest.mark.parametrize(("names", "letters"), [(3, 10), (12, 8), (12, 26), (30, 26), (5, 60)])
def test_a_legend_lies_within_its_figure_whatever_its_names(names, letters):
    with drawing("test"):
        figure, axes = new_figure("title", "bits", "score")
        for index in range(names):
            axes.plot([0, 1], [0, index], label=f"{index:02d}{'snapkv-16:chunk:unseen' * 3}"[:letters])
        draw_legend(figure, axes)
        figure.canvas.draw()
        legend, plot = figure.legends[0].get_window_extent(), axes.get_window_extent()
    assert legend.x0 >= 0 and legend.x1 <= figure.bbox.width and legend.y1 < plot.y0
    assert plot.height > 0.5 * FIGURE_SIZE[1] * figure.dpi and len(figure.legends[0].get_texts()) == names


@pytest.fixture(scope="module")
def drawn(base_report):
    return draw_all(base_report)


def test_every_figure_is_drawn_and_shows_something(drawn):
    assert [figure.name for figure in drawn] == list(GRID_FIGURES)
    for figure in drawn:
        root = ElementTree.fromstring(figure.svg)
        assert len(list(root.iter("{http://www.w3.org/2000/svg}path"))) > 20
        pixels = np.asarray(Image.open(io.BytesIO(figure.png)).convert("RGB"), int)
        assert min(pixels.shape[:2]) >= 700
        coloured = np.ptp(pixels, axis=2) > 60
        assert 0.001 < coloured.mean() < 0.5, figure.name


def test_figures_are_undated(drawn):
    assert not any("date" in figure.svg or "Matplotlib" in figure.svg for figure in drawn)


@pytest.mark.slow
def test_figures_are_repeatable_whatever_the_users_style_and_leave_it_alone(report, drawn):
    matplotlib.rcParams["font.size"] = 13.0
    before = dict(matplotlib.rcParams)
    try:
        again = draw_all(report)
        assert dict(matplotlib.rcParams) == before
    finally:
        matplotlib.rcParams["font.size"] = matplotlib.rcParamsDefault["font.size"]
    assert [(a.svg, a.png) for a in again] == [(b.svg, b.png) for b in drawn]


def painted(monkeypatch, report, name):
    """Axes of the figure ``name`` of ``report``, kept alive."""
    from semkv_bench.report import figures

    kept = {}

    def keep(*arguments):
        kept["figure"], kept["axes"] = new_figure(*arguments)
        return kept["figure"], kept["axes"]

    monkeypatch.setattr(figures, "new_figure", keep)
    monkeypatch.setattr(figures, "FIGURE_NAMES", (name,))
    assert draw_all(report)
    kept["figure"].canvas.draw()
    return kept["figure"], kept["axes"]


@pytest.mark.parametrize("name", thinned(GRID_FIGURES, "score_vs_bits"))
def test_the_legend_covers_no_data(monkeypatch, report, name):
    figure, axes = painted(monkeypatch, report, name)
    (legend,) = figure.legends
    boxes = [entry.get_window_extent() for entry in (*legend.get_texts(), *legend.legend_handles)]
    assert not any(box.overlaps(axes.get_tightbbox()) for box in boxes)
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 and box.y0 >= 0 for box in boxes)


def test_the_shaded_cliff_is_that_of_the_report(monkeypatch, report):
    _, axes = painted(monkeypatch, report, "score_vs_bits")
    spans = [
        (patch.get_x(), patch.get_x() + patch.get_width())
        for patch in axes.patches
        if patch.get_height() == 1
    ]
    assert any(span == pytest.approx((math.log2(5), math.log2(7))) for span in spans)
    assert "cliff" in [text.get_text() for text in axes.texts]


@pytest.mark.parametrize(
    ("status", "lower", "upper"),
    [("above_grid", 4.0, None), ("below_grid", None, 1.0), ("undetermined", None, None)],
)
def test_a_cliff_off_the_grid_is_shaded_to_the_edge(monkeypatch, report, status, lower, upper):
    report["cliff"] |= {"status": status, "lower_bits": lower, "upper_bits": upper}
    _, axes = painted(monkeypatch, report, "runaway_vs_bits")
    spans = [(patch.get_x(), patch.get_x() + patch.get_width()) for patch in axes.patches]
    left, right = axes.get_xlim()
    expected = {"above_grid": [(4.0, right)], "below_grid": [(left, 1.0)], "undetermined": []}[status]
    assert spans == [pytest.approx(span) for span in expected]


def test_divergence_is_logarithmic_over_decades_and_shows_zeros(monkeypatch, report):
    report["settings"][1]["kl"] = 0.0
    _, axes = painted(monkeypatch, report, "kl_vs_bits")
    assert axes.get_yscale() == "log"
    (zeros,) = [line for line in axes.lines if line.get_label().startswith("exactly 0")]
    assert list(zeros.get_xdata()) == [4.0]
    low, high = axes.get_ylim()
    assert low < zeros.get_ydata()[0] < min(row["kl"] for row in report["settings"] if row["kl"]) < high


@pytest.mark.parametrize("values", [[0.0] * 13, [0.02, 0.03] * 7], ids=["all zero", "one decade"])
def test_divergence_is_linear_otherwise(monkeypatch, report, values):
    for row, value in zip(report["settings"][1:], values, strict=False):
        row["kl"] = value
    _, axes = painted(monkeypatch, report, "kl_vs_bits")
    assert axes.get_yscale() == "linear" and axes.get_ylim()[0] <= 0


def test_the_operating_point_is_ringed_and_kinds_have_markers(monkeypatch, report):
    _, axes = painted(monkeypatch, report, "quality_vs_effective_bits")
    point = report["operating_point"]
    (ring,) = [line for line in axes.lines if str(line.get_label()).startswith("operating point")]
    assert list(ring.get_xdata()) == [point["effective_bits"]] and point["setting"] in ring.get_label()
    markers = {line.get_label(): line.get_marker() for line in axes.lines}
    assert (markers["uniform"], markers["mixed"], markers["prune"]) == ("o", "D", "s")


def test_two_quantizers_are_two_lines(monkeypatch, report):
    for row in report["settings"][5:9]:
        row["setting"] = row["setting"].replace("affine", "turboquant")
        row["family"] = "turboquant"
    _, axes = painted(monkeypatch, report, "score_vs_bits")
    lines = [line for line in axes.lines if line.get_linestyle() == "-" and len(line.get_xdata()) == 4]
    assert len(lines) == 2 and len({line.get_color() for line in lines}) == 2


@pytest.mark.slow
def test_names_that_look_like_formulas_are_drawn_as_they_are(report):
    report["operating_point"]["setting"] = report["settings"][3]["setting"] = "$x_{1$ 日本 \\frac & <b>"
    (quality,) = [figure for figure in draw_all(report) if figure.name == "quality_vs_effective_bits"]
    ElementTree.fromstring(quality.svg)
    assert "\\frac & <b> 0." in quality.description


def test_nothing_to_draw_is_no_figure(report):
    for row in report["settings"]:
        row |= {"code_bits": None, "effective_bits": None}
    assert draw_all(report) == []


def test_pruned_settings_have_no_place_among_code_bits(monkeypatch, report):
    for row in report["settings"]:
        if row["kind"] == "prune":
            row["code_bits"] = 4.5
    _, axes = painted(monkeypatch, report, "score_vs_bits")
    assert 4.5 not in {x for line in axes.lines for x in line.get_xdata()}
