"""The figures of a report, drawn from the report alone."""

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter

from semkv_bench.report.effective_bits import paint_quality
from semkv_bench.report.evictor_figure import draw_evictors, draw_reads
from semkv_bench.report.formatting import (
    CLIFF_MEANS,
    bits_text,
    clean,
    cliff_text,
    divergence,
    effective_text,
    fixed,
    known,
    p_value,
    percent,
    shorten,
    signed,
)
from semkv_bench.report.lookup import cliffs_of, reference_row, tested_settings
from semkv_bench.report.marks import (
    SMALL,
    draw_grid_lines,
    draw_legend,
    draw_marks,
    draw_series,
    margin_band,
    reference_line,
    series_of,
    spread,
)
from semkv_bench.report.method_figure import draw_methods
from semkv_bench.report.place_figure import draw_places
from semkv_bench.report.plot_style import (
    PALETTE,
    Drawn,
    drawing,
    freeze_layout,
    hover,
    new_figure,
    png_bytes,
    set_bits_axis,
    svg_text,
)
from semkv_bench.report.rankings_turns import draw_rankings, draw_turns
from semkv_bench.stats.result import Cliff, Report, SettingResult

__all__ = ["FIGURE_NAMES", "GRID_FIGURES", "Drawn", "draw_all"]

_BITS_LABEL = "code bits per value, log2(L)"
_ENGINE_BITS_LABEL = "bits per value, as the engine stores it"
_LONGEST_TICK = 12


def draw_all(report: Report) -> list[Drawn]:
    """Draw every figure the report has numbers for."""
    return [drawn for name in FIGURE_NAMES if (drawn := _draw(name, report)) is not None]


def _draw(name: str, report: Report) -> Drawn | None:
    if name in _PANELS:
        return _PANELS[name](report)
    painter = _PAINTERS[name]
    points = [row for row in tested_settings(report) if painter.has(row)]
    if not points:
        return None
    engine = report.protocol == "engine" and painter.x_label == _BITS_LABEL
    with drawing(f"semkv-bench {name}"):
        x_label = _ENGINE_BITS_LABEL if engine else painter.x_label
        figure, axes = new_figure(painter.title, x_label, painter.y_label)
        painter.paint(report, points, axes)
        draw_legend(figure, axes)
        freeze_layout(figure)
        written = f"{painter.title}. " + "; ".join(
            f"{clean(row.setting)} {painter.words(row)}" for row in points
        )
        reference = reference_row(report)
        if reference is not None and painter.words(reference):
            written += f"; {clean(reference.setting)} {painter.words(reference)}"
        return Drawn(name, painter.title, f"{written}.", svg_text(figure), png_bytes(figure))


def _paint_score(report: Report, points: list[SettingResult], axes: Axes) -> None:
    reference = reference_row(report)
    if reference is not None:
        margin_band(axes, report, reference.score)
        if all(known(end) for end in reference.score_ci) and len(set(reference.score_ci)) == 2:
            axes.axhspan(
                *reference.score_ci, color=PALETTE["muted"], alpha=0.14, lw=0, label="interval of full"
            )
        reference_line(axes, reference.score, fixed(reference.score))
    _bits_axis(report, points, axes)
    draw_series(axes, points, spread(points, "code_bits"), "score", "score_ci")
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))


def _paint_difference(report: Report, points: list[SettingResult], axes: Axes) -> None:
    margin_band(axes, report, 0.0)
    axes.axhline(0, color=PALETTE["ink"], lw=1.2)
    _bits_axis(report, points, axes)
    places = spread(points, "code_bits")
    draw_grid_lines(axes, points, places, "diff")
    for verdict, (marker, colour, filled) in _VERDICT_MARKS.items():
        rows = [row for row in points if row.verdict == verdict]
        if rows:
            draw_marks(
                axes,
                rows,
                (places, "diff", "diff_ci"),
                (marker, colour),
                verdict,
                lambda row, f=filled: f,
            )


_VERDICT_MARKS = {
    "equivalent": ("o", "green", True),
    "no_worse": ("s", "green", True),
    "floor": ("^", "sky", True),
    "inconclusive": ("o", "muted", False),
    "insensitive": ("D", "muted", False),
    "degraded": ("v", "vermillion", True),
}


def _paint_runaway(report: Report, points: list[SettingResult], axes: Axes) -> None:
    reference = reference_row(report)
    if reference is not None and known(reference.runaway_rate):
        reference_line(axes, reference.runaway_rate, percent(reference.runaway_rate))
    _bits_axis(report, points, axes)
    places = spread(points, "code_bits")
    alpha = report.alpha
    draw_grid_lines(axes, points, places, "runaway_rate")
    tested = [row for row in points if known(row.runaway_p) and row.runaway_p < alpha]
    rest = [row for row in points if row not in tested]
    ends = (places, "runaway_rate", None)
    if tested:
        draw_marks(
            axes,
            tested,
            ends,
            ("o", "blue"),
            f"differs from full (exact McNemar p < {alpha:g})",
            lambda row: True,
        )
    if rest:
        draw_marks(axes, rest, ends, ("o", "blue"), "not shown to differ", lambda row: False)
    rates = [row.runaway_rate for row in (*points, reference) if row and known(row.runaway_rate)]
    top = max(0.1, *rates) * 1.1
    axes.set_ylim(-0.03 * top, top)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")


