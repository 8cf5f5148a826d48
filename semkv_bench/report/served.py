"""What an engine's servers said of their caches, from a run's environment to a table."""

from collections.abc import Mapping
from typing import Any

from semkv_bench.report.formatting import DASH, clean, fixed
from semkv_bench.report.tables import Column, Table, table_of
from semkv_bench.stats.result import Report, Served

__all__ = ["served_of", "served_table"]


def served_of(environment: Mapping[str, Any]) -> tuple[Served, ...]:
    """One entry a server, the reference first, from ``servers`` of a run's environment; none where there are none."""
    servers: Mapping[str, Mapping[str, Any]] = environment.get("servers") or {}
    per_token = {name: _mib_per_token(said) for name, said in servers.items()}
    full = per_token.get("full")
    return tuple(
        Served(
            setting=name,
            type=_type(said),
            mib=said.get("mib"),
            cells=said.get("cells"),
            bits=16 * per_token[name] / full if full and per_token[name] else None,
            rotated=said.get("rotated"),
            build=said.get("build") or said.get("version"),
            effect=said.get("effect"),
        )
        for name, said in servers.items()
    )


def _mib_per_token(said: Mapping[str, Any]) -> float | None:
    mib, cells = said.get("mib"), said.get("cells")
    return mib / cells if mib and cells else None


def _type(said: Mapping[str, Any]) -> str | None:
    if "keys" not in said:
        return said.get("type")
    keys, values = said["keys"], said["values"]
    return keys if keys == values else f"{keys}/{values}"


_COLUMNS = (
    Column("setting", lambda row: clean(row.setting), numeric=False, keep=True),
    Column("type by its own word", lambda row: clean(row.type or "not told"), numeric=False, short="type", keep=True),
    Column("MiB", lambda row: fixed(row.mib, 2), optional=True, measured=False),
    Column("tokens", lambda row: str(row.cells or DASH), optional=True, measured=False),
    Column("bits by these bytes", lambda row: fixed(row.bits), optional=True, measured=False, short="bits", keep=True),
    Column(
        "rotated",
        lambda row: DASH if row.rotated is None else "yes" if row.rotated else "no",
        numeric=False,
        optional=True,
        measured=False,
    ),
    Column("effect on answers", lambda row: clean(row.effect or DASH), numeric=False, detail=True),
    Column("build", lambda row: clean(row.build or DASH), numeric=False, detail=True),
)  # fmt: skip


def served_table(report: Report) -> Table:
    """The servers of ``report``; no rows where nothing served."""
    return table_of(report.served, _COLUMNS)
