"""The figures of a report, drawn from the report alone."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from semkv_bench.report.access import cliffs_of, quantizer_of, reference_row, tested_settings
from semkv_bench.report.axes import (
    PALETTE,
    SERIES_COLOURS,
    drawing,
    new_figure,
    png_bytes,
    set_bits_axis,
    settle,
    svg_text,
)
from semkv_bench.report.formatting import (
    clean,
    divergence,
    effective_text,
    fixed,
    known,
    levels_of,
    percent,
    shorten,
    signed,
)
from semkv_bench.report.verdict import HOLDS

__all__ = ["FIGURE_NAMES", "Drawn", "draw_all"]

_MARKERS = {"uniform": "o", "mixed": "D", "prune": "s"}
_BITS_LABEL = "code bits per value, log2(L)"
_SMALL = 5.5


@dataclass(frozen=True)
class Drawn:
    """A finished figure: file stem, title, text for those who cannot see it, SVG and PNG."""

    name: str
    title: str
    description: str
    svg: str
    png: bytes


def draw_all(report: dict) -> list[Drawn]:
    """Draw every figure the report has numbers for."""
    return [drawn for name in FIGURE_NAMES if (drawn := _draw(name, report)) is not None]


def _draw(name: str, report: dict) -> Drawn | None:
    painter = _PAINTERS[name]
    points = [row for row in tested_settings(report) if painter.has(row)]
    if not points:
        return None
    with drawing(f"semkv-bench {name}"):
        figure, axes = new_figure(painter.title, painter.x_label, painter.y_label)
        painter.paint(report, points, axes)
        _legend(figure, axes)
        settle(figure)
        written = f"{painter.title}. " + "; ".join(
            f"{clean(row['setting'])} {painter.words(row)}" for row in points
        )
        reference = reference_row(report)
        if reference is not None and painter.words(reference):
            written += f"; {clean(reference['setting'])} {painter.words(reference)}"
        return Drawn(name, painter.title, f"{written}.", svg_text(figure), png_bytes(figure))


def _paint_score(report: dict, points: list[dict], axes: Axes) -> None:
    reference = reference_row(report)
    if reference is not None:
        _margin_band(axes, report, reference["score"])
        if all(known(end) for end in reference["score_ci"]) and len(set(reference["score_ci"])) == 2:
            axes.axhspan(
                *reference["score_ci"], color=PALETTE["muted"], alpha=0.14, lw=0, label="interval of full"
            )
        _reference_line(axes, reference["score"], fixed(reference["score"]))
    _bits_axis(report, points, axes)
    _series(axes, points, "code_bits", "score", "score_ci")
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))


def _paint_difference(report: dict, points: list[dict], axes: Axes) -> None:
    _margin_band(axes, report, 0.0)
    axes.axhline(0, color=PALETTE["ink"], lw=1.2)
    _bits_axis(report, points, axes)
    _grid_lines(axes, points, "code_bits", "diff")
    for verdict, (marker, colour, filled) in _VERDICT_MARKS.items():
        rows = [row for row in points if row["verdict"] == verdict]
        if rows:
            _marks(
                axes,
                rows,
                ("code_bits", "diff", "diff_ci"),
                (marker, colour),
                verdict,
                lambda row, f=filled: f,
            )


_VERDICT_MARKS = {
    "equivalent": ("o", "green", True),
    "floor": ("^", "sky", True),
    "inconclusive": ("o", "muted", False),
    "insensitive": ("D", "muted", False),
    "degraded": ("v", "vermillion", True),
}


def _paint_runaway(report: dict, points: list[dict], axes: Axes) -> None:
    reference = reference_row(report)
    if reference is not None and known(reference["runaway_rate"]):
        _reference_line(axes, reference["runaway_rate"], percent(reference["runaway_rate"]))
    _bits_axis(report, points, axes)
    alpha = report["alpha"]
    _grid_lines(axes, points, "code_bits", "runaway_rate")
    tested = [row for row in points if known(row["runaway_p"]) and row["runaway_p"] < alpha]
    rest = [row for row in points if row not in tested]
    ends = ("code_bits", "runaway_rate", None)
    if tested:
        _marks(axes, tested, ends, ("o", "blue"), f"differs from full (p < {alpha:g})", lambda row: True)
    if rest:
        _marks(axes, rest, ends, ("o", "blue"), "not shown to differ", lambda row: False)
    rates = [row["runaway_rate"] for row in (*points, reference) if row and known(row["runaway_rate"])]
    top = max(0.1, *rates) * 1.06
    axes.set_ylim(-0.03 * top, top)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")


def _paint_divergence(report: dict, points: list[dict], axes: Axes) -> None:
    _bits_axis(report, points, axes)
    positive = [row for row in points if row["kl"] > 0]
    zeros = [row for row in points if row["kl"] <= 0]
    values = [row["kl"] for row in positive]
    logarithmic = bool(values) and max(values) > 10 * min(values)
    if logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_ylim(min(values) / (6 if zeros else 2), max(values) * 2)
    _series(axes, positive if logarithmic else points, "code_bits", "kl", None)
    if logarithmic and zeros:
        floor = [axes.get_ylim()[0] * 1.25] * len(zeros)
        x = [row["code_bits"] for row in zeros]
        axes.plot(
            x,
            floor,
            "v",
            ms=_SMALL + 1,
            mec=PALETTE["ink"],
            mfc=PALETTE["surface"],
            label="exactly 0 (off the log axis)",
        )
    if not logarithmic:
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))


def _paint_quality(report: dict, points: list[dict], axes: Axes) -> None:
    reference = reference_row(report)
    if reference is not None:
        _margin_band(axes, report, reference["score"])
        _reference_line(axes, reference["score"], fixed(reference["score"]))
    _series(
        axes, points, "effective_bits", "score", "score_ci", lambda row: row["verdict"] in HOLDS, joined=False
    )
    axes.plot(
        [], [], "o", ms=_SMALL, mec=PALETTE["ink"], mfc=PALETTE["surface"], label="hollow: not shown to hold"
    )
    point = report["operating_point"]
    row = next((row for row in points if point and row["setting"] == point["setting"]), None)
    if row is not None:
        name = shorten(clean(row["setting"]), 28)
        words = f"operating point:\n{name}, {effective_text(row['effective_bits'])} bits"
        axes.plot(
            row["effective_bits"],
            row["score"],
            "o",
            ms=11,
            mfc="none",
            mec=PALETTE["vermillion"],
            mew=1.8,
            label=words,
        )
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.margins(x=0.08)


@dataclass(frozen=True)
class _Painter:
    title: str
    x_label: str
    y_label: str
    has: Callable[[dict], bool]
    words: Callable[[dict], str]
    paint: Callable[[dict, list[dict], Axes], None]


_PAINTERS = {
    "score_vs_bits": _Painter(
        "Score against bits",
        _BITS_LABEL,
        "score (0 to 1)",
        lambda row: known(row["code_bits"]) and known(row["score"]),
        lambda row: fixed(row["score"]),
        _paint_score,
    ),
    "difference_vs_bits": _Painter(
        "Paired difference from full",
        _BITS_LABEL,
        "score difference (0 to 1 scale)",
        lambda row: known(row["code_bits"]) and known(row["diff"]),
        lambda row: f"{signed(row['diff'])} ({row['verdict']})" if known(row["diff"]) else "",
        _paint_difference,
    ),
    "quality_vs_effective_bits": _Painter(
        "Quality against effective bits",
        "effective bits per value (codes and metadata)",
        "score (0 to 1)",
        lambda row: known(row["effective_bits"]) and known(row["score"]),
        lambda row: f"{fixed(row['score'])} at {effective_text(row['effective_bits'])} bits",
        _paint_quality,
    ),
    "runaway_vs_bits": _Painter(
        "Runaway generations against bits",
        _BITS_LABEL,
        "runaway generations",
        lambda row: known(row["code_bits"]) and known(row["runaway_rate"]),
        lambda row: percent(row["runaway_rate"]),
        _paint_runaway,
    ),
    "kl_vs_bits": _Painter(
        "KL divergence from full against bits",
        _BITS_LABEL,
        "KL divergence (nats per token)",
        lambda row: known(row["code_bits"]) and known(row["kl"]),
        lambda row: divergence(row["kl"]) if known(row["kl"]) else "",
        _paint_divergence,
    ),
}
FIGURE_NAMES = tuple(_PAINTERS)


def _margin_band(axes: Axes, report: dict, centre: float) -> None:
    low, high = centre - report["margin"], centre + report["margin"]
    words = f"margin (full ± {report['margin']:g})"
    axes.axhspan(low, high, color=PALETTE["green"], alpha=0.16, lw=0, label=words)


def _reference_line(axes: Axes, value: float, words: str) -> None:
    axes.axhline(value, color=PALETTE["ink"], lw=1.2, ls=(0, (5, 3)), label=f"full (16 bits): {words}")


def _bits_axis(report: dict, points: list[dict], axes: Axes) -> None:
    """Limits and ticks of the bits axis, and the shaded cliff."""
    grid = {row["code_bits"]: row for row in points if row["kind"] == "uniform"} or {
        row["code_bits"]: row for row in points
    }
    everything = [row["code_bits"] for row in points]
    span = max(everything) - min(everything)
    pad = 0.06 * span if span else 0.5
    axes.set_xlim(min(everything) - pad, max(everything) + pad)
    bits = sorted(grid)
    labels = [_tick_label(grid[value]) for value in bits]
    cliffs = cliffs_of(report)
    first = [cliff[f"{end}_bits"] for _, cliff in cliffs for end in ("lower", "upper")]
    set_bits_axis(axes, bits, labels, first)
    for quantizer, cliff in cliffs:
        colour = "vermillion" if len(cliffs) == 1 else _colours(points).get((quantizer, "uniform"), "muted")
        _shade_cliff(axes, cliff, colour, quantizer if len(cliffs) > 1 else None)


def _tick_label(row: dict) -> str:
    levels = levels_of(row["setting"], row["code_bits"], row["kind"])
    bits = f"{row['code_bits']:.3f}".rstrip("0").rstrip(".")
    return f"L={levels}\n{bits}" if levels else bits


def _shade_cliff(axes: Axes, cliff: dict, colour: str, quantizer: str | None) -> None:
    """Shade a cliff; named above the axes, or in the legend where there are several."""
    left, right = axes.get_xlim()
    low = cliff["lower_bits"] if known(cliff["lower_bits"]) else left
    high = cliff["upper_bits"] if known(cliff["upper_bits"]) else right
    low, high = max(low, left), min(high, right)
    if cliff["status"] == "undetermined" or not low < high:
        return
    name = f"cliff, {shorten(clean(quantizer), 20)}" if quantizer else None
    axes.axvspan(low, high, color=PALETTE[colour], alpha=0.13, lw=0, label=name)
    if name is None:
        axes.text(
            (low + high) / 2,
            1.02,
            "cliff",
            color=PALETTE[colour],
            ha="center",
            va="bottom",
            fontsize=9,
            fontweight="bold",
            transform=axes.get_xaxis_transform(),
        )


def _colours(points: list[dict]) -> dict[tuple[str | None, str], str]:
    """A colour for every series; a series is a quantizer and a kind of setting."""
    series = dict.fromkeys((quantizer_of(row), row["kind"]) for row in points)
    return {key: SERIES_COLOURS[number % len(SERIES_COLOURS)] for number, key in enumerate(series)}


def _groups(points: list[dict]) -> list[tuple[str, str, str, list[dict]]]:
    """Label, kind, colour and rows of every series, the rows from few bits to many."""
    several = len({quantizer_of(row) for row in points if row["kind"] == "uniform"}) > 1
    groups = []
    for (quantizer, kind), colour in _colours(points).items():
        label = f"{shorten(clean(quantizer), 20)}, {kind}" if several and quantizer else kind
        rows = [row for row in points if (quantizer_of(row), row["kind"]) == (quantizer, kind)]
        groups.append((label, kind, colour, rows[::-1]))
    return groups


def _series(axes, points, x, y, bounds, filled=lambda row: True, joined=True) -> None:
    for label, kind, colour, rows in _groups(points):
        if joined and kind == "uniform":
            _line(axes, rows, x, y, colour, 1.4)
        _marks(axes, rows, (x, y, bounds), (_MARKERS[kind], colour), label, filled)


def _grid_lines(axes, points, x, y) -> None:
    """Lines through the grid; in the quantizers' colours where there are several."""
    grids = [group for group in _groups(points) if group[1] == "uniform"]
    for label, _, colour, rows in grids:
        if len(grids) > 1:
            _line(axes, rows, x, y, colour, 1.4, label)
        else:
            _line(axes, rows, x, y, "muted", 1.0)


