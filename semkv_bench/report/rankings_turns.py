"""Figures of several panels: importance metrics ranked, conversations turn by turn."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from semkv_bench.report.formatting import clean, fixed, known, shorten, signed
from semkv_bench.report.lookup import ordered_settings, telling_settings
from semkv_bench.report.marks import SMALL, place_legend
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
from semkv_bench.stats.further import Ranking, Turn
from semkv_bench.stats.result import Report

__all__ = ["draw_rankings", "draw_turns"]

_MOST_ROWS = 48
_MOST_LINES = 8
_TURN_MARKERS = "osD"
_ROW = 0.2  # inches
_HEAD = 0.42


def draw_rankings(report: Report) -> Drawn | None:
    """Dots with intervals, one panel per allocation: each metric's difference from the control, or the best."""
    groups = report.rankings
    if not groups:
        return None
    shown = _that_fit(groups)
    heights = [_HEAD + _ROW * len(group.metrics) for group in shown]
    title = "Importance metrics ranked"
    with drawing("semkv-bench metric_ranking"):
        figure = Figure(figsize=(FIGURE_SIZE[0], sum(heights) + 0.9), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(len(shown), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        for group, axes in zip(shown, panels, strict=True):
            _paint_group(group, axes)
        against = {group.control for group in shown}
        panels[-1].set_xlabel(
            f"score difference from {_zero(against)}\nblue: no metric is shown to be better"
        )
        more = (
            f" ({len(groups) - len(shown)} more allocations in the tables)"
            if len(shown) < len(groups)
            else ""
        )
        figure.suptitle(title + more, x=0.01, ha="left", fontsize=10.5, fontweight="bold")
        freeze_layout(figure)
        return Drawn(
            "metric_ranking", title, _description(title, groups), svg_text(figure), png_bytes(figure)
        )


def _zero(controls: set[str | None]) -> str:
    """What the differences of all panels are taken from, in words."""
    if controls == {None}:
        return "the best metric"
    return clean(next(iter(controls))) if len(controls) == 1 else "the hollow one"


def _that_fit(groups: Sequence[Ranking]) -> list[Ranking]:
    """The first groups, as many as one figure holds; at least one."""
    shown, rows = [], 0
    for group in groups:
        rows += len(group.metrics) + 2
        if shown and rows > _MOST_ROWS:
            break
        shown.append(group)
    return shown


def _paint_group(group: Ranking, axes: Axes) -> None:
    name = "random" if group.control else "best"
    zero = group.control or group.best
    axes.axvline(0, color=PALETTE["ink"], lw=1.1, ls=(0, (5, 3)))
    labels = []
    for place, row in enumerate(group.metrics):
        diff, ends = getattr(row, f"diff_{name}"), getattr(row, f"diff_{name}_ci")
        if row.metric == zero:
            diff = 0.0
        first = row.rank[0] == 1
        colour = PALETTE["blue"] if first else PALETTE["muted"]
        if all(known(end) for end in ends):
            axes.plot(ends, [place, place], color=colour, lw=1.6, solid_capstyle="butt")
        if known(diff):
            axes.plot(
                diff,
                place,
                "o",
                ms=SMALL,
                color=colour,
                mfc=colour if row.metric != zero else PALETTE["surface"],
            )
        labels.append(shorten(clean(row.metric), 30))
        axes.annotate(
            f"{fixed(row.score)}  {row.letters}",
            (1.0, place),
            xycoords=axes.get_yaxis_transform(),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            color=PALETTE["ink"],
            annotation_clip=False,
        )
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.grid(True, axis="x")
    axes.tick_params(axis="y", length=0)
    axes.set_title(clean(group.group), loc="left", fontsize=9, pad=4)
    axes.annotate(
        "score, group",
        (1.0, 1.0),
        xycoords="axes fraction",
        xytext=(44, 4),
        textcoords="offset points",
        ha="right",
        fontsize=7.5,
        color=PALETTE["muted"],
        annotation_clip=False,
    )


def _description(title: str, groups: Sequence[Ranking]) -> str:
    parts = []
    for group in groups:
        rows = "; ".join(
            f"{clean(row.metric)} {fixed(row.score)}"
            + (f" ({signed(row.diff_random)} from random)" if known(row.diff_random) else "")
            for row in group.metrics
        )
        parts.append(f"{clean(group.group)}: {rows}")
    return f"{title}. {'. '.join(parts)}."


def draw_turns(report: Report) -> Drawn | None:
    """Score, and difference from full precision, of the most telling settings turn by turn."""
    turns = report.turns
    if not turns:
        return None
    names = [name for name in telling_settings(report) if any(name in turn.settings for turn in turns)]
    shown = sorted(names[:_MOST_LINES], key=[row.setting for row in ordered_settings(report)].index)
    title = "Turn by turn"
    with drawing("semkv-bench turns"):
        figure = Figure(figsize=(FIGURE_SIZE[0], 5.6), layout="constrained")
        FigureCanvasAgg(figure)
        top, bottom = figure.subplots(2, 1, sharex=True)
        _paint_turns(report, turns, shown, top, bottom)
        handles = {
            label: handle
            for axes in (top, bottom)
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        place_legend(figure, handles)
        more = f" ({len(names) - len(shown)} more settings in the table)" if len(shown) < len(names) else ""
        figure.suptitle(title + more, x=0.01, ha="left", fontsize=10.5, fontweight="bold")
        freeze_layout(figure)
        return Drawn(
            "turns", title, _turns_description(title, turns, names), svg_text(figure), png_bytes(figure)
        )


def _paint_turns(report: Report, turns: Sequence[Turn], shown: list[str], top: Axes, bottom: Axes) -> None:
    reference = report.reference
    bottom.axhspan(
        -report.margin, report.margin, color=PALETTE["green"], alpha=0.16, lw=0,
        label=f"margin (full ± {report.margin:g})",
    )  # fmt: skip
    bottom.axhline(0, color=PALETTE["ink"], lw=1.2, ls=(0, (5, 3)))
    full = [(turn.turn + 1, turn.settings[reference].score) for turn in turns]
    top.plot(*zip(*full, strict=True), color=PALETTE["ink"], lw=1.4, ls=(0, (5, 3)), label="full (16 bits)")
    for k, name in enumerate(shown):
        offset = 0.5 * ((k + 0.5) / len(shown) - 0.5)
        here = [(turn.turn + 1 + offset, turn.settings[name]) for turn in turns if name in turn.settings]
        colour = PALETTE[SERIES_COLOURS[k % len(SERIES_COLOURS)]]
        look = {
            "color": colour,
            "marker": _TURN_MARKERS[k // len(SERIES_COLOURS) % 3],
            "ms": SMALL,
            "lw": 1.2,
        }
        x = [place for place, _ in here]
        top.plot(x, [result.score for _, result in here], **look, label=shorten(clean(name), 34))
        bottom.plot(x, [result.diff for _, result in here], **look)
        for place, result in here:
            if all(known(end) for end in result.diff_ci):
                bottom.plot([place] * 2, result.diff_ci, color=colour, lw=1.2)
    top.set_ylabel("score (0 to 1)")
    top.set_ylim(bottom=min(0.0, top.get_ylim()[0]))
    bottom.set_ylabel("difference from full")
    bottom.set_xlabel("turn")
    bottom.set_xticks([turn.turn + 1 for turn in turns])
    for axes in (top, bottom):
        axes.grid(True, axis="y")


def _turns_description(title: str, turns: Sequence[Turn], names: list[str]) -> str:
    parts = []
    for turn in turns:
        rows = "; ".join(
            f"{clean(name)} {fixed(turn.settings[name].score)} ({signed(turn.settings[name].diff)})"
            for name in names
            if name in turn.settings
        )
        parts.append(f"Turn {turn.turn + 1}: {rows}")
    return f"{title}. {'. '.join(parts)}."
