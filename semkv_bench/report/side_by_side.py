"""Formats that runs of several protocols have: what is simulated beside what an engine does."""

from dataclasses import dataclass, replace

from semkv_bench.report.formatting import (
    DASH,
    clean,
    divergence,
    divergences,
    fixed,
    interval,
    percent,
    signed,
    signed_interval,
)
from semkv_bench.report.overview_row import ROTATED, OverviewRow, OverviewSetting
from semkv_bench.report.tables import Column, Table, table_of, with_interval

__all__ = ["SIDE_BY_SIDE", "Shared", "shared_formats", "shared_table"]

SIDE_BY_SIDE = "formats under several protocols, each against its own full precision"


@dataclass(frozen=True)
class Shared:
    """One setting of one run, under the name of its format."""

    format: str
    row: OverviewRow
    result: OverviewSetting
    rotated: bool | None


_COLUMNS = (
    Column("format", lambda each: clean(each.format), numeric=False),
    Column("protocol", lambda each: clean(each.row.protocol or DASH), numeric=False, keep=True),
    Column("rotated", lambda each: {True: "yes", False: "no"}.get(each.rotated, DASH), numeric=False),
    Column("run", lambda each: clean(each.row.run), numeric=False, detail=True),
    Column("bits stored", lambda each: fixed(each.result.effective_bits), short="bits"),
    Column(
        "score [interval]",
        lambda each: with_interval(fixed(each.result.score), interval(each.result.score_ci)),
        keep=True,
    ),
    Column(
        "difference [interval]",
        lambda each: with_interval(signed(each.result.diff), signed_interval(each.result.diff_ci)),
    ),
    Column(
        "KL [interval]",
        lambda each: with_interval(divergence(each.result.kl), divergences(each.result.kl_ci)),
        optional=True,
        measured=False,
    ),
    Column("agreement", lambda each: percent(each.result.agreement), optional=True, measured=False),
    Column("verdict", lambda each: each.result.verdict, numeric=False, keep=True),
)


def shared_formats(rows: list[OverviewRow]) -> list[Shared]:
    """The formats of one model that runs of more than one protocol have: a setting by its name or its quantizer's.

    A format with a rotation and the one without are of one name here, since an engine rotates by itself.
    """
    known_names = {result.setting for row in rows for result in row.settings}
    found: dict[str, list[Shared]] = {}
    for row in rows:
        for result in row.settings:
            name = result.format if result.format in known_names else result.setting
            format_name = name.removesuffix(ROTATED)
            found.setdefault(format_name, []).append(Shared(format_name, row, result, result.rotated))
    both = []
    for name in sorted(found):
        alike = found[name]
        if len({each.row.protocol for each in alike}) > 1:
            if any(each.rotated is not None for each in alike):
                alike = [replace(each, rotated=bool(each.rotated)) for each in alike]
            both += sorted(
                alike, key=lambda each: (bool(each.rotated), each.row.protocol or "", each.row.run)
            )
    return both


def shared_table(shared: list[Shared]) -> Table:
    """One line a setting and run."""
    return table_of(shared, _COLUMNS)
