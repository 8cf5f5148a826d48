"""From a run folder or a file of foreign scores to the written report."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from semkv_bench import report
from semkv_bench.config.compose import build
from semkv_bench.errors import MissingError, UsageError
from semkv_bench.files import check_writable
from semkv_bench.plan.settings import plain_node
from semkv_bench.records.folder import read_run, read_sessions
from semkv_bench.records.foreign import read_records
from semkv_bench.records.prompts import read_prompts
from semkv_bench.records.runs import RUNS, newest_run
from semkv_bench.records.schema import EXAMPLE
from semkv_bench.report.export import exported, formats_of
from semkv_bench.report.files import write_all
from semkv_bench.report.formatting import join
from semkv_bench.report.served import served_of
from semkv_bench.report.standing import LookState, last_look
from semkv_bench.stats import StatsOptions, analyze
from semkv_bench.stats.options import stats_options
from semkv_bench.stats.result import Batching, CacheSize, Extension, Layers, Measured, Report
from semkv_bench.sweep.measured import read_measured

__all__ = [
    "analysed_run",
    "as_fixed",
    "check_out",
    "extensions_of",
    "given_options",
    "make_import_report",
    "portable",
    "reported",
    "run_report",
]


# Options that decide verdicts: given afterwards, they make a report exploratory.
_DECIDING = ("margin", "alpha", "average", "confidence", "seed", "unpaired", "sensitivity", "at_bits")


# What sessions of a run add up to.
_SUMMED = ("seconds", "prompt_tokens_fed", "prompt_tokens_reused")


@dataclass(frozen=True)
class _Source:
    frame: pd.DataFrame
    options: StatsOptions
    preregistered: bool
    chance: dict[str, float]
    context: dict[str, Any]
    out: Path
    own: bool = False
    planned: int | None = None
    prompts: Mapping[tuple, Mapping[str, Any]] = field(default_factory=dict)
    standing: LookState | None = None
    split: str = ""
    measured: Measured | None = None
    extensions: tuple[Extension, ...] = ()


def reported(config: DictConfig, changed: Collection[str], console: Console) -> tuple[Report, Path]:
    """Analyse, write report.json, .md, .html and the figures, and print the tables.

    ``changed`` names the statistics options that the user gave; a run keeps those of its protocol otherwise.
    Returns the analysis and the folder that was written.
    """
    if config.run is not None and config.records is not None:
        raise UsageError("give run=DIR or records=FILE, not both")
    if config.records_model is not None and config.records is None:
        raise UsageError(
            "model=NAME chooses a model of records=FILE; a run folder holds one model, leave it out"
        )
    return _reported(
        config, lambda: _foreign(config) if config.records is not None else _own(config, changed), console
    )


def _reported(config: DictConfig, read: Callable[[], _Source], console: Console) -> tuple[Report, Path]:
    """The report of what ``read`` finds, and what else ``config`` asks for, which is checked first."""
    formats = formats_of(plain_node(config.export))
    logger = None if config.log is None else build(config.log, "log")
    source = read()
    result = _write_and_show(source, console)
    for path in write_all(source.out, exported(source.frame, formats)).values():
        console.print(f"records: {path}", highlight=False, markup=False, soft_wrap=True)
    if logger is not None:
        console.print(logger.log(result, source.out), highlight=False, markup=False, soft_wrap=True)
    return result, source.out


def make_import_report(frame: pd.DataFrame, kind: str, config: DictConfig, console: Console) -> Path:
    """The report of logs that another harness left; ``kind`` is their format. Returns the folder that was written."""
    _check_planless(config)
    out = Path(f"{kind}-report") if config.out is None else Path(config.out).expanduser()
    check_out(out)
    source = _Source(frame, stats_options(config), False, {}, {"source": f"logs of {kind}"}, out)
    return _reported(config, lambda: source, console)[1]


def run_report(path: Path, console: Console) -> tuple[Report, Path]:
    """Report of a run folder with the statistics of its protocol, written into it; the report and the folder."""
    source = _of_run(path, {})
    return _write_and_show(source, console), source.out


def _write_and_show(source: _Source, console: Console) -> Report:
    result = _analysed(source)
    written = report.write(result, source.frame, source.context, source.out, source.prompts)
    report.show(result, source.context, console)
    where = f"\nreport: {written.get('report.html', source.out)}"
    console.print(where, highlight=False, markup=False, soft_wrap=True)
    return result


def analysed_run(path: Path, given: dict[str, Any]) -> Report:
    """Statistics of a run folder, with the options ``given`` in place of its own."""
    return _analysed(_of_run(path, given))


def _analysed(source: _Source) -> Report:
    standing = source.standing
    result = analyze(
        source.frame,
        source.options,
        chance=source.chance,
        preregistered=source.preregistered and not any(e.recorded for e in source.extensions),
        split=source.split,
        look=standing and standing.look,
    )
    return replace(
        _with_sizes(result, source.context.get("protocol")),
        planned_examples=source.planned,
        batching=_batching_noise(source.frame) if source.own else None,
        served=served_of(source.context.get("environment") or {}),
        measured=source.measured,
        warnings=(*result.warnings, *_unfinished(source)),
        options_as_fixed=source.preregistered,
        extensions=source.extensions,
        sequential=standing.described(result.sequential) if standing else None,
    )


def _unfinished(source: _Source) -> tuple[str, ...]:
    """What an extension that is not finished leaves out."""
    planned = (source.context.get("protocol") or {}).get("settings", {})
    left_out = sorted(set(planned) - set(source.frame["setting"])) if source.extensions else []
    if not left_out:
        return ()
    they = "it is" if len(left_out) == 1 else "they are"
    return (
        f"the extension by {join(left_out)} is not finished, so {they} left out: run the same sweep again to go on",
    )


def _with_sizes(result: Report, charter: Mapping[str, Any] | None) -> Report:
    """With the sizes of whole caches and the number of coded layers that a run's charter holds, where it does."""
    described = (charter or {}).get("settings", {})
    sizes = {
        name: {tokens: CacheSize(**size) for tokens, size in setting["cache_at"].items()}
        for name, setting in described.items()
        if "cache_at" in setting
    }
    settings = tuple(replace(row, cache_at=sizes.get(row.setting)) for row in result.settings)
    point = result.operating_point
    point = point and replace(point, cache_at=sizes.get(point.setting))
    layers = Layers(**charter["layers"]) if charter and "layers" in charter else None
    return replace(result, settings=settings, operating_point=point, layers=layers)


