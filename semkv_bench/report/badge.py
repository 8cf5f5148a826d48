"""A line for a model card, and a badge: what one report shows to be safe."""

from typing import Any

from semkv_bench import __version__
from semkv_bench.report.formatting import (
    clean,
    effective_text,
    join,
    known,
    plural,
    ratio,
    signed,
    signed_interval,
)
from semkv_bench.report.lookup import cliffs_of, none_safe, sample_noun
from semkv_bench.report.verdict import cliff_words
from semkv_bench.stats.result import OperatingPoint, Report

__all__ = ["badge", "badge_line"]

_LABEL = "KV cache"
_MOST_NAMED = 3


def badge_line(report: Report) -> str:
    """One line of Markdown: the cheapest safe cache with its evidence, or that none is shown to be safe."""
    point = report.operating_point
    tasks = sorted(clean(task) for task in report.tasks)
    told = [
        plural(report.n_clusters, sample_noun(report)),
        join(tasks) if len(tasks) <= _MOST_NAMED else plural(len(tasks), "task"),
        f"protocol {clean(report.protocol)}" if report.protocol else "",
        "" if report.preregistered else "exploratory",
    ]
    if point is None:
        what = f"{none_safe(report, '16 bits')} (margin {report.margin:g})"
    else:
        loss = (
            f" (difference {signed(point.diff)} {signed_interval(point.diff_ci)})"
            if known(point.diff)
            else ""
        )
        what = f"`{clean(point.setting)}` is no worse than 16 bits within {report.margin:g}{loss}, {_price(point)}"
    cliffs = [
        f"{f'{clean(name)} ' if name else ''}cliff {cliff_words(report, name, cliff).partition(', bootstrap')[0]}"
        for name, cliff in cliffs_of(report)
    ]
    evidence = ", ".join(part for part in told if part)
    return (
        f"**{_LABEL}** of {clean(report.model or 'a model not named')}: {what} ({evidence}); {'; '.join(cliffs)}. "
        f"semkv-bench {__version__}"
    )


def badge(report: Report) -> dict[str, Any]:
    """The same as an endpoint of shields.io: label, message and color."""
    point = report.operating_point
    message = (
        f"none shown safe within {report.margin:g}"
        if point is None
        else f"{clean(point.setting)}, {_bits(point)} bits, no worse within {report.margin:g}"
    )
    color = "lightgrey" if point is None else "green" if report.preregistered else "yellow"
    return {"schemaVersion": 1, "label": _LABEL, "message": message, "color": color}


def _bits(point: OperatingPoint) -> str:
    priced = next(b for b in (point.cache_bits, point.effective_bits, point.code_bits) if known(b))
    return effective_text(priced)


def _price(point: OperatingPoint) -> str:
    if known(point.cache_bits):
        return f"whole cache {_bits(point)} bits per value, {ratio(16 / point.cache_bits, 1)} smaller"
    if known(point.effective_bits):
        return f"coded part {_bits(point)} bits per value, {ratio(16 / point.effective_bits, 1)} smaller"
    return f"{_bits(point)} code bits"
