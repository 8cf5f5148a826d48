"""Several runs, by folder, set side by side."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console

from semkv_bench.errors import MissingError, UsageError
from semkv_bench.files import parse_json
from semkv_bench.records.runs import folders_of, short_names
from semkv_bench.report.command import analysed_run, check_out
from semkv_bench.report.overview import show_overview, write_overview
from semkv_bench.report.overview_row import overview_rows
from semkv_bench.stats.result import Report

__all__ = ["OVERVIEWS", "make_overview", "report_in"]

OVERVIEWS = Path("results/overview")


def make_overview(config: DictConfig, given: dict[str, Any], console: Console) -> Path:
    """Set the runs of ``config.runs`` side by side, print them and write the overview; returns its folder.

    ``runs`` is a list of folders, or a text that may hold wildcards. A run folder is analysed from its
    records, with the statistics of its protocol but for those ``given``; a folder without records may hold a
    report.json. Folders that only a wildcard names are left out, with a note, where they hold neither.

    Raises:
        UsageError: runs= beside run= or records=, an empty list, a folder with neither records nor report.
        MissingError: a folder that is not there, nothing that matches.
    """
    for name in ("run", "records"):
        if config[name] is not None:
            raise UsageError(f"give runs=[DIR,...] or {name}=..., not both")
    if config.records_model is not None:
        raise UsageError(
            "model=NAME chooses a model of records=FILE; name the runs of one model in runs=, leave it out"
        )
    folders, chosen = folders_of(config.runs)
    out = Path(config.out or OVERVIEWS).expanduser()
    _check_out(out)
    names = short_names(folders)
    reports, left_out = [], []
    for folder, name in zip(folders, names, strict=True):
        try:
            reports.append((name, report_in(folder, given)))
        except MissingError as error:
            if chosen:
                raise
            reason = str(error).removeprefix(f"{folder} ").partition(";")[0]
            left_out.append(f"Left out: {name} ({reason}).")
    if not reports:
        raise MissingError(f"runs={config.runs}: none of {len(folders)} folders holds a report or records")
    rows = overview_rows(reports)
    written = write_overview(rows, left_out, out)
    show_overview(rows, left_out, console)
    console.print(f"\noverview: {written['report.html']}", highlight=False, markup=False, soft_wrap=True)
    return out


def report_in(folder: Path, given: dict[str, Any]) -> Report:
    """The report of a run folder, analysed from its records, or the report.json of a folder without records.

    given: statistics in place of the run's own. Raises MissingError where there is neither, UsageError where a file is
    damaged.
    """
    if (folder / "protocol.yaml").exists():
        try:
            return analysed_run(folder, given)
        except UsageError as error:
            if str(folder) in str(error):
                raise
            raise UsageError(f"{folder}: {error}") from error
    path = folder / "report.json"
    if not path.exists():
        raise MissingError(
            f"{folder} holds neither a report.json nor records; give folders of runs or reports"
        )
    try:
        content = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
    if isinstance(content, dict) and "overview" in content:
        raise MissingError(f"{folder} holds an overview; give folders of runs or reports")
    try:
        report = Report.from_json(content)
    except ValueError as error:
        raise UsageError(f"{path} is not a report of this program: {error}") from error
    if given:
        raise UsageError(
            f"{folder} holds a report and no records, so its {', '.join(sorted(given))} cannot change"
        )
    return report


def _check_out(out: Path) -> None:
    check_out(out)
    present = out / "report.json"
    if present.exists():
        try:
            overview = "overview" in parse_json(present.read_bytes())
        except (OSError, ValueError, TypeError):
            overview = False
        if not overview:
            raise UsageError(f"out={out} holds a report, which would be replaced; choose another")
