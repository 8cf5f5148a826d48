"""Where the uniform grid falls off: between the points that collapse and the points that hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from semkv_bench.stats.equivalence import HOLDS, Judgement
from semkv_bench.stats.options import StatsOptions
from semkv_bench.stats.pairing import PairedScores
from semkv_bench.stats.result import Cliff, CliffInterval, Fall

__all__ = ["GridPoint", "cliff_of", "grid_points", "locate"]

_SAME_BITS = 1e-9
_TIE = 1e-12


@dataclass(frozen=True)
class GridPoint:
    """One number of code bits; ``columns`` are its settings, ``name`` the one that stands for it."""

    bits: float
    name: str
    columns: tuple[int, ...]


def grid_points(paired: PairedScores, quantizer: str | None) -> list[GridPoint]:
    """Uniform settings of ``quantizer`` from few code bits to many.

    Several settings of equal code bits (keys and values split in different ways) are one point, named after
    the one with the fewest effective bits, then by name.
    """
    here = [
        (info.code_bits, i)
        for i, info in enumerate(paired.settings)
        if info.kind == "uniform" and info.quantizer == quantizer
    ]
    groups: list[list[tuple[float, int]]] = []
    for bits, i in sorted(here):
        if groups and bits - groups[-1][0][0] <= _SAME_BITS:
            groups[-1].append((bits, i))
        else:
            groups.append([(bits, i)])

    def price(i: int) -> tuple:
        info = paired.settings[i]
        return (math.inf if info.effective_bits is None else info.effective_bits, info.name)

    return [
        GridPoint(
            group[0][0],
            paired.settings[min((i for _, i in group), key=price)].name,
            tuple(sorted(i for _, i in group)),
        )
        for group in groups
    ]


def locate(states: Sequence[str]) -> tuple[str, int | None, int | None]:
    """Status of the cliff and the indices of the points below and above it.

    ``states`` ("holds", "degraded" or "open") run from few bits to many. Above the cliff everything holds,
    below it everything is degraded; open points may lie between. ``above_grid`` needs the highest point
    degraded and nothing that holds; ``below_grid`` needs everything to hold.
    """
    holding, falling = len(states), 0
    while holding > 0 and states[holding - 1] == "holds":
        holding -= 1
    while falling < len(states) and states[falling] == "degraded":
        falling += 1
    if not states:
        return "undetermined", None, None
    if holding == 0:
        return "below_grid", None, 0
    if states[-1] == "degraded" and "holds" not in states:
        return "above_grid", len(states) - 1, None
    if holding == len(states) or falling == 0:
        return "undetermined", None, None
    return "located", falling - 1, holding


def cliff_of(
    points: Sequence[GridPoint],
    judgement: Judgement,
    resampled: np.ndarray,
    options: StatsOptions,
    quantizer: str | None = None,
) -> Cliff:
    """Where the grid of ``quantizer`` falls off.

    ``resampled`` [B, S] are bootstrap averages of the differences. In a resample a point is degraded when its
    average drop is beyond the margin and holds otherwise, so each resample has one outcome; ``intervals``
    lists their shares, which sum to 1 (both bits null: no cliff in that resample). ``probability`` is the
    share of resamples whose interval lies within the reported one. The verdicts used are those that the data
    show by themselves, before the question whether the run could have seen a loss: ``below_grid`` says that
    no loss was seen anywhere, and its verdicts then read ``insensitive`` for want of a positive control. If
    the reference does not do the task, nothing is located.
    """
    steepest = _steepest(points, judgement.moments.mean)
    if not judgement.reference_works:
        return _cliff("undetermined", None, None, [], points, quantizer, steepest)
    status, low, high = locate([_state(point, judgement.shown) for point in points])
    return _cliff(status, low, high, _outcomes(points, resampled, options), points, quantizer, steepest)


def _steepest(points: Sequence[GridPoint], means: np.ndarray) -> Fall | None:
    """Where the average falls most from one grid point to the next below, by more than nothing."""
    if len(points) < 2:
        return None
    heights = [float(np.mean([means[i] for i in point.columns])) for point in points]
    drop, k = max((heights[k + 1] - heights[k], k) for k in range(len(points) - 1))
    if not drop > _TIE:
        return None
    low, high = points[k], points[k + 1]
    return Fall(
        lower_bits=low.bits,
        upper_bits=high.bits,
        lower_setting=low.name,
        upper_setting=high.name,
        drop=drop,
    )


def _state(point: GridPoint, shown: Sequence[str]) -> str:
    verdicts = [shown[i] for i in point.columns]
    if all(verdict in HOLDS for verdict in verdicts):
        return "holds"
    return "degraded" if all(verdict == "degraded" for verdict in verdicts) else "open"


def _outcomes(
    points: Sequence[GridPoint], resampled: np.ndarray, options: StatsOptions
) -> list[tuple[str, int | None, int | None, float]]:
    """Status, indices and share of every outcome among the resamples."""
    if not points:
        return []
    beyond = resampled < -options.margin - _TIE
    falls = np.stack([beyond[:, list(point.columns)].all(axis=1) for point in points], axis=1)
    holds = np.stack([~beyond[:, list(point.columns)].any(axis=1) for point in points], axis=1)
    patterns, counts = np.unique(np.where(holds, 2, np.where(falls, 0, 1)), axis=0, return_counts=True)
    names = ("degraded", "open", "holds")
    total: dict[tuple[str, int | None, int | None], int] = {}
    for pattern, count in zip(patterns, counts, strict=True):
        outcome = locate([names[code] for code in pattern])
        total[outcome] = total.get(outcome, 0) + int(count)
    order = {"below_grid": -1, "above_grid": len(points), "undetermined": len(points) + 1}

    def place(outcome: tuple[str, int | None, int | None]) -> tuple:
        status, low, high = outcome
        return (order.get(status, low), high if high is not None else len(points))

    return [(*outcome, total[outcome] / len(resampled)) for outcome in sorted(total, key=place)]


def _cliff(
    status: str,
    low: int | None,
    high: int | None,
    outcomes: Sequence[tuple[str, int | None, int | None, float]],
    points: Sequence[GridPoint],
    quantizer: str | None,
    steepest: Fall | None,
) -> Cliff:
    def bits(index: int | None) -> float | None:
        return None if index is None else points[index].bits

    def name(index: int | None) -> str | None:
        return None if index is None else points[index].name

    def within(outcome: tuple[str, int | None, int | None, float]) -> bool:
        if outcome[0] != status:
            return False
        return status != "located" or (outcome[1] >= low and outcome[2] <= high)

    probability = None
    if status != "undetermined":
        probability = math.fsum(outcome[3] for outcome in outcomes if within(outcome))
    return Cliff(
        steepest=steepest,
        quantizer=quantizer,
        status=status,
        lower_bits=bits(low),
        upper_bits=bits(high),
        lower_setting=name(low),
        upper_setting=name(high),
        probability=probability,
        intervals=tuple(
            CliffInterval(lower_bits=bits(lower), upper_bits=bits(upper), probability=share, status=kind)
            for kind, lower, upper, share in outcomes
        ),
    )
