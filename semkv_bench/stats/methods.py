"""Method against method at equal bits: each on the line between the neighbouring points of its own grid.

A grid's points differ in what their caches cost, so methods are compared where they cost the same: at given bits a
method scores, example by example, what the line between its next dearer and its next cheaper point says. Nothing is
said of a method beyond the ends of its grid, and nothing is pooled.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from semkv_bench.stats.comparisons import judged_columns
from semkv_bench.stats.contrast import Arm, arm_of, contrast_of, line_between
from semkv_bench.stats.further import MethodPair, MethodPoint, Methods
from semkv_bench.stats.guarded import moments
from semkv_bench.stats.options import StatsOptions
from semkv_bench.stats.pairing import PairedScores
from semkv_bench.stats.result import SettingResult
from semkv_bench.stats.spending import Look

__all__ = ["WORDS", "bracket", "compared_methods", "front_of", "method_grids"]

_SAME_BITS = 1e-9
WORDS = ("alike within the margin", "first is better", "second is better")


@dataclass(frozen=True)
class _Between:
    """Columns of a method's points above and below some bits; ``share`` of the way up lies between them."""

    upper: int
    lower: int
    share: float


def compared_methods(
    paired: PairedScores,
    settings: Sequence[SettingResult],
    options: StatsOptions,
    look: Look | None = None,
) -> Methods | None:
    """Every pair of methods at every one of ``options.at_bits`` that both grids reach; None for less than two methods.

    Bits are those of the whole cache (``cache_bits``) where all records tell them, else the price of a coded value
    (``effective_bits``). p-values are Holm-adjusted over all pairs at all bits, and so is ``diff_ci_all`` by
    Bonferroni; ``diff_ci`` is of a pair by itself.
    """
    grids = method_grids(paired)
    if len(grids) < 2:
        return None
    between = {
        (bits, method): found
        for bits in options.at_bits
        for method, grid in grids.items()
        if (found := bracket(grid, bits)) is not None
    }
    pairs = [
        (bits, first, second)
        for bits in options.at_bits
        for first, second in itertools.combinations(grids, 2)
        if (bits, first) in between and (bits, second) in between
    ]
    known = all(info.cache_bits is not None for info in paired.settings)
    return Methods(
        priced_by="cache_bits" if known else "effective_bits",
        at_bits=options.at_bits,
        methods=tuple(grids),
        points=_points(paired, grids, between, options) if between else (),
        pairs=_pairs(paired, pairs, between, options, look),
        front=front_of(settings),
    )


def method_grids(paired: PairedScores) -> dict[str, list[tuple[float, int]]]:
    """Bits and column of every method's grid, from few bits to many; of equal bits the first by name.

    Methods without a name, or whose points do not all tell what they cost, are left out.
    """
    grids: dict[str, list[tuple[float, int]]] = {}
    for column, info in enumerate(paired.settings):
        if info.kind == "uniform" and info.quantizer is not None:
            grids.setdefault(info.quantizer, []).append(
                (math.nan if info.paid_bits is None else info.paid_bits, column)
            )
    found = {}
    for method in sorted(grids):
        if any(math.isnan(bits) for bits, _ in grids[method]):
            continue
        grid: list[tuple[float, int]] = []
        for bits, column in sorted(grids[method], key=lambda at: (at[0], paired.settings[at[1]].name)):
            if not grid or bits - grid[-1][0] > _SAME_BITS:
                grid.append((bits, column))
        found[method] = grid
    return found


def bracket(grid: Sequence[tuple[float, int]], bits: float) -> _Between | None:
    """The neighbouring points of ``grid`` (from few bits to many) around ``bits``; None beyond its ends.

    >>> bracket([(2.0, 7), (3.0, 5)], 2.25)
    _Between(upper=5, lower=7, share=0.25)
    >>> bracket([(2.0, 7), (3.0, 5)], 3.5) is None
    True
    """
    for price, column in grid:
        if abs(price - bits) <= _SAME_BITS:
            return _Between(column, column, 1.0)
    for (low, below), (high, above) in itertools.pairwise(grid):
        if low < bits < high:
            return _Between(above, below, (bits - low) / (high - low))
    return None


def _side(paired: PairedScores, chosen: Sequence[_Between]) -> Arm:
    """Scores on the lines between the points, and the reference's over the same rows."""
    upper = arm_of(paired, [one.upper for one in chosen])
    lower = arm_of(paired, [one.lower for one in chosen])
    share = np.array([one.share for one in chosen])
    return line_between(upper, lower, share)


def _pairs(
    paired: PairedScores,
    pairs: Sequence[tuple[float, str, str]],
    between: dict[tuple[float, str], _Between],
    options: StatsOptions,
    look: Look | None,
) -> tuple[MethodPair, ...]:
    if not pairs:
        return ()

    def sides(scores: PairedScores) -> tuple[Arm, Arm]:
        first, second = (_side(scores, [between[pair[0], pair[side]] for pair in pairs]) for side in (1, 2))
        return first, second

    strict = replace(options, confidence=1 - (1 - options.confidence) / len(pairs))
    result, wide = (contrast_of(paired, sides, one, look) for one in (options, strict))
    judged = judged_columns(result, options, WORDS)
    return tuple(
        MethodPair(
            bits=bits,
            first=one,
            second=other,
            first_score=result.value("first", k),
            second_score=result.value("second", k),
            diff_ci_all=wide.interval(k),
            **judged[k],
        )
        for k, (bits, one, other) in enumerate(pairs)
    )


def _points(
    paired: PairedScores,
    grids: dict[str, list[tuple[float, int]]],
    between: dict[tuple[float, str], _Between],
    options: StatsOptions,
) -> tuple[MethodPoint, ...]:
    """What every method scores at every number of bits; no score beyond the ends of its grid."""
    scores = _side(paired, list(between.values())).scores
    means = moments(scores, scores, paired.tasks, options.average, sizes=paired.sizes).mean
    score = dict(zip(between, map(float, means), strict=True))
    found = []
    for bits, method in itertools.product(options.at_bits, grids):
        at = between.get((bits, method))
        found.append(
            MethodPoint(
                bits=bits,
                method=method,
                least_bits=grids[method][0][0],
                most_bits=grids[method][-1][0],
                upper=at and paired.settings[at.upper].name,
                lower=at and paired.settings[at.lower].name,
                share=at and at.share,
                score=score.get((bits, method)),
            )
        )
    return tuple(found)


def front_of(settings: Sequence[SettingResult]) -> tuple[str, ...]:
    """Coded settings, from few bits to many, that no other one beats: cheaper and as good, or as cheap and better."""
    known = [
        (row.paid_bits, row.score, row.setting)
        for row in settings
        if row.kind in ("uniform", "mixed") and row.paid_bits
    ]
    found = [
        (bits, name)
        for bits, score, name in known
        if not any(
            (other <= bits and better >= score) and (other < bits or better > score)
            for other, better, _ in known
        )
    ]
    return tuple(name for _, name in sorted(found))
