"""The paired loss by length of the prompt and depth of the needle, a panel for each of the most telling settings."""

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from semkv_bench.report.formatting import clean, known, shorten, signed, signed_interval
from semkv_bench.report.lookup import telling_settings
from semkv_bench.report.plot_style import (
    FIGURE_SIZE,
    PALETTE,
    Drawn,
    drawing,
    freeze_layout,
    hover,
    png_bytes,
    svg_text,
)
from semkv_bench.report.sections_places import depth_words
from semkv_bench.stats.result import PlaceResult, Report, TaskResult

__all__ = ["draw_places"]

_TITLE = "Loss by length and needle depth"
_MOST = 4


def draw_places(report: Report) -> Drawn | None:
    """None for a single length, or without needles."""
    if not report.places:
        return None
    names = [name for name in telling_settings(report) if any(name in p.settings for p in report.places)][
        :_MOST
    ]
    if not names:
        return None
    lengths = sorted({place.length for place in report.places})
    depths = sorted({place.depth for place in report.places})
    with drawing("semkv-bench loss_by_place"):
        columns = min(2, len(names))
        lines = -(-len(names) // columns)
        figure = Figure(
            figsize=(FIGURE_SIZE[0], 0.8 + (0.7 + 0.34 * len(depths)) * lines), layout="constrained"
        )
        FigureCanvasAgg(figure)
        panels = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flat
        for axes, name in zip(panels, names, strict=False):
            axes.set_title(shorten(clean(name), 30), loc="left", fontsize=9)
            _paint(axes, report.places, name, lengths, depths)
        for axes in list(panels)[len(names) :]:
            axes.axis("off")
        figure.supxlabel("tokens of the prompt", fontsize=9.5)
        figure.supylabel("depth of the needle", fontsize=9.5)
        figure.suptitle(_TITLE, x=0.01, ha="left", fontsize=10.5, fontweight="bold")
        freeze_layout(figure)
        words = ". ".join(_words(report.places, name) for name in names)
        return Drawn("loss_by_place", _TITLE, f"{_TITLE}. {words}.", svg_text(figure), png_bytes(figure))


def _paint(
    axes: Axes,
    places: tuple[PlaceResult, ...],
    name: str,
    lengths: list[int],
    depths: list[tuple[float, float]],
) -> None:
    """A cell's colour is its difference, its strength the size; a star: the cell's own interval leaves 0 out."""
    for place in places:
        found = place.settings.get(name)
        if found is None or not known(found.diff):
            continue
        x, y = lengths.index(place.length), depths.index(place.depth)
        colour = PALETTE["vermillion"] if found.diff < 0 else PALETTE["blue"]
        alpha = min(0.85, abs(found.diff))
        cell = Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=colour, alpha=alpha, edgecolor=PALETTE["line"])
        axes.add_patch(cell)
        hover(cell, f"{clean(name)}, {place.length:,} tokens, {depth_words(place.depth)}: {_told(found)}")
        star = "*" if _apart(found) else ""
        axes.text(x, y, f"{signed(found.diff)}{star}", ha="center", va="center", fontsize=8)
    axes.set_xlim(-0.5, len(lengths) - 0.5)
    axes.set_ylim(len(depths) - 0.5, -0.5)
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_yticks(range(len(depths)), [depth_words(depth) for depth in depths])
    axes.tick_params(length=0)


def _apart(found: TaskResult) -> bool:
    low, high = found.diff_ci
    return known(low) and known(high) and (low > 0 or high < 0)


def _told(found: TaskResult) -> str:
    return f"{signed(found.diff)} {signed_interval(found.diff_ci)}"


def _words(places: tuple[PlaceResult, ...], name: str) -> str:
    cells = (
        f"{place.length:,} tokens, {depth_words(place.depth)} {_told(place.settings[name])}"
        for place in places
        if name in place.settings and known(place.settings[name].diff)
    )
    return f"{clean(name)}: {'; '.join(cells)}"
