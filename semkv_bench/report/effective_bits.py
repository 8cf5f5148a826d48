"""The figure of quality against effective bits: the grid, mixes on the lines between their ends, pruning."""

from matplotlib.axes import Axes

from semkv_bench.report.formatting import clean, effective_text, fixed, known, shorten
from semkv_bench.report.lookup import reference_row
from semkv_bench.report.marks import SMALL, draw_series, margin_band, reference_line, spread
from semkv_bench.report.plot_style import PALETTE
from semkv_bench.stats.equivalence import HOLDS
from semkv_bench.stats.result import Report, SettingResult

__all__ = ["paint_quality"]


def paint_quality(report: Report, points: list[SettingResult], axes: Axes) -> None:
    """Score of ``points`` against the bits of the whole cache, or of the coded part where those are not known."""
    reference = reference_row(report)
    if reference is not None:
        margin_band(axes, report, reference.score)
        reference_line(axes, reference.score, fixed(reference.score))
    price = "cache_bits" if all(known(row.cache_bits) for row in points) else "effective_bits"
    if price == "cache_bits":
        axes.set_xlabel("whole cache at the run's lengths: bits per value")
    _lines_between_ends(report, points, price, axes)
    places = spread(points, price)
    draw_series(axes, points, places, "score", "score_ci", lambda row: row.verdict in HOLDS, joined=False)
    axes.plot(
        [], [], "o", ms=SMALL, mec=PALETTE["ink"], mfc=PALETTE["surface"], label="hollow: not shown to hold"
    )
    _ring(report, places, points, price, axes)
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.margins(x=0.08)
    if any(getattr(row, price) != places[row.setting] for row in points):
        axes.set_xlabel(f"{axes.get_xlabel()}; equal bits side by side")


def _ring(
    report: Report, places: dict[str, float], points: list[SettingResult], price: str, axes: Axes
) -> None:
    """The operating point, ringed and named in the legend."""
    point = report.operating_point
    for row in points:
        if point and row.setting == point.setting:
            name = shorten(clean(row.setting), 28)
            axes.plot(
                places[row.setting],
                row.score,
                "o",
                ms=11,
                mfc="none",
                mec=PALETTE["vermillion"],
                mew=1.8,
                label=f"operating point:\n{name}, {effective_text(getattr(row, price))} bits",
            )


def _lines_between_ends(report: Report, points: list[SettingResult], price: str, axes: Axes) -> None:
    rows = {row.setting: row for row in points}
    ends = dict.fromkeys(
        (row.low_setting, row.high_setting)
        for row in report.interpolation
        if row.low_setting in rows and row.high_setting in rows
    )
    for low, high in ends:
        axes.plot(
            [getattr(rows[low], price), getattr(rows[high], price)],
            [rows[low].score, rows[high].score],
            color=PALETTE["muted"],
            lw=1.0,
            ls=(0, (1, 1.6)),
            zorder=1.5,
            label="line between a mix's ends",
        )
