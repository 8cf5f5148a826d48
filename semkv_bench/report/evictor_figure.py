"""A curve for every evictor against what its cache costs, task by task; and scores against bits read a step."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from semkv_bench.report.formatting import bits_text, clean, fixed, known, shorten
from semkv_bench.report.lookup import reference_row
from semkv_bench.report.marks import SMALL, draw_legend
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

__all__ = ["draw_evictors", "draw_reads"]

_MARKERS = "osDv^P*X"
_STYLES = ("-", "--", ":")
_TITLE = "Evictors beside low precision"
_READ_TITLE = "Score against bits read a step"
_ALL = "all tasks"


def draw_evictors(report: Report) -> Drawn | None:
    """A panel for all tasks and one for each, a curve for every evictor and every metric that mixes levels.

    None where no evictor was run at two numbers of bits.
    """
    curves = _curves([row for row in report.settings if row.kind == "prune"])
    if not any(len(rows) > 1 for rows in curves.values()):
        return None
    curves |= _curves([row for row in report.settings if row.kind == "mixed"])
    tasks = {task: {name: row.score for name, row in found.items()} for task, found in report.tasks.items()}
    scores = {_ALL: {row.setting: row.score for row in report.settings}}
    scores |= tasks if len(tasks) > 1 else {}
    return _draw(
        report, "evictors_vs_cache_bits", _TITLE, curves, scores, "bits per value of the whole cache"
    )


def draw_reads(report: Report) -> Drawn | None:
    """Scores of what reads blocks, and of the grid, which reads all; None where all is read."""
    curves = _curves([row for row in report.settings if row.kind == "read"])
    if not curves:
        return None
    scores = {_ALL: {row.setting: row.score for row in report.settings}}
    return _draw(
        report, "score_vs_read_bits", _READ_TITLE, curves, scores, "bits per value that a step reads"
    )


def _curves(rows: Sequence[SettingResult]) -> dict[str, list[SettingResult]]:
    """Rows that differ in how much stays or is read, by what they share."""
    found: dict[str, list[SettingResult]] = {}
    for row in rows:
        if not known(_bits(row)):
            continue
        label = row.setting if row.allocation is None else row.allocation.metric
        if row.kind == "read":
            label = (
                "reads blocks" if row.quantizer is None else f"{row.quantizer} L{row.levels}, reads blocks"
            )
        elif row.kind == "mixed":
            label = f"{label}, all kept"
        elif row.levels:
            label = f"{label}, L{row.levels}"
        found.setdefault(clean(label), []).append(row)
    return {label: sorted(rows, key=_bits) for label, rows in sorted(found.items())}


def _bits(row: SettingResult) -> float | None:
    """Bits that a step reads where it does not read all, else of the whole cache, else of a value."""
    return next((bits for bits in (row.read_bits, row.cache_bits, row.effective_bits) if known(bits)), None)


def _draw(
    report: Report,
    name: str,
    title: str,
    curves: Mapping[str, list[SettingResult]],
    scores: Mapping[str, Mapping[str, float]],
    x_label: str,
) -> Drawn:
    grids: dict[str, list[SettingResult]] = {}
    for row in report.settings:
        if row.kind == "uniform" and known(_bits(row)):
            grids.setdefault(f"{clean(row.quantizer or 'grid')}, all kept", []).append(row)
    grids = {label: sorted(rows, key=_bits) for label, rows in grids.items()}
    with drawing(f"semkv-bench {name}"):
        figure = Figure(figsize=(FIGURE_SIZE[0], 3.2 * len(scores) + 0.8), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(len(scores), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (task, of) in zip(panels, scores.items(), strict=True):
            _paint(axes, grids, curves, of)
            reference = reference_row(report)
            if reference is not None and reference.setting in of:
                height = of[reference.setting]
                axes.axhline(height, color=PALETTE["ink"], lw=1.1, ls=(0, (5, 3)), label="full (16 bits)")
            axes.set_ylabel(shorten(f"score, {clean(task)}", 32))
            axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
            axes.grid(True)
        panels[-1].set_xlabel(x_label)
        draw_legend(figure, panels[0])
        figure.suptitle(title, x=0.01, ha="left", fontsize=10.5, fontweight="bold")
        freeze_layout(figure)
        words = (
            f"{title}. {'. '.join(_curve_text(label, rows) for label, rows in {**curves, **grids}.items())}."
        )
        return Drawn(name, title, words, svg_text(figure), png_bytes(figure))


def _paint(
    axes: Axes,
    grids: Mapping[str, list[SettingResult]],
    curves: Mapping[str, list[SettingResult]],
    scores: Mapping[str, float],
) -> None:
    for number, (label, rows) in enumerate([*grids.items(), *curves.items()]):
        points = [(_bits(row), scores[row.setting]) for row in rows if known(scores.get(row.setting))]
        place = number - len(grids)
        own = place < 0
        colour = PALETTE["ink"] if own else PALETTE[SERIES_COLOURS[place % len(SERIES_COLOURS)]]
        axes.plot(
            [bits for bits, _ in points],
            [score for _, score in points],
            color=colour,
            marker=_MARKERS[number % len(_MARKERS)],
            ls="-" if own else _STYLES[place // len(SERIES_COLOURS) % len(_STYLES)],
            ms=SMALL,
            lw=2.0 if own else 1.1,
            label=shorten(label, 34),
        )


def _curve_text(label: str, rows: Sequence[SettingResult]) -> str:
    return f"{label}: " + "; ".join(f"{bits_text(_bits(row))} bits {fixed(row.score)}" for row in rows)
