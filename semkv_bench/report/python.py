"""``semkv_bench.report(run)`` and ``semkv_bench.compare(runs)``: reports from Python, as typed results."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from semkv_bench.config.compose import compose_config
from semkv_bench.config.overrides import as_overrides, override
from semkv_bench.errors import UsageError
from semkv_bench.records.foreign import FORMATS
from semkv_bench.report.command import reported
from semkv_bench.report.compare import compared
from semkv_bench.stats.result import Report

__all__ = ["compare", "report"]


def report(run: str | Path, out: str | Path | None = None, **stats: Any) -> Report:
    """Analyse a run folder, or a file of scores, and write its report as ``cliff-report`` does.

    out: folder of the report; None: the run's own. stats: options in place of the run's own, such as
    ``margin=0.05``; they make the report exploratory.

    Returns the analysis; its fields are those of report.json.
    Raises UsageError and MissingError as the command does.
    """
    path = Path(run).expanduser()
    key = "records" if path.suffix in FORMATS and not path.is_dir() else "run"
    given = [override(key, path), *([] if out is None else [override("out", out)]), *_options(stats)]
    config = compose_config("cliff_report", as_overrides(given, "cliff_report"))
    return reported(config, set(stats), Console(quiet=True))[0]


def compare(runs: Sequence[str | Path], out: str | Path = "comparison", **stats: Any) -> Report:
    """Methods of several runs against each other, as ``semkv-bench compare`` does; returns the analysis.

    Raises UsageError where the runs differ in more than their methods.
    """
    if isinstance(runs, str | Path):
        raise UsageError(f"compare takes a list of runs, not {str(runs)!r} alone")
    given = [override("runs", list(runs)), override("out", out), *_options(stats)]
    config = compose_config("compare", as_overrides(given, "compare"))
    return compared(config, stats, Console(quiet=True))[0]


def _options(stats: dict[str, Any]) -> list[str]:
    return [override(f"stats.{name}", value) for name, value in stats.items()]
