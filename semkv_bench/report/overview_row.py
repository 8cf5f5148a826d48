"""Several reports as rows of one overview."""

from dataclasses import dataclass, fields

from semkv_bench.report.formatting import known
from semkv_bench.report.lookup import reference_row, tested_settings
from semkv_bench.stats.further import Ends
from semkv_bench.stats.result import Report

__all__ = ["ROTATED", "OverviewPoint", "OverviewRow", "OverviewSetting", "overview_rows"]

_FIELDS = ("margin", "alpha", "average")
# llama.cpp's formats with its rotation, as they are simulated.
ROTATED = "_rotated"


@dataclass(frozen=True, kw_only=True)
class OverviewPoint:
    """The operating point of a row."""

    setting: str
    code_bits: float | None
    effective_bits: float | None
    cache_bits: float | None
    compression: float | None


@dataclass(frozen=True, kw_only=True)
class OverviewSetting:
    """A setting of a row: what it stores, and its difference from the full precision of its own run."""

    setting: str
    format: str | None
    effective_bits: float | None
    rotated: bool | None
    score: float
    score_ci: Ends
    diff: float | None
    diff_ci: Ends
    kl: float | None
    kl_ci: Ends
    agreement: float | None
    verdict: str


@dataclass(frozen=True, kw_only=True)
class OverviewRow:
    """One quantizer of one run; null stands for what its report does not say."""

    run: str
    model: str | None
    protocol: str | None
    quantizer: str | None
    tasks: tuple[str, ...]
    n_examples: int
    n_clusters: int
    margin: float
    alpha: float
    average: str
    preregistered: bool
    unfinished: bool
    full_score: float | None
    grid_bits: tuple[float, ...]
    status: str
    lower_bits: float | None
    upper_bits: float | None
    probability: float | None
    operating_point: OverviewPoint | None
    insensitive: bool
    differs: tuple[str, ...]
    settings: tuple[OverviewSetting, ...] = ()


def overview_rows(reports: list[tuple[str, Report]]) -> list[OverviewRow]:
    """One row per run and quantizer from named reports, ordered by model, protocol, quantizer and name.

    ``differs`` names what keeps a row from being compared with the others: a margin, alpha or average that
    most runs do not share.
    """
    usual = _usual([report for _, report in reports])
    rows = [row for name, report in reports for row in _rows(name, report, usual)]
    return sorted(
        rows,
        key=lambda row: tuple(
            str(getattr(row, key) or "") for key in ("model", "protocol", "quantizer", "run")
        ),
    )


def _usual(reports: list[Report]) -> tuple:
    """Margin, alpha and average of most reports; of equals, those of the first."""
    found = [tuple(getattr(report, field) for field in _FIELDS) for report in reports]
    return max(found, key=lambda choice: (found.count(choice), -found.index(choice)))


def _rows(name: str, report: Report, usual: tuple) -> list[OverviewRow]:
    cliffs = report.cliffs or {_only(report) or "": report.cliff}
    alone = len(cliffs) == 1
    differs = tuple(
        f"{field} {own:g}" if known(own) else f"{field} {own}"
        for field, value in zip(_FIELDS, usual, strict=True)
        if (own := getattr(report, field)) != value
    )
    full = reference_row(report)
    planned, recorded = report.planned_examples, report.n_units_recorded
    return [
        OverviewRow(
            run=name,
            model=report.model,
            protocol=report.protocol,
            quantizer=quantizer or _only(report),
            tasks=tuple(sorted(report.tasks)),
            n_examples=report.n_examples,
            n_clusters=report.n_clusters,
            **{field: getattr(report, field) for field in _FIELDS},
            preregistered=report.preregistered,
            unfinished=planned is not None and planned > (recorded or 0),
            full_score=full and full.score,
            grid_bits=_grid_bits(report, quantizer, alone),
            **{key: getattr(cliff, key) for key in ("status", "lower_bits", "upper_bits", "probability")},
            operating_point=_point(report, quantizer, alone),
            insensitive=any(row.verdict == "insensitive" for row in report.settings),
            differs=differs,
            settings=_compared(report, quantizer, alone),
        )
        for quantizer, cliff in cliffs.items()
    ]


def _compared(report: Report, quantizer: str, alone: bool) -> tuple[OverviewSetting, ...]:
    rows = [row for row in tested_settings(report) if alone or (row.quantizer or "") == quantizer]
    names = [each.name for each in fields(OverviewSetting) if each.name not in ("format", "rotated")]
    told = {each.setting: each.rotated for each in report.served}
    return tuple(
        OverviewSetting(
            format=row.quantizer,
            rotated=told.get(row.setting, (row.quantizer or "").endswith(ROTATED) or None),
            **{name: getattr(row, name) for name in names},
        )
        for row in rows
    )


def _grid_bits(report: Report, quantizer: str, alone: bool) -> tuple[float, ...]:
    grid = [row for row in report.settings if row.kind == "uniform" and known(row.code_bits)]
    return tuple(sorted(row.code_bits for row in grid if alone or (row.quantizer or "") == quantizer))


def _only(report: Report) -> str | None:
    return report.quantizer if isinstance(report.quantizer, str) else None


def _point(report: Report, quantizer: str, alone: bool) -> OverviewPoint | None:
    """The operating point, on the row of its quantizer."""
    point = report.operating_point
    if point is None:
        return None
    own = next((row for row in report.settings if row.setting == point.setting), None)
    if not alone and ((own and own.quantizer) or "") != quantizer:
        return None
    return OverviewPoint(**{field.name: getattr(point, field.name) for field in fields(OverviewPoint)})