def _line(axes, rows, x, y, colour, width, label=None) -> None:
    values = [row[y] for row in rows]
    axes.plot([row[x] for row in rows], values, color=PALETTE[colour], lw=width, label=label, zorder=2)


def _marks(axes, rows, keys, mark, label, filled) -> None:
    """Points with their intervals; a hollow marker where ``filled(row)`` is false."""
    x, y, bounds = keys
    marker, colour = mark
    for row in rows if bounds else []:
        if all(known(end) for end in row[bounds]):
            axes.plot([row[x]] * 2, row[bounds], color=PALETTE[colour], lw=1.2, marker="_", ms=6, zorder=2)
    for full in (True, False):
        chosen = [row for row in rows if bool(filled(row)) is full]
        if chosen:
            axes.plot(
                [row[x] for row in chosen],
                [row[y] for row in chosen],
                marker,
                ms=_SMALL,
                mew=1.3,
                color=PALETTE[colour],
                mfc=PALETTE[colour] if full else PALETTE["surface"],
                zorder=3,
                label=label,
            )


def _legend(figure: Figure, axes: Axes) -> None:
    """A legend below the axes, where it covers nothing; each name once."""
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(reversed(labels), reversed(handles), strict=True))
    labels = list(dict.fromkeys(labels))
    longest = max((len(line) for label in labels for line in label.split("\n")), default=0)
    columns = 1 if longest > 44 else 2 if longest > 22 or math.ceil(len(labels) / 2) <= 2 else 3
    figure.legend(
        [once[label] for label in labels], labels, loc="outside lower center", ncols=columns, labelspacing=0.6
    )
