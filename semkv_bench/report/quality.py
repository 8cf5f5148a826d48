"""The figure of quality against effective bits: the grid, mixes on the lines between their ends, pruning."""

from matplotlib.axes import Axes

from semkv_bench.report.access import reference_row
from semkv_bench.report.axes import PALETTE, free_row
from semkv_bench.report.formatting import clean, effective_text, fixed, known, shorten
from semkv_bench.report.marks import SMALL, draw_series, margin_band, reference_line, spread
from semkv_bench.stats.equivalence import HOLDS
from semkv_bench.stats.result import Report, SettingResult

__all__ = ["paint_quality"]

_MOST_ROWS = 3


def paint_quality(report: Report, points: list[SettingResult], axes: Axes) -> None:
    """Score of ``points`` against their effective bits."""
    reference = reference_row(report)
    if reference is not None:
        margin_band(axes, report, reference.score)
        reference_line(axes, reference.score, fixed(reference.score))
    _lines_between_ends(report, points, axes)
    placed = spread(points, "effective_bits")
    draw_series(
        axes, placed, "effective_bits", "score", "score_ci", lambda row: row.verdict in HOLDS, joined=False
    )
    axes.plot(
        [], [], "o", ms=SMALL, mec=PALETTE["ink"], mfc=PALETTE["surface"], label="hollow: not shown to hold"
    )
    _ring(report, placed, points, axes)
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.margins(x=0.08)
    if any(row.effective_bits != moved.effective_bits for row, moved in zip(points, placed, strict=True)):
        axes.set_xlabel(f"{axes.get_xlabel()}; equal bits side by side")
    _name_groups(points, axes)


def _ring(report: Report, placed: list[SettingResult], points: list[SettingResult], axes: Axes) -> None:
    """The operating point, ringed and named in the legend."""
    point = report.operating_point
    for row, moved in zip(points, placed, strict=True):
        if point and row.setting == point.setting:
            name = shorten(clean(row.setting), 28)
            axes.plot(
                moved.effective_bits,
                row.score,
                "o",
                ms=11,
                mfc="none",
                mec=PALETTE["vermillion"],
                mew=1.8,
                label=f"operating point:\n{name}, {effective_text(row.effective_bits)} bits",
            )


def _lines_between_ends(report: Report, points: list[SettingResult], axes: Axes) -> None:
    rows = {row.setting: row for row in points}
    ends = dict.fromkeys(
        (row.low_setting, row.high_setting)
        for row in report.interpolation
        if row.low_setting in rows and row.high_setting in rows
    )
    for low, high in ends:
        axes.plot(
            [rows[low].effective_bits, rows[high].effective_bits],
            [rows[low].score, rows[high].score],
            color=PALETTE["muted"],
            lw=1.0,
            ls=(0, (1, 1.6)),
            zorder=1.5,
            label="line between a mix's ends",
        )


def _name_groups(points: list[SettingResult], axes: Axes) -> None:
    """Name allocations above the axes, in rows that do not overlap; those that do not fit stay unnamed."""
    places: dict[str, float] = {}
    for row in points:
        if row.allocation:
            places.setdefault(_short_name(row, points), row.effective_bits)
    if not places or not all(known(place) for place in places.values()):
        return
    figure = axes.get_figure()
    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()
    rows: list[list] = [[] for _ in range(_MOST_ROWS)]
    texts = []
    for name, place in sorted(places.items(), key=lambda item: (item[1], item[0])):
        text = axes.annotate(
            name,
            (place, 1.0),
            xycoords=axes.get_xaxis_transform(),
            xytext=(0, 2),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=7,
            color=PALETTE["muted"],
        )
        box = text.get_window_extent(renderer)
        level = free_row(rows, box, gap=4 * figure.dpi / 72)
        if level is None:
            text.remove()
            continue
        rows[level].append(box)
        text.set_position((0, 2 + 9 * level))
        texts.append(level)
    axes.set_title(axes.get_title(loc="left"), loc="left", pad=8 + 9 * (1 + max(texts, default=0)))


def _short_name(row: SettingResult, points: list[SettingResult]) -> str:
    """``25%`` where all mixes share their levels, ``16/5 25%`` otherwise, ``keep 25%`` for pruning."""
    own = row.allocation
    if own.keep is not None:
        return f"keep {100 * own.keep:g}%"
    levels = {
        (other.allocation.high, other.allocation.low)
        for other in points
        if other.allocation is not None and other.allocation.keep is None
    }
    fraction = f"{100 * own.fraction:g}%"
    return fraction if len(levels) == 1 else f"{own.high}/{own.low} {fraction}"
