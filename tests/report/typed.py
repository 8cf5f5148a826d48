"""The functions of a report for content of report.json, as these tests plant it."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from semkv_bench import report as rendered
from semkv_bench import stats
from semkv_bench.report import examples, figures, notes, overview_row, rankings_turns, tables, verdict
from semkv_bench.report import sections as parts
from semkv_bench.stats.plain import read
from semkv_bench.stats.result import Cliff, Report

__all__ = [
    "analyze",
    "as_report",
    "cards",
    "cliff_words",
    "confirmation_words",
    "detail_table",
    "draw_all",
    "draw_rankings",
    "draw_turns",
    "headline",
    "incomplete",
    "limits",
    "overview_rows",
    "remarks",
    "sections",
    "show",
    "worst_examples",
    "write",
]


def as_report(planted: dict | Report) -> Report:
    """``planted`` as the statistics give it."""
    return planted if isinstance(planted, Report) else Report.from_json(planted)


def _typed(function: Callable) -> Callable:
    @wraps(function)
    def call(planted: dict | Report, *rest: Any, **options: Any) -> Any:
        return function(as_report(planted), *rest, **options)

    return call


headline, limits, show, write = map(
    _typed, (rendered.headline, rendered.limits, rendered.show, rendered.write)
)
cards, incomplete, remarks = map(_typed, (notes.cards, notes.incomplete, notes.remarks))
detail_table, sections = map(_typed, (tables.detail_table, parts.sections))
worst_examples = _typed(examples.worst_examples)
draw_all, draw_rankings, draw_turns = map(
    _typed, (figures.draw_all, rankings_turns.draw_rankings, rankings_turns.draw_turns)
)
confirmation_words = _typed(verdict.confirmation_words)


def cliff_words(planted: dict, quantizer: str | None, cliff: dict) -> str:
    return verdict.cliff_words(as_report(planted), quantizer, read(Cliff, cliff, "cliff"))


def overview_rows(planted: list[tuple[str, dict]]) -> list[overview_row.OverviewRow]:
    return overview_row.overview_rows([(name, as_report(each)) for name, each in planted])


def analyze(*given: Any, **options: Any) -> dict:
    """``stats.analyze`` as report.json holds it."""
    return stats.analyze(*given, **options).to_json()
