"""``semkv-bench compare``: methods of several runs against each other, where the runs differ in nothing else."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import DictConfig
from rich.console import Console

from semkv_bench import report
from semkv_bench.errors import UsageError
from semkv_bench.records.charter import changes, without_path
from semkv_bench.records.folder import read_run
from semkv_bench.records.runs import folders_of, short_names
from semkv_bench.report.command import as_fixed, check_out, extensions_of, portable
from semkv_bench.stats import StatsOptions, analyze
from semkv_bench.stats.result import Report

__all__ = ["check_comparable", "compared", "joined"]

# What a method's scores hang on besides the method; the list of examples last, since it follows from the others.
_SAME = (
    "model", "model_config", "weights", "generation_config", "layers", "engine", "protocol", "protocol_config",
    "task", "tasks", "chance", "prompts", "seeds", "max_prompt_tokens", "max_new_tokens", "per_task", "examples",
)  # fmt: skip
_SAME_STATS = ("margin", "alpha", "average", "confidence", "sensitivity", "unpaired", "seed", "resamples")


def compared(config: DictConfig, given: Mapping[str, Any], console: Console) -> tuple[Report, Path]:
    """Compare the methods of ``config.runs``, print the report and write it; returns the analysis and the folder.

    given: options of the statistics in place of the runs' own.

    Raises:
        UsageError: fewer than two runs, or runs that differ in more than their methods, with what differs.
        MissingError: a folder that is not there, or holds no run.
    """
    if given.get("looks") is not None:
        raise UsageError("stats.looks is fixed by sweep, before the first record; leave it out")
    folders = [] if config.runs is None else folders_of(config.runs)[0]
    if len(folders) < 2:
        raise UsageError("compare takes two runs or more: runs=[DIR,DIR]")
    out = Path(config.out).expanduser()
    check_out(out)
    runs = [read_run(folder) for folder in folders]
    names = short_names(folders)
    charters = dict(zip(names, (charter for _, charter in runs), strict=True))
    check_comparable(charters, given)
    charter = runs[0][1]
    fixed = [_fixed(each) for each in charters.values()]
    options = replace(fixed[0], **given)
    beforehand = all(as_fixed(options, each) for each in fixed)
    extensions = tuple(each for charter in charters.values() for each in extensions_of(charter))
    frame = joined([(name, frame) for name, (frame, _) in zip(names, runs, strict=True)])
    result = analyze(
        frame,
        options,
        chance=charter["chance"],
        preregistered=beforehand and not any(each.recorded for each in extensions),
        split=charter["hash"],
    )
    result = replace(result, options_as_fixed=beforehand, extensions=extensions)
    if result.methods is None:
        raise UsageError("the runs hold one method between them; compare takes runs of different quantizers")
    context = {
        "source": ", ".join(portable(folder) for folder in folders),
        "prompts": charter["prompts"],
        "seeds": charter["seeds"],
    }
    written = report.write(result, frame, context, out)
    report.show(result, context, console)
    console.print(f"\ncomparison: {written['report.html']}", highlight=False, markup=False, soft_wrap=True)
    return result, out


def _fixed(charter: Mapping[str, Any]) -> StatsOptions:
    return StatsOptions(**{name: value for name, value in charter["stats"].items() if name != "looks"})


def check_comparable(charters: Mapping[str, Mapping[str, Any]], given: Mapping[str, Any]) -> None:
    """Raise UsageError, naming what differs, unless all ``charters``, by the name of their run, may be compared."""
    (first, mine), *others = charters.items()
    for name, charter in charters.items():
        if "looks" in charter:
            ends = "whose settings leave" if charter["stats"].get("race") else "which ends"
            raise UsageError(
                f"{name} is a sequential run, {ends} when its own methods are decided; compare whole runs"
            )
    for name, theirs in others:
        differ = list(changes(_shared(mine), _shared(theirs), where=(f"in {first}", f"in {name}")))
        if differ:
            raise UsageError(
                f"{first} and {name} are not of the same protocol and examples, so their methods cannot be compared: "
                f"{differ[0]}"
            )
        for option in _SAME_STATS:
            ours, other = (charter["stats"].get(option) for charter in (mine, theirs))
            if ours != other and option not in given:
                raise UsageError(
                    f"{first} and {name} fixed different statistics (stats.{option}: {ours} and {other}); "
                    f"give stats.{option}=... to compare them by"
                )


def _shared(charter: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: charter[name] for name in _SAME if name in charter}
    # Fingerprints of weights and prompts say what lies there.
    return {
        name: without_path(kept[name]) if name in ("model_config", "task") else kept[name] for name in kept
    }


def joined(runs: Sequence[tuple[str, pd.DataFrame]]) -> pd.DataFrame:
    """Records of all runs, paired with the first run's ``full``; that of another one is its repeat, named by the run.

    A method that several runs hold stays apart: its settings are named by their runs.
    """
    held = [set(frame["quantizer"].dropna()) for _, frame in runs]
    several = {method for method in set().union(*held) if sum(method in own for own in held) > 1}
    settings = [set(frame["setting"]) for _, frame in runs]
    parts = []
    for number, (name, frame) in enumerate(runs):
        part = frame.copy()
        again = part["quantizer"].isin(several)
        if number:
            before = set().union(*settings[:number])
            # Deletion has no quantizer, and may have been run twice.
            again |= part["setting"].isin(before)
        mark = f" ({name})"
        part.loc[again & part["quantizer"].notna(), "quantizer"] += mark
        part.loc[again, "setting"] += mark
        parts.append(part)
    return pd.concat(parts, ignore_index=True)
