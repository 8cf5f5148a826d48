"""Which tasks can react: those whose reference does them and that the degraded end of the grid moves.

An average over tasks of which some cannot lose anything is an average that dilutes the losses of the others. So
the margin applies to the average over the tasks that can react. Which these are is decided by the reference
against chance and by the grid point with the fewest bits, never by the setting under test; that grid point itself
is tested over all tasks, too, since choosing those that it moves favours its own drop.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from semkv_bench.errors import UsageError
from semkv_bench.stats.equivalence import difference_moments, reference_moments
from semkv_bench.stats.guarded import p_below, p_unseen_gains, score_interval, task_weights
from semkv_bench.stats.options import StatsOptions
from semkv_bench.stats.pairing import PairedScores

__all__ = ["Reacting", "chance_level", "lowest_points", "reacting_tasks"]

ROOM = 2  # margins that a task must be able to lose: one that can just lose the margin hides half of any other loss


@dataclass(frozen=True)
class Reacting:
    """The sample of the tasks that can react, and why the others cannot, by name."""

    paired: PairedScores
    dead: dict[str, str]


def reacting_tasks(paired: PairedScores, options: StatsOptions, chance: Mapping[str, float]) -> Reacting:
    """The tasks to which the margin applies.

    A task can react if the reference's score is above its chance level (by the interval at ``confidence``) and if
    the lowest point of a grid is shown, at ``alpha``, to lower it by more than ``ROOM``
    margins. Where that point is
    not degraded over all tasks there is nothing to judge tasks by, and where no task has enough examples to show it
    alone, all of them count. With ``sensitivity`` "run" all count in any case.
    """
    everything = Reacting(paired, {})
    if options.sensitivity == "run" or len(paired.task_names) == 1:
        return everything
    parts = [paired.of_tasks([code]) for code in range(len(paired.task_names))]
    guess = [float(chance.get(task, 0.0)) for task in paired.task_names]
    above = [_above(part, level, options) for part, level in zip(parts, guess, strict=True)]
    ends = lowest_points(paired)
    if not any(above) or not ends:
        return everything
    whole = paired.of_tasks(np.flatnonzero(above))
    falls = _falls(whole, ends, options)
    shown = [end for end, p in zip(ends, falls, strict=True) if p < options.alpha]
    if not shown:
        return everything
    moved = [
        works and min(_falls(part, shown, options, ROOM), default=1.0) < options.alpha
        for part, works in zip(parts, above, strict=True)
    ]
    alive = np.flatnonzero(moved if any(moved) else above)
    name = paired.settings[shown[-1]].name
    dead = {
        task: f"{name} is not shown to lower it by more than {ROOM * options.margin:g}"
        if works
        else f"full precision is not shown to be above its chance level of {level:g}"
        for code, (task, works, level) in enumerate(zip(paired.task_names, above, guess, strict=True))
        if code not in alive
    }
    chosen_by = dict(zip(ends, falls, strict=True)) if any(moved) else {}
    return Reacting(replace(paired.of_tasks(alive), chosen_by=chosen_by), dead)


def chance_level(paired: PairedScores, options: StatsOptions, chance: Mapping[str, float]) -> float:
    """Score of guessing, 0 to 1, averaged over tasks as the scores are; ``chance`` by task, 0 where it says nothing.

    Raises UsageError for a level outside 0..1.
    """
    for task, value in chance.items():
        if not isinstance(value, (int, float)) or not 0 <= value <= 1:
            raise UsageError(f"chance level of task {task} must lie in 0..1, got {value!r}")
    counts = np.bincount(paired.tasks, minlength=len(paired.task_names)).astype(float)[:, None]
    weights = task_weights(counts, options.average)[:, 0]
    return math.fsum(w * float(chance.get(t, 0.0)) for w, t in zip(weights, paired.task_names, strict=True))


def _falls(part: PairedScores, columns: list[int], options: StatsOptions, margins: float = 1) -> list[float]:
    """p-values of a drop beyond so many ``margins`` under each of ``columns``, 1 where it was not run."""
    run = ~np.isnan(part.differences[:, columns]).all(axis=0)
    here = [column for column, any_row in zip(columns, run, strict=True) if any_row]
    drop, p = margins * options.margin, []
    if here:
        m = difference_moments(part, options.average, here)
        p = np.maximum(p_below(m, -drop), p_unseen_gains(m, drop))
    known = dict(zip(here, map(float, p), strict=True))
    return [known.get(column, 1.0) for column in columns]


def _above(part: PairedScores, level: float, options: StatsOptions) -> bool:
    """Is the reference's score above chance? A chance of 0 is asked of the drop alone, which cannot be larger."""
    m = reference_moments(part, options.average, [0])
    return bool(m.mean[0] > 0 if level == 0 else score_interval(m, options.confidence)[0][0] > level)


def lowest_points(paired: PairedScores) -> list[int]:
    """Columns of the uniform settings with the fewest code bits, one a quantizer."""
    lowest: dict[str | None, int] = {}
    for column, info in enumerate(paired.settings):
        if info.kind == "uniform":
            other = lowest.setdefault(info.quantizer, column)
            if info.code_bits < paired.settings[other].code_bits:
                lowest[info.quantizer] = column
    return sorted(lowest.values())