def _own(config: DictConfig, changed: Collection[str]) -> _Source:
    path = newest_run() if config.run is None else Path(config.run).expanduser()
    if path is None:
        raise MissingError(
            f"there is no run under {RUNS}; run `semkv-bench sweep` first, or give run=DIR or records=FILE"
        )
    if config.out is None:
        if path.is_dir():
            check_writable(path, "run")
        source = _of_run(path, given_options(config, changed))
        # A look under other options leaves the report of what was fixed beforehand as it is.
        return source if source.preregistered else replace(source, out=path / "exploratory")
    out = Path(config.out).expanduser()
    check_out(out, own=path)
    return replace(_of_run(path, given_options(config, changed)), out=out)


def check_out(out: Path, own: Path | None = None) -> None:
    """Refuse an ``out`` that is no folder, or the folder of a run other than ``own``.

    Raises:
        UsageError: as said; a report would replace that run's, or could not be written after all the work.
        SemkvError: it may not be written to.
    """
    check_writable(out)
    if (out / "protocol.yaml").exists() and (own is None or out.resolve() != own.resolve()):
        raise UsageError(f"out={out} is the folder of a run, whose report would be replaced; choose another")


def given_options(config: DictConfig, changed: Collection[str]) -> dict[str, Any]:
    """The statistics options that the user gave."""
    stats = OmegaConf.to_container(config.stats)
    return {name: stats[name] for name in changed if name in stats}


