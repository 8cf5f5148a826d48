"""The section on a conversation, turn by turn."""

from dataclasses import dataclass

from semkv_bench.report.formatting import (
    DASH,
    fixed,
    known,
    p_value,
    percent,
    signed,
)
from semkv_bench.report.lookup import ordered_settings
from semkv_bench.report.section import NAME, Section, difference, setting_names
from semkv_bench.report.tables import Column, table_of
from semkv_bench.stats.further import Turn, TurnDrift
from semkv_bench.stats.result import Report

__all__ = ["turns_section"]


def turns_section(report: Report) -> Section | None:
    """Scores turn by turn; None without conversations."""
    turns = report.turns
    if not turns:
        return None
    names = [row.setting for row in ordered_settings(report)]
    drift = {row.setting: row for row in report.turn_drift}
    rows = [_TurnRow(name, drift.get(name)) for name in names]
    worse = [row for row in drift.values() if row.p < report.alpha and row.diff < 0]
    better = [row for row in drift.values() if row.p < report.alpha and row.diff > 0]
    found = [
        f"{setting_names(some)} {'loses' if len(some) == 1 else 'lose'} {how} in the last turn than in the first"
        for some, how in ((worse, "more"), (better, "less"))
        if some
    ]
    finding = "; ".join(found) or "No setting is shown to lose more in the last turn than in the first"
    note = (
        "Turns are counted from 1 here and from 0 in records. Behind the score of a turn stands its difference "
        "from full precision in the same turn. The change is the difference in the last turn less that in the "
        "first, conversation by conversation, p Holm-adjusted over the settings."
    )
    columns = (NAME, *(_turn_column(turn) for turn in turns), *_DRIFT)
    tables = [("", table_of(rows, columns))]
    if any(result.coded_share is not None for turn in turns for result in turn.settings.values()):
        shares = (NAME, *(_share_column(turn) for turn in turns))
        tables.append(("Share of the cache that was coded", table_of(rows, shares)))
    return Section("turns", "Turn by turn", f"{finding}.", note, tables=tuple(tables))


@dataclass(frozen=True)
class _TurnRow:
    setting: str
    drift: TurnDrift | None


_DRIFT = (
    Column("change [interval]", lambda row: difference(row.drift) if row.drift else DASH),
    Column("p change", lambda row: p_value(row.drift.p) if row.drift else DASH),
)


def _turn_column(turn: Turn) -> Column:
    def cell(row: _TurnRow) -> str:
        result = turn.settings.get(row.setting)
        if result is None:
            return DASH
        diff = f" ({signed(result.diff)})" if known(result.diff) else ""
        return f"{fixed(result.score)}{diff}"

    return Column(f"turn {turn.turn + 1}", cell)


def _share_column(turn: Turn) -> Column:
    def cell(row: _TurnRow) -> str:
        result = turn.settings.get(row.setting)
        return percent(result and result.coded_share)

    return Column(f"turn {turn.turn + 1}", cell)
