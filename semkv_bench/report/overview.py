"""Cliffs of several runs side by side: terminal, report.json, .md, .html and one figure. Nothing is pooled."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from rich.console import Console

from semkv_bench import __version__
from semkv_bench.report.files import write_all
from semkv_bench.report.formatting import (
    CLIFF_MEANS,
    DASH,
    clean,
    cliff_text,
    count,
    effective_text,
    fixed,
    join,
    known,
    plural,
    ratio,
    shorten,
)
from semkv_bench.report.marks import place_legend
from semkv_bench.report.output import json_bytes, render
from semkv_bench.report.overview_row import OverviewRow
from semkv_bench.report.plot_style import (
    FIGURE_SIZE,
    PALETTE,
    Drawn,
    drawing,
    freeze_layout,
    png_bytes,
    svg_text,
)
from semkv_bench.report.side_by_side import SIDE_BY_SIDE, shared_formats, shared_table
from semkv_bench.report.tables import VERDICT_SIGNS, Column, Table, table_of
from semkv_bench.report.terminal import show_table
from semkv_bench.stats.plain import plain
from semkv_bench.stats.result import SCHEMA

__all__ = ["draw_overview", "show_overview", "write_overview"]

_ROW = 0.3  # inches
_NO_MODEL = "model not recorded"


def _clusters(row: OverviewRow) -> str:
    return f"{count(row.n_clusters)}{' so far' if row.unfinished else ''}"


def _cliff_cell(row: OverviewRow) -> str:
    return cliff_text(row.status, row.lower_bits, row.upper_bits)


def _point_cell(row: OverviewRow) -> str:
    point = row.operating_point
    if point is None:
        return "cannot tell" if row.insensitive else "none"
    return clean(point.setting)


def _point_bits(row: OverviewRow) -> str:
    point = row.operating_point
    return effective_text(point.effective_bits) if point else DASH


def _times_smaller(bits: float | None) -> str:
    return ratio(16 / bits) if bits else DASH


_COLUMNS = (
    Column("run", lambda row: clean(row.run), numeric=False),
    Column("protocol", lambda row: clean(row.protocol or DASH), numeric=False, optional=True, measured=False),
    Column(
        "quantizer", lambda row: clean(row.quantizer or DASH), numeric=False, optional=True, measured=False
    ),
    Column("cliff (code bits)", _cliff_cell, numeric=False, short="cliff", keep=True),
    Column("probability", lambda row: fixed(row.probability, 2), short="prob."),
    Column("operating point", _point_cell, numeric=False),
    Column("effective bits", _point_bits, short="eff. bits", keep=True),
    Column(
        "whole cache",
        lambda row: _times_smaller(row.operating_point and row.operating_point.cache_bits),
        short="whole smaller",
        optional=True,
        measured=False,
    ),
    Column(
        "coded part",
        lambda row: _times_smaller(row.operating_point and row.operating_point.effective_bits),
        short="coded smaller",
        optional=True,
        measured=False,
    ),
    Column("full", lambda row: fixed(row.full_score)),
    Column("clusters", _clusters),
    Column("margin", lambda row: f"{row.margin:g}"),
    Column(
        "comparable",
        lambda row: f"no: {', '.join(row.differs)}" if row.differs else "yes",
        numeric=False,
    ),
    Column("tasks", lambda row: clean(", ".join(row.tasks)), numeric=False, detail=True),
)


def _by_model(rows: list[OverviewRow]) -> list[tuple[str, list[OverviewRow]]]:
    models = dict.fromkeys(row.model for row in rows)
    return [
        (clean(model) if model else _NO_MODEL, [row for row in rows if row.model == model])
        for model in models
    ]


def _tables(rows: list[OverviewRow]) -> list[tuple[str, Table]]:
    marked = any(row.differs for row in rows)
    columns = tuple(column for column in _COLUMNS if marked or column.title != "comparable")
    tables = []
    for model, some in _by_model(rows):
        tables.append((model, table_of(some, columns)))
        if shared := shared_formats(some):
            tables.append((f"{model}: {SIDE_BY_SIDE}", shared_table(shared)))
    return tables


def _head_and_limits(rows: list[OverviewRow]) -> tuple[str, str]:
    """What is set side by side, and what may not be compared."""
    runs = len({row.run for row in rows})
    models = len(_by_model(rows))
    head = f"Cliffs of {plural(runs, 'run')}, {plural(models, 'model')}: side by side, never pooled."
    odd = list(dict.fromkeys(row.run for row in rows if row.differs))
    if not odd:
        return head, f"All have margin {rows[0].margin:g} and alpha {rows[0].alpha:g}."
    names = [clean(name) for name in odd[:4]] + ([f"{len(odd) - 4} more"] if len(odd) > 4 else [])
    usual = next((row for row in rows if not row.differs), rows[0])
    return head, (
        f"Not comparable with the others, which have margin {usual.margin:g}, alpha {usual.alpha:g} and "
        f"the {usual.average} average: {join(names)}."
    )


def show_overview(rows: list[OverviewRow], left_out: list[str], console: Console) -> None:
    """Print one table per model."""
    for words in (*_head_and_limits(rows), *left_out):
        console.print(words, markup=False, highlight=False, soft_wrap=not console.is_terminal)
    for model, table in _tables(rows):
        show_table(table, console, model)


def write_overview(rows: list[OverviewRow], left_out: list[str], out: Path) -> dict[str, Path]:
    """Write report.json, report.md, report.html and the figure into ``out``; paths by name.

    Raises SemkvError where a file cannot be written.
    """
    figure = draw_overview(rows)
    head, comparable = _head_and_limits(rows)
    page = {
        "title": "KV-cache cliffs side by side",
        "headline": head,
        "remarks": [comparable, *left_out],
        "figure": figure,
        "tables": _tables(rows),
        "cliff_means": CLIFF_MEANS,
        "verdict_signs": VERDICT_SIGNS,
        "version": __version__,
    }
    contents = {
        "report.json": json_bytes({"schema": SCHEMA, "overview": plain(rows), "left_out": left_out}),
        "report.md": render("overview.md.j2", page),
        "report.html": render("overview.html.j2", page),
        f"figures/{figure.name}.svg": figure.svg.encode(),
        f"figures/{figure.name}.png": figure.png,
    }
    return write_all(out, contents)


def draw_overview(rows: list[OverviewRow]) -> Drawn:
    """Cliff intervals as bars on the bits axis, a row a run, grouped by model."""
    groups = _by_model(rows)
    title = "Cliffs side by side"
    heights = [0.5 + _ROW * len(some) for _, some in groups]
    ends = [bits for row in rows for bits in _drawn_bits(row)]
    low, high = (min(ends), max(ends)) if ends else (0.0, 4.0)
    pad = 0.06 * (high - low) or 0.5
    with drawing("semkv-bench cliff_overview"):
        figure = Figure(figsize=(FIGURE_SIZE[0] * 1.3, sum(heights) + 1.5), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(len(groups), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        for (model, some), axes in zip(groups, panels, strict=True):
            axes.set_xlim(low - pad, high + pad)
            _paint_model(model, some, axes)
        panels[-1].set_xlabel("code bits per value, log2(L)")
        place_legend(figure, {str(key.get_label()): key for key in _keys(rows)})
        figure.suptitle(title, x=0.01, ha="left", fontsize=10.5, fontweight="bold")
        freeze_layout(figure)
        written = "; ".join(
            f"{clean(row.model or _NO_MODEL)}, {_label(row)}: {_cliff_cell(row)}, operating point {_point_cell(row)}"
            for row in rows
        )
        return Drawn("cliff_overview", title, f"{title}. {written}.", svg_text(figure), png_bytes(figure))


def _drawn_bits(row: OverviewRow) -> list[float]:
    point = row.operating_point and row.operating_point.code_bits
    return [
        *row.grid_bits,
        *(bits for bits in (row.lower_bits, row.upper_bits, point) if known(bits)),
    ]


def _label(row: OverviewRow) -> str:
    parts = [row.protocol, row.quantizer, row.run]
    return clean(", ".join(part for part in dict.fromkeys(parts) if part))


def _tick(row: OverviewRow) -> str:
    """Protocol and quantizer, and below them the run."""
    what = ", ".join(dict.fromkeys(part for part in (row.protocol, row.quantizer) if part))
    return "\n".join(shorten(clean(part), 44) for part in dict.fromkeys((what, row.run)) if part)


def _paint_model(model: str, rows: list[OverviewRow], axes: Axes) -> None:
    left, right = axes.get_xlim()
    for place, row in enumerate(rows):
        colour = PALETTE["muted"] if row.differs else PALETTE["vermillion"]
        axes.plot(row.grid_bits, [place] * len(row.grid_bits), "|-", color=PALETTE["line"], mec=PALETTE["muted"],
                  ms=5, lw=1, zorder=1)  # fmt: skip
        _paint_cliff(row, place, colour, (left, right), axes)
        point = row.operating_point
        if point and known(point.code_bits):
            axes.plot(
                point.code_bits,
                place,
                "D",
                ms=6.5,
                color=PALETTE["blue"],
                mec=PALETTE["surface"],
                zorder=4,
            )
    axes.set_yticks(range(len(rows)), [_tick(row) for row in rows], linespacing=1.25)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(True, axis="x")
    axes.set_title(shorten(model, 70), loc="left", fontsize=9.5, pad=4)


def _paint_cliff(row: OverviewRow, place: int, colour: str, ends: tuple[float, float], axes: Axes) -> None:
    lower, upper = row.lower_bits, row.upper_bits
    if row.status == "undetermined" or (not known(lower) and not known(upper)):
        bits = row.grid_bits or [sum(ends) / 2]
        axes.text(
            (bits[0] + bits[-1]) / 2, place - 0.12, "not determined", ha="center", va="bottom", fontsize=7.5,
            color=PALETTE["muted"],
        )  # fmt: skip
        return
    start = lower if known(lower) else ends[0]
    stop = upper if known(upper) else ends[1]
    face = "none" if row.differs else colour
    axes.barh(
        place, stop - start, left=start, height=0.46, color=face, ec=colour, lw=1.3, alpha=0.85, zorder=2
    )
    if row.status != "located":
        tip, marker = (ends[1], ">") if row.status == "above_grid" else (ends[0], "<")
        axes.plot(tip, place, marker, ms=7, color=colour, clip_on=False, zorder=3)


def _keys(rows: list[OverviewRow]) -> list:
    found = [
        Patch(
            color=PALETTE["vermillion"],
            alpha=0.85,
            label="cliff: collapses at its left end, holds at its right",
        )
    ]
    if any(row.differs for row in rows):
        found.append(Patch(fc="none", ec=PALETTE["muted"], lw=1.3, label="another margin, alpha or average"))
    found.append(Line2D([], [], ls="", marker="D", ms=6.5, color=PALETTE["blue"], label="operating point"))
    found.append(Line2D([], [], ls="-", marker="|", color=PALETTE["muted"], lw=1, label="grid points tested"))
    return found