def _of_run(path: Path, given: dict[str, Any]) -> _Source:
    """A run folder; ``given`` are statistics options that replace those of its protocol."""
    frame, charter = read_run(path)
    # All options given at once hold looks too, as null; those of the run stand.
    if given.pop("looks", None) is not None:
        raise UsageError("stats.looks is fixed by sweep, before the first record; leave it out")
    if given.pop("race", False) and not charter["stats"].get("race"):
        raise UsageError("stats.race is fixed by sweep, before the first record; leave it out")
    standing = last_look(path, frame, charter)
    frame = frame if standing is None else standing.frame
    fixed = StatsOptions(**charter["stats"])
    options = replace(fixed, **given)
    context = {
        "source": portable(path),
        "protocol": _portable_values(charter),
        "config": _portable_values(_read_config(path)),
        "environment": _environment(read_sessions(path)),
        "prompts": charter["prompts"],
        "seeds": charter["seeds"],
    }
    planned = charter["examples"]["count"] if standing is None else standing.complete_at
    return _Source(
        frame=frame,
        options=options,
        preregistered=as_fixed(options, fixed),
        chance=charter["chance"],
        context=context,
        out=path,
        own=True,
        planned=planned,
        prompts=read_prompts(path),
        standing=standing,
        split=charter["hash"],
        measured=read_measured(path, charter),
        extensions=extensions_of(charter),
    )


def as_fixed(options: StatsOptions, fixed: StatsOptions) -> bool:
    """Is all that verdicts hang on in ``options`` as in those that were fixed beforehand?"""
    return all(getattr(options, name) == getattr(fixed, name) for name in _DECIDING)


def extensions_of(charter: Mapping[str, Any]) -> tuple[Extension, ...]:
    """What was added to the run of ``charter`` after it was planned."""
    return tuple(
        Extension(
            time=amendment["time"],
            examples=tuple(amendment["examples"]),
            settings=tuple(amendment["settings"]),
            recorded=amendment["recorded"],
            reported=amendment["reported"],
        )
        for amendment in charter.get("amendments", [])
    )


def _foreign(config: DictConfig) -> _Source:
    _check_planless(config)
    path = Path(config.records).expanduser()
    out = path.with_name(f"{path.stem}-report") if config.out is None else Path(config.out).expanduser()
    check_out(out)
    frame = read_records(path, model=config.records_model)
    return _Source(frame, stats_options(config), False, {}, {"source": portable(path)}, out)


def _check_planless(config: DictConfig) -> None:
    if config.stats.looks is not None or config.stats.race:
        name = "looks" if config.stats.looks is not None else "race"
        raise UsageError(f"stats.{name} plans a sweep; scores from elsewhere are looked at once")


def portable(path: Path) -> str:
    """``path`` relative to the current folder where it lies below it, else its last part.

    Reports are committed and passed on; where a folder lay on somebody's machine is nobody's business.
    """
    whole, here = path.expanduser().resolve(), Path.cwd().resolve()
    if whole.is_relative_to(here) and whole != here:
        return whole.relative_to(here).as_posix()
    return whole.name


def _portable_values(tree: Any) -> Any:
    """``tree`` with the paths in it written as :func:`portable` does."""
    if isinstance(tree, dict):
        return {key: _portable_values(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_portable_values(value) for value in tree]
    if isinstance(tree, str) and tree[:1] in ("/", "~") and tree.strip("/~"):
        return portable(Path(tree))
    return tree


def _batching_noise(frame: pd.DataFrame) -> Batching | None:
    """How ``full`` in a batch of its own compares with ``full`` among the other settings, where that was measured."""
    if "alone_score" not in frame:
        return None
    measured = frame[frame["alone_score"].notna()].sort_values(EXAMPLE)
    if measured.empty:
        return None
    divergence = measured["alone_kl"].astype(float)
    return Batching(
        examples=len(measured),
        same_tokens=int(measured["alone_same_tokens"].astype(bool).sum()),
        kl=float(divergence.mean()) if divergence.notna().any() else None,
        diff=float((measured["alone_score"].astype(float) - measured["score"]).mean()),
    )


def _read_config(path: Path) -> dict[str, Any]:
    """The configuration as it was written; nothing depends on it, so a lost one is left out."""
    try:
        config = yaml.safe_load((path / "config.yaml").read_text())
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return config if isinstance(config, dict) else {}


def _environment(sessions: list[dict[str, Any]]) -> dict[str, Any]:
    """The sessions of a run as one description: the first session's machine, first start and last finish."""
    merged: dict[str, Any] = {}
    for session in sessions:
        for name, value in session.items():
            if name in _SUMMED:
                value = value if isinstance(value, (int, float)) else 0
                merged[name] = round(merged.get(name, 0) + value, 1)
            elif name == "finished" or name not in merged:
                merged[name] = value
    return merged
