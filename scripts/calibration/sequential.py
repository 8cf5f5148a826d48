"""Sequential runs: error rates over the whole procedure, and what stopping early saves."""

import numpy as np

from calibration.planted import LEVELS, TASKS, CliffCell, plant, planted_name, states_of
from calibration.shapes import Shape
from semkv_bench.stats import StatsOptions
from semkv_bench.stats.equivalence import over_all_looks, p_degraded, p_no_worse
from semkv_bench.stats.guarded import moments
from semkv_bench.stats.spending import Look

__all__ = ["PLANS", "looks_of", "saving_cell", "single_cell"]

ALPHA = 0.05
# Sample sizes at the looks; the last is the end of the plan.
PLANS = ((40, 80, 120), (75, 150, 300), (100, 200, 300, 400), (150, 300, 450, 600), (300, 600, 900))
_AT_ONCE = 500


def looks_of(sizes: tuple[int, ...]) -> list[Look]:
    """The looks at ``sizes`` clusters, the last being the whole plan."""
    times = tuple(size / sizes[-1] for size in sizes)
    return [Look(times, number, sizes) for number in range(1, len(sizes) + 1)]


def single_cell(
    shape: Shape, mean: float, sizes: tuple[int, ...], reps: int, rng: np.random.Generator
) -> dict:
    """One test with the true drop at the margin: how often any of the looks gives the wrong verdict."""
    tasks = rng.permutation(shape.codes(sizes[-1]))
    full, setting, row_sizes = shape.sample(rng, (sizes[-1], reps))
    options = StatsOptions(margin=-mean, alpha=ALPHA)
    equivalent, degraded = np.zeros(reps, bool), np.zeros(reps, bool)
    for look, size in zip(looks_of(sizes), sizes, strict=True):
        rows = None if row_sizes is None else row_sizes[:size]
        m = moments((setting - full)[:size], full[:size], tasks[:size], "macro", rows)
        equivalent |= over_all_looks(p_no_worse(m, options), look) < ALPHA
        degraded |= over_all_looks(p_degraded(m, options), look) < ALPHA
    return {
        "shape": shape.name,
        "looks": list(sizes),
        "true_difference": mean,
        "false_equivalent": float(equivalent.mean()),
        "false_degraded": float(degraded.mean()),
    }


def saving_cell(
    score: str, sizes: tuple[int, ...], edge: int | None, reps: int, rng: np.random.Generator
) -> dict:
    """The whole procedure on planted cliffs, beside one look at the end: what is found, and after how many examples.

    A run stops at the first look at which every setting is decided.
    """
    options = StatsOptions(alpha=ALPHA)
    early, fixed = (CliffCell(score, sizes[-1], planted_name(edge)) for _ in range(2))
    used = []
    for start in range(0, reps, _AT_ONCE):
        number = min(_AT_ONCE, reps - start)
        sets = plant(score, sizes[-1], edge, number, rng)
        final = np.full((len(LEVELS), number), -1)
        size_used = np.full(number, sizes[-1])
        for look, size in zip(looks_of(sizes), sizes, strict=True):
            states = states_of(sets, options, size, look)
            going = final[0] < 0
            stops = going & ((states != 1).all(axis=0) | (size == sizes[-1]))
            final[:, stops] = states[:, stops]
            size_used[stops] = size
        early.count(final, edge)
        fixed.count(states_of(sets, options, sizes[-1]), edge)
        used.append(size_used)
    used = np.concatenate(used)
    return {
        "score": score,
        "planted": early.planted,
        "looks": list(sizes),
        "tasks": TASKS,
        "examples_used": float(used.mean()),
        "saved": float(1 - used.mean() / sizes[-1]),
        "stopped_early": float((used < sizes[-1]).mean()),
        "right": early.right / reps,
        "right_fixed": fixed.right / reps,
        "undetermined": early.undetermined / reps,
        "undetermined_fixed": fixed.undetermined / reps,
        "wrong": early.wrong / reps,
        "false_equivalent": early.false_equivalent / reps,
        "false_degraded": early.false_degraded / reps,
    }
