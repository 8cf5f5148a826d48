"""Points, lines, bands and legends that several figures share."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from semkv_bench.report.formatting import (
    bits_text,
    clean,
    effective_text,
    fixed,
    interval,
    known,
    p_value,
    shorten,
)
from semkv_bench.report.lookup import metric_of, quantizer_of
from semkv_bench.report.plot_style import PALETTE, SERIES_COLOURS, hover
from semkv_bench.stats.result import Report, SettingResult

__all__ = [
    "SMALL",
    "Series",
    "draw_grid_lines",
    "draw_legend",
    "draw_marks",
    "draw_series",
    "margin_band",
    "place_legend",
    "reference_line",
    "series_of",
    "spread",
]

SMALL = 5.5
_MARKERS = {"uniform": "o>h", "mixed": "D^v<", "prune": "sPXp", "read": "*+x1"}
_ALIKE = 0.012  # of the axis: markers would overlap
_STEP = 0.017  # of the axis: a marker and a little air
_LEGEND_ROW = 0.19  # inches
_ROWS_THAT_FIT = 4


@dataclass(frozen=True)
class Series:
    """Points that look alike: a quantizer's grid, or its mixes (or pruned settings) by one metric."""

    label: str
    kind: str
    quantizer: str | None
    colour: str
    marker: str
    rows: list[SettingResult]


def series_of(points: list[SettingResult]) -> list[Series]:
    """``points`` by quantizer, kind and metric, rows from few bits to many.

    A metric has one colour in all kinds; beyond the colours there are, the marker changes too.
    """
    several = len({quantizer_of(row) for row in points if row.kind == "uniform"}) > 1
    looks: dict[tuple, int] = {}
    found: dict[tuple, list[SettingResult]] = {}
    for row in sorted(points, key=lambda row: row.kind != "uniform"):
        look = (quantizer_of(row) if row.kind == "uniform" or several else None, metric_of(row))
        looks.setdefault(look, len(looks))
        found.setdefault((row.kind, *look), []).append(row)
    made = []
    for (kind, quantizer, metric), rows in found.items():
        turn, place = divmod(looks[quantizer, metric], len(SERIES_COLOURS))
        words = [shorten(clean(quantizer), 20)] if several and quantizer else []
        words += [kind] + ([shorten(clean(metric), 30)] if metric else [])
        marker = _MARKERS[kind][turn % len(_MARKERS[kind])]
        made.append(Series(", ".join(words), kind, quantizer, SERIES_COLOURS[place], marker, rows[::-1]))
    return made


def spread(points: list[SettingResult], x: str) -> dict[str, float]:
    """Places of ``points`` by setting: their ``x``, equal ones side by side; uniform settings stay where they are."""
    places = sorted({getattr(row, x) for row in points})
    span = places[-1] - places[0] if len(places) > 1 else 1.0
    columns: list[list[float]] = []
    for place in places:
        if columns and place - columns[-1][-1] < _ALIKE * span:
            columns[-1].append(place)
        else:
            columns.append([place])
    middles = [sum(column) / len(column) for column in columns]
    moved: dict[str, float] = {}
    for k, column in enumerate(columns):
        here = [row for row in points if getattr(row, x) in column]
        gaps = [abs(middles[k] - middles[n]) for n in (k - 1, k + 1) if 0 <= n < len(middles)]
        moved |= _side_by_side(here, middles[k], min(gaps, default=span), span)
    return {row.setting: moved.get(row.setting, getattr(row, x)) for row in points}


def _side_by_side(rows: list[SettingResult], middle: float, gap: float, span: float) -> dict[str, float]:
    movable = sorted(
        (row for row in rows if row.kind != "uniform"),
        key=lambda row: (row.kind, metric_of(row) or "", row.setting),
    )
    anchored = len(movable) < len(rows)
    if len(rows) < 2:
        return {}
    slots = [slot for slot in range(-len(movable), len(movable) + 1) if slot or not anchored]
    slots = sorted(slots, key=abs)[: len(movable)]
    centre = 0 if anchored else sum(slots) / len(slots)
    step = min(_STEP * span, 0.8 * gap / (len(movable) + 1))
    return {
        row.setting: middle + step * (slot - centre) for row, slot in zip(movable, sorted(slots), strict=True)
    }


def margin_band(axes: Axes, report: Report, centre: float) -> None:
    """The margin around ``centre``."""
    low, high = centre - report.margin, centre + report.margin
    words = f"margin (full ± {report.margin:g})"
    axes.axhspan(low, high, color=PALETTE["green"], alpha=0.16, lw=0, label=words)


