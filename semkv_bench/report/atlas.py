"""``semkv-bench atlas``: models x methods on one page, each with its cliff and the cheapest cache that is safe."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from semkv_bench import __version__
from semkv_bench.errors import MissingError, UsageError
from semkv_bench.records.folder import read_sessions
from semkv_bench.records.runs import folders_of, short_names
from semkv_bench.report.command import check_out
from semkv_bench.report.files import write_all
from semkv_bench.report.formatting import CLIFF_MEANS, DASH, cliff_text, fixed
from semkv_bench.report.output import json_bytes, render
from semkv_bench.report.several import report_in
from semkv_bench.report.tables import VERDICT_SIGNS, Table
from semkv_bench.stats.equivalence import SAFE
from semkv_bench.stats.result import Report, SettingResult

__all__ = ["ATLAS", "AtlasEntry", "entries_of", "make_atlas"]

ATLAS = Path("results/atlas")
SCHEMA = 1
_SINGLE = ("uniform", "format")


@dataclass(frozen=True)
class AtlasEntry:
    """One method on one model, as one run measured it.

    status, bits: of the cliff, the code bits that collapse and that hold. safe: the setting of the grid, or format, of
    the fewest bits whose verdict rules a drop beyond the margin out, None where there is none; safe_bits: bits per
    value of its caches, of its coded part where caches were not recorded (``safe_bits_of``). n: examples.
    fixed_beforehand: whether margin and alpha were, and the run was not extended once something was known. date: the
    day of the run, None where its folder does not tell. run: the folder.
    """

    model: str
    protocol: str
    method: str
    tasks: tuple[str, ...]
    margin: float
    status: str
    lower_bits: float | None
    upper_bits: float | None
    safe: str | None
    safe_bits: float | None
    safe_bits_of: str | None
    n: int
    fixed_beforehand: bool
    date: str | None
    run: str


def make_atlas(runs: Sequence[str], out: Path, console: Console) -> Path:
    """Write atlas.html and atlas.json of the folders ``runs``, wildcards allowed, into ``out``; returns that.

    Folders that only a wildcard names are left out, with a note, where they hold neither records nor a report. Nothing
    is pooled: every method of every run is a row.

    Raises:
        UsageError: no folders, or a folder that is damaged.
        MissingError: a folder that is not there, or none that holds a run or a report.
    """
    if not runs:
        raise UsageError(
            "atlas takes folders of runs or reports: runs=[DIR,DIR]; runs=results/small/* names several"
        )
    folders, chosen = folders_of(list(runs))
    check_out(out)
    entries, left_out = [], []
    for folder, name in zip(folders, short_names(folders), strict=True):
        try:
            entries += entries_of(report_in(folder, {}), name, _day(folder))
        except MissingError as error:
            if chosen:
                raise
            left_out.append(f"Left out: {name} ({str(error).removeprefix(f'{folder} ').partition(';')[0]}).")
    if not entries:
        raise MissingError(f"runs={','.join(runs)}: none of {len(folders)} folders holds a method on a grid")
    entries.sort(key=lambda entry: (entry.model, entry.protocol, entry.method, entry.run))
    content = {"schema": SCHEMA, "atlas": [asdict(entry) for entry in entries], "left_out": left_out}
    page = {
        "title": "KV-cache atlas",
        "headline": _headline(entries),
        "remarks": left_out,
        "matrix": _matrix(entries),
        "tables": [(model, _details([e for e in entries if e.model == model])) for model in _models(entries)],
        "cliff_means": CLIFF_MEANS,
        "verdict_signs": VERDICT_SIGNS,
        "version": __version__,
    }
    contents = {"atlas.json": json_bytes(content), "atlas.html": render("atlas.html.j2", page)}
    written = write_all(out, contents)
    for line in (page["headline"], *left_out, f"atlas: {written['atlas.html']}"):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return out


def entries_of(report: Report, run: str, date: str | None) -> list[AtlasEntry]:
    """The methods of one report, those without a cliff (formats) too."""
    rows = [row for row in report.settings if row.kind in _SINGLE]
    methods = dict.fromkeys([*report.cliffs, *((row.quantizer or "") for row in rows)])
    found = []
    for method in methods:
        mine = [row for row in rows if (row.quantizer or "") == method]
        cliff = report.cliffs.get(method)
        safe = min((row for row in mine if row.verdict in SAFE), key=_bits, default=None)
        found.append(
            AtlasEntry(
                model=report.model or "unknown",
                protocol=report.protocol or "unknown",
                method=method or "unnamed",
                tasks=tuple(sorted(report.tasks)),
                margin=report.margin,
                status="undetermined" if cliff is None else cliff.status,
                lower_bits=None if cliff is None else cliff.lower_bits,
                upper_bits=None if cliff is None else cliff.upper_bits,
                safe=None if safe is None else safe.setting,
                safe_bits=None if safe is None else _bits(safe),
                safe_bits_of=None if safe is None else "coded part" if safe.cache_bits is None else "cache",
                n=report.n_examples,
                fixed_beforehand=report.preregistered,
                date=date,
                run=run,
            )
        )
    return found


def _bits(row: SettingResult) -> float:
    return float("inf") if row.paid_bits is None else row.paid_bits


def _day(folder: Path) -> str | None:
    times = [
        str(session.get("finished") or session.get("started") or "") for session in read_sessions(folder)
    ]
    return max(filter(None, times), default="")[:10] or None


def _models(entries: Sequence[AtlasEntry]) -> list[str]:
    return list(dict.fromkeys(entry.model for entry in entries))


def _headline(entries: Sequence[AtlasEntry]) -> str:
    methods, runs = ({getattr(entry, name) for entry in entries} for name in ("method", "run"))
    models = len(_models(entries))
    return f"Models: {models}; methods: {len(methods)}; runs: {len(runs)}. Nothing is averaged over them."


def _cliff(entry: AtlasEntry) -> str:
    return cliff_text(entry.status, entry.lower_bits, entry.upper_bits)


def _matrix(entries: Sequence[AtlasEntry]) -> Table:
    """A row for each model and protocol, a column for each method: the cliffs of all its runs."""
    methods = sorted({entry.method for entry in entries})
    rows = []
    for model, protocol in dict.fromkeys((entry.model, entry.protocol) for entry in entries):
        cells = []
        for method in methods:
            mine = [e for e in entries if (e.model, e.protocol, e.method) == (model, protocol, method)]
            cells.append("; ".join(dict.fromkeys(map(_cliff, mine))) or DASH)
        rows.append((f"{model}, {protocol}", *cells))
    return Table(("model, protocol", *methods), (False,) * (1 + len(methods)), tuple(rows))


def _details(entries: Sequence[AtlasEntry]) -> Table:
    titles = (
        "method",
        "protocol",
        "cliff (code bits)",
        "cheapest safe",
        "its bits",
        "of",
        "n",
        "margin",
        "standing",
        "date",
        "run",
    )
    numeric = (False, False, False, False, True, False, True, True, False, False, False)
    rows = [
        (
            *(entry.method, entry.protocol, _cliff(entry), entry.safe or DASH),
            *(fixed(entry.safe_bits), entry.safe_bits_of or DASH, str(entry.n), f"{entry.margin:g}"),
            *("fixed beforehand" if entry.fixed_beforehand else "exploratory", entry.date or DASH, entry.run),
        )
        for entry in entries
    ]
    return Table(titles, numeric, tuple(rows))
