"""Paired difference of two settings neither of which is the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from semkv_bench.stats.equivalence import over_all_looks, p_no_better, p_no_worse
from semkv_bench.stats.further import Ends
from semkv_bench.stats.guarded import TIE, guarded_interval, moments, p_higher, p_lower
from semkv_bench.stats.options import StatsOptions
from semkv_bench.stats.pairing import PairedScores
from semkv_bench.stats.spending import Look

__all__ = ["Arm", "Contrast", "also_with_losses", "arm_of", "contrast", "contrast_of", "line_between"]

_CHUNK = 1000


@dataclass(frozen=True)
class Arm:
    """One side of a comparison per column: cluster scores and the reference's over the same rows, [N, K].

    last_look: number of the last look that each column is planned for, [K], where settings may leave a run early.
    """

    scores: np.ndarray
    references: np.ndarray
    last_look: np.ndarray | None = None


@dataclass(frozen=True)
class Contrast:
    """Average of ``first - second`` with its guarded interval and p-values, arrays [K].

    ``first`` and ``second`` are the averages over the ``clusters`` that have both. ``p_equivalence`` is of two
    one-sided tests within the margin, ``p_difference`` is two-sided. All is NaN, and p is 1, without clusters.
    """

    clusters: np.ndarray
    first: np.ndarray
    second: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    p_equivalence: np.ndarray
    p_difference: np.ndarray

    def interval(self, k: int) -> Ends:
        """Ends of the interval of column ``k``, null where there is none."""
        low, high = (None if np.isnan(end) else float(end) for end in (self.low[k], self.high[k]))
        return (low, high)

    def value(self, name: str, k: int) -> float | None:
        """Field ``name`` of column ``k``, null where it is NaN."""
        number = getattr(self, name)[k]
        return None if np.isnan(number) else float(number)


def arm_of(paired: PairedScores, columns: list[int]) -> Arm:
    """The settings ``columns`` as one side, K columns."""
    last = None if paired.last_look is None else paired.last_look[columns]
    return Arm(paired.measures["score"][:, columns], paired.references["score"][:, columns], last)


def line_between(high: Arm, low: Arm, share: np.ndarray) -> Arm:
    """What a ``share`` [K] of the examples under ``high`` and the others under ``low`` would score."""
    scores, references = (
        share * getattr(high, name) + (1 - share) * getattr(low, name) for name in ("scores", "references")
    )
    return Arm(scores, references, _earlier(high, low))


def _earlier(first: Arm, second: Arm) -> np.ndarray | None:
    """The last look that both sides are planned for: beyond it there is nothing to compare."""
    return None if first.last_look is None else np.minimum(first.last_look, second.last_look)


def contrast(
    first: Arm,
    second: Arm,
    tasks: np.ndarray,
    options: StatsOptions,
    look: Look | None = None,
    sizes: np.ndarray | None = None,
    documents: np.ndarray | None = None,
) -> Contrast:
    """Compare two sides column by column over the clusters that have both.

    ``sizes`` and ``documents`` [N] are as for :func:`semkv_bench.stats.guarded.moments`.

    The guarded interval tells a loss from a gain: it is made for a setting against its reference. Here either
    side may be the better one, so both directions are formed and the wider bound and the larger p are taken.
    At a ``look`` of a sequential run all holds over all looks; a column of which a side left earlier is judged at the
    look at which it left.
    """
    total = first.scores.shape[1]
    starts = range(0, total, _CHUNK)
    clusters = {"sizes": sizes, "documents": documents}
    parts = [_contrast(_cut(first, s), _cut(second, s), tasks, options, look, clusters) for s in starts] or [
        _contrast(first, second, tasks, options, look, clusters)
    ]
    return Contrast(
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in _fields(parts[0])}
    )


def contrast_of(
    paired: PairedScores,
    sides: Callable[[PairedScores], tuple[Arm, Arm]],
    options: StatsOptions,
    look: Look | None = None,
) -> Contrast:
    """Compare the two ``sides`` made of ``paired``; missing rows must not decide, see :func:`also_with_losses`."""
    held = contrast(*sides(paired), paired.tasks, options, look, paired.sizes, paired.documents)
    if paired.worst is None:
        return held
    worst = paired.worst
    lost = contrast(*sides(worst), worst.tasks, options, look, worst.sizes, worst.documents)
    return also_with_losses(held, lost)


def also_with_losses(held: Contrast, lost: Contrast) -> Contrast:
    """``held``, of the rows that both sides have, with p-values that stand in ``lost``, too: missing rows are lost.

    The larger p is taken; a difference that turns round with the missing rows is none.
    """
    turned = np.sign(held.mean) * np.sign(lost.mean) < 0
    return replace(
        held,
        p_equivalence=np.maximum(held.p_equivalence, lost.p_equivalence),
        p_difference=np.where(turned, 1.0, np.maximum(held.p_difference, lost.p_difference)),
    )


def _fields(part: Contrast) -> tuple[str, ...]:
    return tuple(part.__dataclass_fields__)


def _cut(side: Arm, start: int) -> Arm:
    part = slice(start, start + _CHUNK)
    last = None if side.last_look is None else side.last_look[part]
    return Arm(side.scores[:, part], side.references[:, part], last)


def _contrast(
    first: Arm,
    second: Arm,
    tasks: np.ndarray,
    options: StatsOptions,
    look: Look | None,
    clusters: dict[str, np.ndarray | None],
) -> Contrast:
    size = first.scores.shape[1]
    out = {name: np.full(size, np.nan) for name in Contrast.__dataclass_fields__}
    out["clusters"] = np.zeros(size, dtype=int)
    out["p_equivalence"], out["p_difference"] = np.ones(size), np.ones(size)
    # Rows that only one side has must not count; where both have the same rows, the second bracket is 0.
    difference = (first.scores - second.scores) - (first.references - second.references)
    difference = np.where(np.abs(difference) < TIE, 0.0, difference)
    here = np.flatnonzero(~np.isnan(difference).all(axis=0))
    if not here.size:
        return Contrast(**out)
    difference = difference[:, here]
    one, two = (np.where(np.isnan(difference), np.nan, side.scores[:, here]) for side in (first, second))
    forth = moments(difference, two, tasks, options.average, **clusters)
    back = moments(-difference, one, tasks, options.average, **clusters)
    last = _earlier(first, second)
    looks = look if look is None or last is None else look.at(last[here])
    confidence = options.confidence if looks is None else looks.confidence(options.confidence)
    low, high = guarded_interval(forth, confidence)
    back_low, back_high = guarded_interval(back, confidence)
    above = np.maximum(p_higher(forth), p_lower(back))
    below = np.maximum(p_lower(forth), p_higher(back))
    sides = [test(m, options) for test in (p_no_worse, p_no_better) for m in (forth, back)]
    within = np.max(sides, axis=0)
    out["clusters"][here] = forth.clusters.astype(int)
    out["first"][here] = moments(one, one, tasks, options.average, **clusters).mean
    out["second"][here] = moments(two, two, tasks, options.average, **clusters).mean
    out["mean"][here] = forth.mean
    out["low"][here], out["high"][here] = np.minimum(low, -back_high), np.maximum(high, -back_low)
    out["p_difference"][here] = np.minimum(1.0, 2 * over_all_looks(np.minimum(above, below), looks))
    out["p_equivalence"][here] = over_all_looks(within, looks)
    return Contrast(**out)
