"""The tables of a report as text cells, the same for the terminal, Markdown and HTML."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from semkv_bench.report.formatting import (
    DASH,
    clean,
    count,
    divergence,
    divergences,
    fixed,
    interval,
    interval_words,
    p_value,
    percent,
    percents,
    ratio,
    signed,
    signed_interval,
)
from semkv_bench.report.lookup import ordered_settings, sample_noun
from semkv_bench.stats.result import Cliff, Report, SettingResult, TaskResult

__all__ = [
    "VERDICT_SIGNS",
    "Column",
    "Table",
    "detail_table",
    "interval_table",
    "settings_table",
    "table_of",
    "task_rows",
    "with_interval",
]

# A sign beside the word, so that a verdict never hangs on its colour.
VERDICT_SIGNS = {
    "reference": "•",
    "equivalent": "✓",
    "no_worse": "≥",
    "floor": "≈",
    "degraded": "✗",
    "inconclusive": "?",
    "insensitive": "∅",
}


@dataclass(frozen=True)
class Column:
    """One column: its heading, how a setting's cell is written, and whether cells are numbers.

    ``optional`` columns are left out where no setting has a value, and named as missing if ``measured``;
    ``short`` is a narrower heading. ``detail`` columns are for documents, not for a terminal; in a very narrow
    one, the columns marked ``keep`` are shown alone.
    """

    title: str
    cell: Callable[[SettingResult], str]
    numeric: bool = True
    optional: bool = False
    measured: bool = True
    short: str = ""
    detail: bool = False
    keep: bool = False


@dataclass(frozen=True)
class Table:
    """Headings and rows of cells; ``missing`` names the optional columns that were left out.

    ``shades`` are backgrounds of cells and ``links`` where they lead, for documents.
    """

    titles: tuple[str, ...]
    numeric: tuple[bool, ...]
    rows: tuple[tuple[str, ...], ...]
    missing: tuple[str, ...] = ()
    short_titles: tuple[str, ...] = ()
    detail: tuple[bool, ...] = ()
    keep: tuple[bool, ...] = ()
    shades: tuple[tuple[str, ...], ...] = ()
    links: tuple[tuple[str, ...], ...] = ()


def with_interval(value: str, bounds: str) -> str:
    """``value`` with its interval behind it where there is one."""
    return value if bounds == DASH else f"{value} {bounds}"


_NAME = Column("setting", lambda row: clean(row.setting), numeric=False)

_MAIN = (
    _NAME,
    Column("verdict", lambda row: row.verdict, numeric=False, keep=True),
    Column("score", lambda row: fixed(row.score), keep=True),
    Column(
        "difference [interval]",
        lambda row: with_interval(signed(row.diff), signed_interval(row.diff_ci)),
    ),
    Column("code bits", lambda row: fixed(row.code_bits)),
    Column("effective bits", lambda row: fixed(row.effective_bits), optional=True, short="eff. bits"),
    Column("cache bits", lambda row: fixed(row.cache_bits), optional=True),
    Column(
        "bits read a step", lambda row: fixed(row.read_bits), optional=True, measured=False, short="bits read"
    ),
    Column(
        "whole cache",
        lambda row: ratio(16 / row.cache_bits) if row.cache_bits else DASH,
        optional=True,
        measured=False,
        short="whole smaller",
    ),
    Column(
        "coded part",
        lambda row: ratio(16 / row.effective_bits) if row.effective_bits else DASH,
        optional=True,
        short="coded smaller",
    ),
    Column("p no worse", lambda row: p_value(row.p_no_worse)),
    Column("runaway", lambda row: percent(row.runaway_rate), optional=True),
    Column("agreement", lambda row: percent(row.agreement), optional=True, measured=False, short="agree"),
    Column("KL", lambda row: divergence(row.kl), optional=True),
)

_NEEDED = "needed"
_DETAIL = (
    _NAME,
    Column("kind", lambda row: row.kind, numeric=False),
    Column("packed bits", lambda row: fixed(row.packed_bits), optional=True),
    Column("score interval", lambda row: interval(row.score_ci)),
    Column(
        "percentile bootstrap",
        lambda row: signed_interval(row.bootstrap_ci),
        optional=True,
        measured=False,
    ),
    Column(
        "equivalence interval",
        lambda row: signed_interval(row.equivalence_ci),
        optional=True,
        measured=False,
    ),
    Column(
        "worse / better",
        lambda row: _worse_better(row),
        optional=True,
        measured=False,
    ),
    Column("detectable drop", lambda row: fixed(row.detectable_drop), optional=True, measured=False),
    Column("p equivalence", lambda row: p_value(row.p_equivalence)),
    Column("p degraded", lambda row: p_value(row.p_degraded)),
    Column("difference detectable", lambda row: _yes_no(row.detectable), numeric=False),
    Column("runaway p", lambda row: p_value(row.runaway_p), optional=True),
    Column("agreement interval", lambda row: percents(row.agreement_ci), optional=True, measured=False),
    Column("part by a token", lambda row: _parting(row, "by_token"), optional=True, measured=False),
    Column("part by an end", lambda row: _parting(row, "by_end"), optional=True, measured=False),
    Column("equal tokens before", lambda row: _parting(row, "place"), optional=True, measured=False),
    Column("KL interval", lambda row: divergences(row.kl_ci), optional=True, measured=False),
    Column("top-1 agreement", lambda row: percent(row.top1_agreement), optional=True),
    Column(_NEEDED, lambda row: count(row.n_needed)),
    Column("records", lambda row: count(row.n)),
    Column("clusters", lambda row: count(row.n_clusters)),
)


def _parting(row: SettingResult, name: str) -> str:
    """A share in percent, or a place in tokens, with its interval."""
    if row.parting is None:
        return DASH
    value, ends = getattr(row.parting, name), getattr(row.parting, f"{name}_ci")
    if name == "place":
        return with_interval(fixed(value, 1), interval(ends, 1))
    return with_interval(percent(value), percents(ends))


def _yes_no(value: bool | None) -> str:
    return DASH if value is None else ("yes" if value else "no")


def _worse_better(row: SettingResult) -> str:
    if row.n_worse is None or row.n_better is None:
        return DASH
    return f"{count(row.n_worse)} / {count(row.n_better)}"


def settings_table(report: Report) -> Table:
    """The table that carries the verdicts, one row a setting."""
    return _table(report, _MAIN)


def detail_table(report: Report) -> Table:
    """The remaining numbers of every setting."""
    needed = f"{sample_noun(report)}s needed"
    columns = tuple(
        replace(column, title=needed) if column.title == _NEEDED else column for column in _DETAIL
    )
    return _table(report, columns)


def _table(report: Report, columns: tuple[Column, ...]) -> Table:
    settings = ordered_settings(report)
    tested = [index for index, row in enumerate(settings) if row.setting != report.reference]
    return table_of(settings, columns, tested)


def table_of(rows: Sequence[Any], columns: tuple[Column, ...], judged: Sequence[int] | None = None) -> Table:
    """``rows`` under ``columns``; optional columns that are empty in the rows ``judged`` (all) are left out."""
    judged = range(len(rows)) if judged is None else judged
    cells = {column.title: [column.cell(row) for row in rows] for column in columns}
    empty = [
        column
        for column in columns
        if column.optional and all(cells[column.title][index] in ("", DASH) for index in judged)
    ]
    kept = [column for column in columns if column not in empty]
    return Table(
        titles=tuple(column.title for column in kept),
        numeric=tuple(column.numeric for column in kept),
        rows=tuple(zip(*(cells[column.title] for column in kept), strict=True)),
        missing=tuple(column.title for column in empty if column.measured),
        short_titles=tuple(column.short or column.title for column in kept),
        detail=tuple(column.detail for column in kept),
        keep=tuple(column.keep for column in kept),
    )


def interval_table(cliff: Cliff, most: int = 6) -> Table:
    """The likeliest grid intervals of a cliff with their bootstrap probability, likeliest first."""
    intervals = sorted(cliff.intervals, key=lambda entry: -entry.probability)
    rows = [
        (interval_words(entry.lower_bits, entry.upper_bits), fixed(entry.probability))
        for entry in intervals[:most]
    ]
    return Table(("cliff interval (code bits)", "probability"), (False, True), tuple(rows))


def task_rows(report: Report, settings: list[str]) -> list[tuple[str, list[TaskResult | None]]]:
    """Per task, its result under each of ``settings`` (None where it was not run); tasks by name."""
    return [
        (task, [results.get(name) for name in settings]) for task, results in sorted(report.tasks.items())
    ]