def reference_line(axes: Axes, value: float, words: str) -> None:
    """The level of full precision."""
    axes.axhline(value, color=PALETTE["ink"], lw=1.2, ls=(0, (5, 3)), label=f"full (16 bits): {words}")


def draw_series(
    axes: Axes,
    points: list[SettingResult],
    x: dict[str, float],
    y: str,
    bounds: str | None,
    filled: Callable[[SettingResult], bool] = lambda row: True,
    joined: bool = True,
) -> None:
    """Every series of ``points`` at places ``x``, height ``y``, with intervals ``bounds``; grids ``joined``."""
    for series in series_of(points):
        if joined and series.kind == "uniform":
            _line(axes, series.rows, x, y, series.colour, 1.4)
        draw_marks(axes, series.rows, (x, y, bounds), (series.marker, series.colour), series.label, filled)


def draw_grid_lines(axes: Axes, points: list[SettingResult], x: dict[str, float], y: str) -> None:
    """Lines through the grid; in the quantizers' colours where there are several."""
    grids = [series for series in series_of(points) if series.kind == "uniform"]
    for series in grids:
        if len(grids) > 1:
            _line(axes, series.rows, x, y, series.colour, 1.4, series.label)
        else:
            _line(axes, series.rows, x, y, "muted", 1.0)


def _line(axes, rows, x, y, colour, width, label=None) -> None:
    values = [getattr(row, y) for row in rows]
    axes.plot(
        [x[row.setting] for row in rows], values, color=PALETTE[colour], lw=width, label=label, zorder=2
    )


def draw_marks(
    axes: Axes,
    rows: list[SettingResult],
    keys: tuple[dict[str, float], str, str | None],
    mark: tuple[str, str],
    label: str,
    filled: Callable[[SettingResult], bool],
) -> None:
    """Points with their intervals; a hollow marker where ``filled(row)`` is false.

    keys: places by setting, fields of the height and of its interval (None: no interval); mark: marker and colour.
    """
    x, y, bounds = keys
    marker, colour = mark
    for row in rows if bounds else []:
        if all(known(end) for end in getattr(row, bounds)):
            axes.plot(
                [x[row.setting]] * 2,
                getattr(row, bounds),
                color=PALETTE[colour],
                lw=1.2,
                marker="_",
                ms=4,
                zorder=2,
            )
    for row in rows:
        (point,) = axes.plot(
            x[row.setting],
            getattr(row, y),
            marker,
            ms=SMALL,
            mew=1.3,
            color=PALETTE[colour],
            mfc=PALETTE[colour] if filled(row) else PALETTE["surface"],
            zorder=3,
            label=label,
        )
        hover(point, _mark_title(row, y, bounds))


def _mark_title(row: SettingResult, y: str, bounds: str | None) -> str:
    """What a point says when the pointer rests on it."""
    words = f"{clean(row.setting)}: {y.replace('_', ' ')} {fixed(getattr(row, y))}"
    if bounds and all(known(end) for end in getattr(row, bounds)):
        words += f" {interval(getattr(row, bounds))}"
    bits = [f"{bits_text(row.code_bits)} code bits"] if known(row.code_bits) else []
    bits += [f"coded part {effective_text(row.effective_bits)} bits"] if known(row.effective_bits) else []
    bits += [f"whole cache {effective_text(row.cache_bits)} bits"] if known(row.cache_bits) else []
    chance = (
        f", exact McNemar p {p_value(row.runaway_p)}" if y == "runaway_rate" and known(row.runaway_p) else ""
    )
    return f"{words}{chance}; {', '.join([*bits, row.verdict])}"


def draw_legend(figure: Figure, axes: Axes) -> None:
    """A legend of one panel's names below the axes; each name once."""
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(reversed(labels), reversed(handles), strict=True))
    place_legend(figure, {label: once[label] for label in labels})


def place_legend(figure: Figure, handles: Mapping[str, Any]) -> None:
    """A legend of ``handles`` by their names below all panels, where it covers nothing.

    In the most columns, up to three, that the figure is wide enough for; one of many rows makes the figure taller.
    """
    width, height = figure.get_size_inches()
    for columns in (3, 2, 1):
        rows = math.ceil(len(handles) / columns)
        if columns == 3 and math.ceil(len(handles) / 2) <= _ROWS_THAT_FIT:
            continue  # two columns are easier to read
        legend = figure.legend(
            handles.values(), handles, loc="outside lower center", ncols=columns, labelspacing=0.6
        )
        drawn = legend.get_window_extent(figure.canvas.get_renderer())
        if columns == 1 or drawn.width <= figure.bbox.width:
            figure.set_size_inches(width, height + _LEGEND_ROW * max(0, rows - _ROWS_THAT_FIT))
            return
        legend.remove()
