"""Records with a planted cliff, many sets at once: is it found, and how soon."""

from dataclasses import dataclass
from math import log2

import numpy as np

from semkv_bench.stats import StatsOptions
from semkv_bench.stats.cliff import locate
from semkv_bench.stats.equivalence import over_all_looks, p_degraded, p_no_worse
from semkv_bench.stats.guarded import moments
from semkv_bench.stats.multiplicity import adjusted, shares
from semkv_bench.stats.pairing import SettingInfo
from semkv_bench.stats.spending import Look

__all__ = [
    "GRID",
    "LEVELS",
    "CliffCell",
    "PlantedSets",
    "adjusted_states",
    "cliff_cell",
    "cliff_cell_at_margin",
    "p_values",
    "plant",
    "planted_name",
    "states_of",
]

LEVELS = (16, 8, 6, 5, 4, 3, 2)
TASKS = 3
_AT_ONCE = 500
_NAMES = ("degraded", "open", "holds")
_RIGHT = 0.7  # answers that are right at first
# F1: mean score, and what clipping at 0 and 1 (a quarter and 0.35 of the scores) takes from the fifth that is moved.
_F1_MEAN, _F1_CLIPPED = 0.55, 0.2 * 0.1 * 0.3989423 * (0.35 - 0.25)
GRID = [SettingInfo(f"L{levels}", "uniform", "planted", log2(levels), None, None) for levels in LEVELS]


@dataclass(frozen=True)
class PlantedSets:
    """Scores of ``full`` [N, R] and of the settings [S, N, R], from many levels to few; tasks [N]."""

    full: np.ndarray
    settings: np.ndarray
    tasks: np.ndarray


def _share_at(score: str, drop: float) -> float:
    """Share of the answers that must be lost for a true drop of ``drop``."""
    if score == "zero_one":
        return drop / _RIGHT
    return (drop - _F1_CLIPPED) / (_F1_MEAN - _F1_CLIPPED)


def plant(
    score: str,
    clusters: int,
    edge: int | None,
    reps: int,
    rng: np.random.Generator,
    drop_at_edge: float | None = None,
) -> PlantedSets:
    """Sets of three tasks: no drop above the cliff; 15, 30, 50, ... % of the answers lost below it.

    ``edge`` is the place in ``LEVELS`` of the last setting that holds; None: all hold. With ``drop_at_edge`` that
    setting has exactly this true drop.
    """
    shape = (clusters, reps)
    if score == "zero_one":
        full = (rng.random(shape) < _RIGHT).astype(float)
    else:
        u = rng.random(shape)
        full = np.where(u < 0.25, 0.0, np.where(u < 0.6, 1.0, rng.beta(2, 2, shape)))
    settings = []
    for place in range(len(LEVELS)):
        below = 0 if edge is None else max(0, place - edge)
        lost = (0.0, 0.15, 0.3, 0.5, 0.7, 0.9, 0.95)[below]
        if place == edge and drop_at_edge is not None:
            lost = _share_at(score, drop_at_edge)
        near = full
        if score != "zero_one":
            moved = rng.random(shape) < 0.2
            near = np.where(moved, np.clip(full + 0.1 * rng.standard_normal(shape), 0, 1), full)
        settings.append(np.where(rng.random(shape) < lost, 0.0, near))
    return PlantedSets(full, np.stack(settings), np.arange(clusters) % TASKS)


def states_of(
    sets: PlantedSets, options: StatsOptions, clusters: int, look: Look | None = None
) -> np.ndarray:
    """Verdict codes [S, R] after the first ``clusters``: 0 degraded, 1 open, 2 holds, adjusted as in a report.

    At a ``look`` the p-values are those over all looks.
    """
    return adjusted_states(*p_values(sets, options, clusters, look), options)


