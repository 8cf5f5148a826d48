"""Score and KL divergence of every method against what its cache costs, with the front of the best."""

from collections.abc import Callable

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from semkv_bench.report.formatting import bits_text, clean, divergence, fixed, known, shorten
from semkv_bench.report.lookup import reference_row
from semkv_bench.report.marks import SMALL, draw_legend
from semkv_bench.report.methods import unit_words
from semkv_bench.report.plot_style import (
    FIGURE_SIZE,
    PALETTE,
    SERIES_COLOURS,
    Drawn,
    drawing,
    freeze_layout,
    png_bytes,
    svg_text,
)
from semkv_bench.stats.result import Report, SettingResult

__all__ = ["draw_methods"]

_MARKERS = "osDv^P"
_TITLE = "Methods at what their caches cost"


def draw_methods(report: Report) -> Drawn | None:
    """One line per method in two panels, score above and KL divergence below; None where one method was run."""
    if report.methods is None:
        return None
    grids = {method: _grid(report, method) for method in report.methods.methods}
    with drawing("semkv-bench methods_vs_cache_bits"):
        diverges = any(known(row.kl) for grid in grids.values() for row in grid)
        figure = Figure(figsize=(FIGURE_SIZE[0], 6.4 if diverges else 4.2), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(1 + diverges, 1, sharex=True, squeeze=False)[:, 0]
        _paint(panels[0], grids, lambda row: row.score)
        _paint_front(report, panels[0])
        panels[0].set_ylabel("score (0 to 1)")
        panels[0].set_ylim(bottom=min(0.0, panels[0].get_ylim()[0]))
        if diverges:
            _paint(panels[1], grids, lambda row: row.kl if row.kl else None)
            panels[1].set_yscale("log")
            panels[1].yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            panels[1].yaxis.set_minor_formatter(NullFormatter())
            panels[1].set_ylabel("KL divergence (nats)")
        panels[-1].set_xlabel(unit_words(report.methods.priced_by))
        draw_legend(figure, panels[0])
        figure.suptitle(_TITLE, x=0.01, ha="left", fontsize=10.5, fontweight="bold")
        freeze_layout(figure)
        return Drawn("methods_vs_cache_bits", _TITLE, _grids_text(grids), svg_text(figure), png_bytes(figure))


def _grid(report: Report, method: str) -> list[SettingResult]:
    rows = [row for row in report.settings if row.kind == "uniform" and row.quantizer == method]
    return sorted(rows, key=lambda row: row.paid_bits)


def _paint(
    axes: Axes, grids: dict[str, list[SettingResult]], value: Callable[[SettingResult], float | None]
) -> None:
    for number, (method, grid) in enumerate(grids.items()):
        points = [(row.paid_bits, value(row)) for row in grid if known(value(row))]
        colour = PALETTE[SERIES_COLOURS[number % len(SERIES_COLOURS)]]
        marker = _MARKERS[number % len(_MARKERS)]
        axes.plot(
            [bits for bits, _ in points],
            [height for _, height in points],
            color=colour,
            marker=marker,
            ms=SMALL,
            lw=1.2,
            label=shorten(clean(method), 28),
        )
    axes.grid(True)


def _paint_front(report: Report, axes: Axes) -> None:
    reference = reference_row(report)
    if reference is not None:
        axes.axhline(reference.score, color=PALETTE["ink"], lw=1.1, ls=(0, (5, 3)), label="full (16 bits)")
    rows = {row.setting: row for row in report.settings}
    front = [rows[name] for name in report.methods.front]
    axes.plot(
        [row.paid_bits for row in front],
        [row.score for row in front],
        color=PALETTE["ink"],
        lw=3.5,
        alpha=0.25,
        drawstyle="steps-post",
        label="front: none cheaper is as good",
        zorder=1,
    )


def _grids_text(grids: dict[str, list[SettingResult]]) -> str:
    parts = []
    for method, grid in grids.items():
        rows = "; ".join(
            f"{bits_text(row.paid_bits)} bits {fixed(row.score)}"
            + (f", KL {divergence(row.kl)}" if known(row.kl) else "")
            for row in grid
        )
        parts.append(f"{clean(method)}: {rows}")
    return f"{_TITLE}. {'. '.join(parts)}."