def _paint_divergence(report: Report, points: list[SettingResult], axes: Axes) -> None:
    _bits_axis(report, points, axes)
    places = spread(points, "code_bits")
    positive = [row for row in points if row.kl > 0]
    zeros = [row for row in points if row.kl <= 0]
    values = [row.kl for row in positive]
    logarithmic = bool(values) and max(values) > 10 * min(values)
    if logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_ylim(min(values) / (6 if zeros else 2), max(values) * 2)
    draw_series(axes, positive if logarithmic else points, places, "kl", "kl_ci")
    if logarithmic and zeros:
        floor = [axes.get_ylim()[0] * 1.25] * len(zeros)
        x = [places[row.setting] for row in zeros]
        axes.plot(
            x,
            floor,
            "v",
            ms=SMALL + 1,
            mec=PALETTE["ink"],
            mfc=PALETTE["surface"],
            label="exactly 0 (off the log axis)",
        )
    if not logarithmic:
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))


def _paint_agreement(report: Report, points: list[SettingResult], axes: Axes) -> None:
    _bits_axis(report, points, axes)
    places = spread(points, "code_bits")
    if len(series_of(points)) == 1 and any(row.parting for row in points):
        _paint_parting(points, places, axes)
    draw_series(axes, points, places, "agreement", "agreement_ci")
    axes.set_ylim(-0.03, 1.03)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")


_PARTINGS = {
    "by_token": ("purple", -1, "answers that part by another token"),
    "by_end": ("orange", 1, "answers that part by an end"),
}


def _paint_parting(points: list[SettingResult], places: dict[str, float], axes: Axes) -> None:
    """How many answers part, and how, beside the marks of agreement."""
    points = [row for row in points if row.parting is not None]
    aside = 0.008 * (max(places.values()) - min(places.values()))
    for name, (colour, side, label) in _PARTINGS.items():
        x = [places[row.setting] + side * aside for row in points]
        axes.plot(
            x, [getattr(row.parting, name) for row in points], ":", marker=".", ms=4, lw=0.9, color=PALETTE[colour],
            label=label, zorder=1,
        )  # fmt: skip
        for place, row in zip(x, points, strict=True):
            ends = getattr(row.parting, f"{name}_ci")
            axes.plot([place] * 2, ends, color=PALETTE[colour], lw=0.9, alpha=0.6, zorder=1)


def _coded(row: SettingResult) -> bool:
    """Whether a setting has a place on the axis of code bits; pruned ones code nothing."""
    return row.kind not in ("prune", "read") and known(row.code_bits)


def _agreement_words(row: SettingResult) -> str:
    if not known(row.agreement):
        return ""
    parting = row.parting
    words = (
        f" (part by a token {percent(parting.by_token)}, by an end {percent(parting.by_end)})"
        if parting
        else ""
    )
    return percent(row.agreement) + words


@dataclass(frozen=True)
class _Painter:
    title: str
    x_label: str
    y_label: str
    has: Callable[[SettingResult], bool]
    words: Callable[[SettingResult], str]
    paint: Callable[[dict, list[SettingResult], Axes], None]


_PAINTERS = {
    "score_vs_bits": _Painter(
        "Score against bits",
        _BITS_LABEL,
        "score (0 to 1)",
        lambda row: _coded(row) and known(row.score),
        lambda row: fixed(row.score),
        _paint_score,
    ),
    "difference_vs_bits": _Painter(
        "Paired difference from full",
        _BITS_LABEL,
        "score difference (0 to 1 scale)",
        lambda row: _coded(row) and known(row.diff),
        lambda row: f"{signed(row.diff)} ({row.verdict})" if known(row.diff) else "",
        _paint_difference,
    ),
    "quality_vs_effective_bits": _Painter(
        "Quality against stored bits",
        "coded part: effective bits per value (codes and metadata)",
        "score (0 to 1)",
        lambda row: known(row.effective_bits) and known(row.score),
        lambda row: f"{fixed(row.score)} at {effective_text(row.effective_bits)} bits",
        paint_quality,
    ),
    "runaway_vs_bits": _Painter(
        "Runaway generations against bits",
        _BITS_LABEL,
        "runaway generations",
        lambda row: _coded(row) and known(row.runaway_rate),
        lambda row: (
            percent(row.runaway_rate)
            + (f" (exact McNemar p {p_value(row.runaway_p)})" if known(row.runaway_p) else "")
        ),
        _paint_runaway,
    ),
    "agreement_vs_bits": _Painter(
        "Answers equal to full's",
        _BITS_LABEL,
        "share equal from the start",
        lambda row: _coded(row) and known(row.agreement),
        _agreement_words,
        _paint_agreement,
    ),
    "kl_vs_bits": _Painter(
        "KL divergence from full against bits",
        _BITS_LABEL,
        "KL divergence (nats per token)",
        lambda row: _coded(row) and known(row.kl),
        lambda row: divergence(row.kl) if known(row.kl) else "",
        _paint_divergence,
    ),
}
_PANELS = {
    "methods_vs_cache_bits": draw_methods,
    "evictors_vs_cache_bits": draw_evictors,
    "score_vs_read_bits": draw_reads,
    "metric_ranking": draw_rankings,
    "loss_by_place": draw_places,
    "turns": draw_turns,
}
GRID_FIGURES = tuple(_PAINTERS)
FIGURE_NAMES = (*GRID_FIGURES, *_PANELS)


