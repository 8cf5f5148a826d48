"""Figures of several panels: importance metrics ranked."""

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from semkv_bench.report.axes import FIGURE_SIZE, PALETTE, Drawn, drawing, png_bytes, settle, svg_text
from semkv_bench.report.formatting import clean, fixed, known, shorten, signed
from semkv_bench.report.marks import SMALL

__all__ = ["draw_rankings"]

_MOST_ROWS = 48
_ROW = 0.2  # inches
_HEAD = 0.42


def draw_rankings(report: dict) -> Drawn | None:
    """Dots with intervals, one panel per allocation: each metric's difference from the control, or the best."""
    groups = report.get("rankings") or []
    if not groups:
        return None
    shown = _that_fit(groups)
    heights = [_HEAD + _ROW * len(group["metrics"]) for group in shown]
    title = "Importance metrics ranked"
    with drawing("semkv-bench metric_ranking"):
        figure = Figure(figsize=(FIGURE_SIZE[0], sum(heights) + 0.9), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(len(shown), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        for group, axes in zip(shown, panels, strict=True):
            _paint_group(group, axes)
        against = {group["control"] for group in shown}
        panels[-1].set_xlabel(
            f"score difference from {_zero(against)}\nblue: no metric is shown to be better"
        )
        more = (
            f" ({len(groups) - len(shown)} more allocations in the tables)"
            if len(shown) < len(groups)
            else ""
        )
        figure.suptitle(title + more, x=0.01, ha="left", fontsize=10.5, fontweight="bold")
        settle(figure)
        return Drawn(
            "metric_ranking", title, _description(title, groups), svg_text(figure), png_bytes(figure)
        )


def _zero(controls: set[str | None]) -> str:
    """What the differences of all panels are taken from, in words."""
    if controls == {None}:
        return "the best metric"
    return clean(next(iter(controls))) if len(controls) == 1 else "the hollow one"


def _that_fit(groups: list[dict]) -> list[dict]:
    """The first groups, as many as one figure holds; at least one."""
    shown, rows = [], 0
    for group in groups:
        rows += len(group["metrics"]) + 2
        if shown and rows > _MOST_ROWS:
            break
        shown.append(group)
    return shown


def _paint_group(group: dict, axes: Axes) -> None:
    name = "random" if group["control"] else "best"
    zero = group["control"] or group["best"]
    axes.axvline(0, color=PALETTE["ink"], lw=1.1, ls=(0, (5, 3)))
    labels = []
    for place, row in enumerate(group["metrics"]):
        diff, ends = row[f"diff_{name}"], row[f"diff_{name}_ci"]
        if row["metric"] == zero:
            diff = 0.0
        first = row["rank"][0] == 1
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
                mfc=colour if row["metric"] != zero else PALETTE["surface"],
            )
        labels.append(shorten(clean(row["metric"]), 30))
        axes.annotate(
            f"{fixed(row['score'])}  {row['letters']}",
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
    axes.set_title(clean(group["group"]), loc="left", fontsize=9, pad=4)
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


def _description(title: str, groups: list[dict]) -> str:
    parts = []
    for group in groups:
        rows = "; ".join(
            f"{clean(row['metric'])} {fixed(row['score'])}"
            + (f" ({signed(row['diff_random'])} from random)" if known(row["diff_random"]) else "")
            for row in group["metrics"]
        )
        parts.append(f"{clean(group['group'])}: {rows}")
    return f"{title}. {'. '.join(parts)}."