def p_values(
    sets: PlantedSets, options: StatsOptions, clusters: int, look: Look | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Of no worse and of degraded, [S, R] each, after the first ``clusters`` and not adjusted for many settings."""
    full, tasks = sets.full[:clusters], sets.tasks[:clusters]
    within, below = [], []
    for scores in sets.settings[:, :clusters]:
        m = moments(scores - full, full, tasks, options.average)
        within.append(over_all_looks(p_no_worse(m, options), look))
        below.append(over_all_looks(p_degraded(m, options), look))
    return np.array(within), np.array(below)


def adjusted_states(within: np.ndarray, below: np.ndarray, options: StatsOptions) -> np.ndarray:
    """Verdict codes [S, R] as ``states_of`` gives them, from the p-values of no worse and of degraded."""
    holds = np.apply_along_axis(adjusted, 0, within, shares(GRID)) < options.alpha
    falls = np.apply_along_axis(adjusted, 0, below, shares(GRID, bottom_up=True)) < options.alpha
    return np.where(holds, 2, np.where(falls, 0, 1))


@dataclass
class CliffCell:
    """How often the cliff of planted sets was found, in counts of ``reps``."""

    score: str
    clusters: int
    planted: str
    reps: int = 0
    right: int = 0
    wider: int = 0
    wrong: int = 0
    undetermined: int = 0
    false_equivalent: int = 0
    false_degraded: int = 0

    def count(self, states: np.ndarray, edge: int | None) -> None:
        """Add the outcomes of verdict codes [S, R].

        Right: exactly the planted interval, or below the grid where none was planted. Wider: an interval
        around it. False verdicts count sets with at least one wrong ``equivalent``, or ``degraded``.
        """
        falls = len(LEVELS) if edge is None else edge + 1
        self.reps += states.shape[1]
        self.false_equivalent += int((states[falls:] == 2).any(axis=0).sum())
        self.false_degraded += int((states[:falls] == 0).any(axis=0).sum())
        patterns, counts = np.unique(states.T, axis=0, return_counts=True)
        for pattern, number in zip(patterns, counts, strict=True):
            # locate() runs from few bits to many
            outcome = self._outcome(locate([_NAMES[code] for code in pattern[::-1]]), edge)
            setattr(self, outcome, getattr(self, outcome) + int(number))

    @staticmethod
    def _outcome(found: tuple[str, int | None, int | None], edge: int | None) -> str:
        status, low, high = found
        if status == "undetermined":
            return "undetermined"
        if edge is None:
            return "right" if status == "below_grid" else "wrong"
        upper = len(LEVELS) - 1 - edge
        if status != "located":
            return "wrong"
        if (low, high) == (upper - 1, upper):
            return "right"
        return "wider" if low <= upper - 1 and high >= upper else "wrong"


def planted_name(edge: int | None) -> str:
    """The planted interval in words."""
    return "none" if edge is None else f"({LEVELS[edge + 1]}, {LEVELS[edge]}] levels"


def cliff_cell(score: str, clusters: int, edge: int | None, reps: int, rng: np.random.Generator) -> CliffCell:
    """Plant a cliff below ``LEVELS[edge]`` (None: no cliff) in ``reps`` sets and look for it."""
    cell = CliffCell(score, clusters, planted_name(edge))
    options = StatsOptions()
    for number in [_AT_ONCE] * (reps // _AT_ONCE) + [reps % _AT_ONCE] * (reps % _AT_ONCE > 0):
        sets = plant(score, clusters, edge, number, rng)
        cell.count(states_of(sets, options, clusters), edge)
    return cell


def cliff_cell_at_margin(score: str, clusters: int, edge: int, reps: int, rng: np.random.Generator) -> dict:
    """``LEVELS[edge]`` drops by exactly the margin, so a cliff errs by either claim: that it holds, that it falls."""
    options, counts = StatsOptions(), {"says_holds": 0, "says_degraded": 0, "undetermined": 0}
    place = len(LEVELS) - 1 - edge
    for start in range(0, reps, _AT_ONCE):
        sets = plant(score, clusters, edge, min(_AT_ONCE, reps - start), rng, options.margin)
        patterns, times = np.unique(states_of(sets, options, clusters).T, axis=0, return_counts=True)
        for pattern, number in zip(patterns, times, strict=True):
            status, low, high = locate([_NAMES[code] for code in pattern[::-1]])
            counts["undetermined"] += int(number) * (status == "undetermined")
            counts["says_holds"] += int(number) * (high is not None and high <= place)
            counts["says_degraded"] += int(number) * (low is not None and low >= place)
    known = {"score": score, "clusters": clusters, "levels": LEVELS[edge], "reps": reps}
    return known | {name: number / reps for name, number in counts.items()}
