"""Raced runs: error rates where settings leave at the look that shows them degraded, and the rows that it saves."""

from dataclasses import dataclass, field

import numpy as np

from calibration.planted import (
    LEVELS,
    TASKS,
    CliffCell,
    PlantedSets,
    adjusted_states,
    p_values,
    plant,
    planted_name,
)
from calibration.sequential import looks_of
from semkv_bench.stats import StatsOptions

__all__ = ["RACED_PLANS", "racing_at_margin", "racing_cell", "run_sets"]

RACED_PLANS = ((75, 150, 300), (100, 200, 300, 400), (200, 400, 600))
_AT_ONCE = 500


@dataclass
class RanSets:
    """How runs of planted sets ended: verdict codes [S, R], and the rows that were run [R], the reference's among them.

    ever: was a code reached at any look, [S, R] by code?
    """

    states: np.ndarray
    rows: np.ndarray
    ever: dict[int, np.ndarray] = field(default_factory=dict)


def run_sets(sets: PlantedSets, sizes: tuple[int, ...], options: StatsOptions, race: bool) -> RanSets:
    """Run every set to the first look at which all settings are decided; with ``race``, degraded ones leave before.

    As a run does: a setting that left keeps its p-values, and the smallest p of being degraded counts.
    """
    number = sets.settings.shape[2]
    shape = (len(LEVELS), number)
    within, below, left = np.ones(shape), np.ones(shape), np.zeros(shape, bool)
    states, going, rows = np.ones(shape, int), np.ones(number, bool), np.zeros(number)
    ever = {code: np.zeros(shape, bool) for code in (0, 2)}
    for look, size, before in zip(looks_of(sizes), sizes, (0, *sizes), strict=False):
        rows += going * (size - before) * (1 + (~left).sum(axis=0))
        now_within, now_below = p_values(sets, options, size, look)
        within = np.where(left, within, now_within)
        earliest = np.minimum(below, now_below) if race else now_below
        below = np.where(left, below, earliest)
        found = adjusted_states(within, below, options)
        states[:, going] = found[:, going]
        for code, seen in ever.items():
            seen |= going & (found == code)
        left |= race & going & (found == 0)
        going = going & (states == 1).any(axis=0)
    return RanSets(states, rows, ever)


def racing_cell(
    score: str, sizes: tuple[int, ...], edge: int | None, reps: int, rng: np.random.Generator
) -> dict:
    """Whole runs on planted cliffs, raced and not: what is found, and how many of the planned rows were run."""
    options = StatsOptions()
    cells = {race: CliffCell(score, sizes[-1], planted_name(edge)) for race in (False, True)}
    rows: dict[bool, list[np.ndarray]] = {False: [], True: []}
    differ = 0
    for start in range(0, reps, _AT_ONCE):
        sets = plant(score, sizes[-1], edge, min(_AT_ONCE, reps - start), rng)
        ran = {race: run_sets(sets, sizes, options, race) for race in cells}
        for race, cell in cells.items():
            cell.count(ran[race].states, edge)
            rows[race].append(ran[race].rows)
        differ += int((ran[True].states != ran[False].states).any(axis=0).sum())
    planned = sizes[-1] * (1 + len(LEVELS))
    told = {
        "score": score,
        "planted": cells[True].planted,
        "looks": list(sizes),
        "tasks": TASKS,
        "reps": reps,
    }
    told["other_verdicts"] = differ / reps
    for race, name in ((False, "looks"), (True, "raced")):
        cell = cells[race]
        told |= {f"rows_{name}": float(np.concatenate(rows[race]).mean() / planned)}
        counts = ("right", "undetermined", "wrong", "false_equivalent", "false_degraded")
        told |= {f"{count}_{name}": getattr(cell, count) / reps for count in counts}
    return told


def racing_at_margin(
    score: str, sizes: tuple[int, ...], edge: int, reps: int, rng: np.random.Generator
) -> dict:
    """``LEVELS[edge]`` drops by exactly the margin: how often any look of a run says that it holds, or degraded."""
    options = StatsOptions()
    counts = {f"{claim}_{name}": 0 for name in ("looks", "raced") for claim in ("holds", "degraded")}
    for start in range(0, reps, _AT_ONCE):
        sets = plant(score, sizes[-1], edge, min(_AT_ONCE, reps - start), rng, options.margin)
        for race, name in ((False, "looks"), (True, "raced")):
            ever = run_sets(sets, sizes, options, race).ever
            counts[f"holds_{name}"] += int(ever[2][edge].sum())
            counts[f"degraded_{name}"] += int(ever[0][edge].sum())
    known = {"score": score, "looks": list(sizes), "levels": LEVELS[edge], "reps": reps}
    return known | {name: number / reps for name, number in counts.items()}