def _bits_axis(report: Report, points: list[SettingResult], axes: Axes) -> None:
    """Limits and ticks of the bits axis, and the shaded cliff."""
    grid: dict[float, list[SettingResult]] = {}
    for row in [row for row in points if row.kind == "uniform"] or points:
        grid.setdefault(row.code_bits, []).append(row)
    everything = [row.code_bits for row in points]
    span = max(everything) - min(everything)
    pad = 0.06 * span if span else 0.5
    axes.set_xlim(min(everything) - pad, max(everything) + pad)
    bits = sorted(grid)
    labels = [_tick_label(grid[value]) for value in bits]
    cliffs = cliffs_of(report)
    first = [getattr(cliff, f"{end}_bits") for _, cliff in cliffs for end in ("lower", "upper")]
    set_bits_axis(axes, bits, labels, first)
    for quantizer, cliff in cliffs:
        own = (s.colour for s in series_of(points) if s.kind == "uniform" and s.quantizer == quantizer)
        colour = "vermillion" if len(cliffs) == 1 else next(own, "muted")
        _shade_cliff(axes, cliff, colour, quantizer if len(cliffs) > 1 else None)
        _mark_steepest(axes, cliff, colour)


def _tick_label(rows: list[SettingResult]) -> str:
    """Bits of a grid point, under its levels or its name where all settings there share them."""
    bits = f"{rows[0].code_bits:.3f}".rstrip("0").rstrip(".")
    names = {_point_name(row) for row in rows}
    name = names.pop() if len(names) == 1 else ""
    return f"{bits} ({name})" if name else bits


def _point_name(row: SettingResult) -> str:
    if row.levels and row.kind == "uniform":
        return f"L={row.levels}"
    return shorten(clean(row.setting), _LONGEST_TICK) if row.kind == "uniform" else ""


def _shade_cliff(axes: Axes, cliff: Cliff, colour: str, quantizer: str | None) -> None:
    """Shade a cliff; named above the axes, or in the legend where there are several."""
    left, right = axes.get_xlim()
    low = cliff.lower_bits if known(cliff.lower_bits) else left
    high = cliff.upper_bits if known(cliff.upper_bits) else right
    low, high = max(low, left), min(high, right)
    if cliff.status == "undetermined" or not low < high:
        return
    name = f"cliff, {shorten(clean(quantizer), 20)}" if quantizer else None
    band = axes.axvspan(low, high, color=PALETTE[colour], alpha=0.13, lw=0, label=name)
    place = cliff_text(cliff.status, cliff.lower_bits, cliff.upper_bits)
    hover(band, f"cliff, code bits: {place}. {CLIFF_MEANS}")
    if name is None:
        _above((low + high) / 2, "cliff", colour, axes)


def _mark_steepest(axes: Axes, cliff: Cliff, colour: str) -> None:
    """Where the averages fall most between two grid points, as a bracket above the axes."""
    fall = cliff.steepest
    if fall is None:
        return
    (line,) = axes.plot(
        [fall.lower_bits, fall.upper_bits],
        [1.0, 1.0],
        color=PALETTE[colour],
        lw=2.5,
        solid_capstyle="butt",
        clip_on=False,
        transform=axes.get_xaxis_transform(),
        label=f"steepest fall, {bits_text(fall.upper_bits)} to {bits_text(fall.lower_bits)} bits",
    )
    hover(line, f"steepest fall: {signed(-fall.drop)} from {fall.upper_setting} to {fall.lower_setting}")


def _above(place: float, words: str, colour: str, axes: Axes) -> None:
    axes.text(
        place,
        1.02,
        words,
        color=PALETTE[colour],
        ha="center",
        va="bottom",
        fontsize=9,
        fontweight="bold",
        transform=axes.get_xaxis_transform(),
    )
