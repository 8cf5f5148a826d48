"""Importance metrics that share an allocation, compared with each other."""

from __future__ import annotations

import itertools
import string

import numpy as np

from semkv_bench.stats.allocations import Allocated, allocated
from semkv_bench.stats.contrast import Arm, Contrast, arm_of, contrast_of
from semkv_bench.stats.equivalence import reference_moments
from semkv_bench.stats.further import NO_ENDS, MetricPair, RankedMetric, Ranking
from semkv_bench.stats.guarded import score_interval
from semkv_bench.stats.multiplicity import holm
from semkv_bench.stats.options import StatsOptions
from semkv_bench.stats.pairing import PairedScores
from semkv_bench.stats.spending import Look

__all__ = ["letters", "rankings"]

CONTROL = "random"


def rankings(paired: PairedScores, options: StatsOptions, look: Look | None = None) -> tuple[Ranking, ...]:
    """One entry per allocation that several metrics share: same levels and fraction, or same share kept.

    Per metric: its score, the paired difference to the best metric of the sample and to ``random``, each with
    an interval, and p-values that are Holm-adjusted over all pairs of the group. ``rank`` is the range of
    places that the data leave open: one more than the metrics shown to be better, up to all but those shown
    to be worse. Metrics that share a letter are not separated. ``pairs`` holds every comparison.
    """
    groups: dict[tuple, list[Allocated]] = {}
    for each in allocated(paired.settings):
        groups.setdefault(each.group, []).append(each)
    scores = reference_moments(paired, options.average)
    low, high = score_interval(scores, paired.confidence(options.confidence, look))
    bounds = np.clip(np.stack([low, high]), 0, 1)
    found = []
    for group in groups.values():
        members = list({each.metric: each for each in group}.values())
        if len(members) > 1:
            found.append(_ranking(paired, options, look, members, scores.mean, bounds))
    return tuple(
        sorted(found, key=lambda each: (each.kind != "mixed", -(each.effective_bits or 0), each.group))
    )


def _ranking(
    paired: PairedScores,
    options: StatsOptions,
    look: Look | None,
    members: list[Allocated],
    scores: np.ndarray,
    bounds: np.ndarray,
) -> Ranking:
    members = sorted(members, key=lambda each: (-scores[each.index], each.metric))
    pairs = list(itertools.combinations(range(len(members)), 2))

    def sides(scores: PairedScores) -> tuple[Arm, Arm]:
        first, second = (arm_of(scores, [members[pair[k]].index for pair in pairs]) for k in (0, 1))
        return first, second

    result = contrast_of(paired, sides, options, look)
    adjusted = holm(result.p_difference)
    place = {pair: k for k, pair in enumerate(pairs)}
    separated = _separated(len(members), place, result.mean, adjusted < options.alpha)
    marks = letters(separated != 0)
    control = next(
        (i for i, each in enumerate(members) if paired.settings[each.index].metric == CONTROL), None
    )
    info = paired.settings[members[0].index]
    return Ranking(
        group=members[0].label,
        kind=members[0].kind,
        quantizer=info.quantizer,
        high=members[0].high,
        low=members[0].low,
        fraction=members[0].share if members[0].kind == "mixed" else None,
        keep=members[0].share if members[0].kind == "prune" else None,
        code_bits=info.code_bits,
        effective_bits=info.effective_bits,
        best=members[0].metric,
        control=None if control is None else members[control].metric,
        metrics=tuple(
            RankedMetric(
                metric=each.metric,
                setting=paired.settings[each.index].name,
                score=float(scores[each.index]),
                score_ci=(float(bounds[0, each.index]), float(bounds[1, each.index])),
                **_against(result, adjusted, place, i, 0, "best"),
                **_against(result, adjusted, place, i, control, CONTROL),
                rank=(
                    1 + int((separated[i] < 0).sum()),
                    len(members) - int((separated[i] > 0).sum()),
                ),
                letters=marks[i],
            )
            for i, each in enumerate(members)
        ),
        pairs=_pairs(members, place, result, adjusted),
    )


def _separated(size: int, place: dict, diff: np.ndarray, differ: np.ndarray) -> np.ndarray:
    """1 where the row's member is shown to be better than the column's, -1 where worse, else 0, [size, size].

    diff, differ: by pair, in the order of ``place``, the difference of its first member to its second, and whether
    they are shown to differ.
    """
    separated = np.zeros((size, size), dtype=int)
    for (a, b), k in place.items():
        if differ[k]:
            separated[a, b] = 1 if diff[k] > 0 else -1
            separated[b, a] = -separated[a, b]
    return separated


def _pairs(
    members: list[Allocated], place: dict, result: Contrast, adjusted: np.ndarray
) -> tuple[MetricPair, ...]:
    return tuple(
        MetricPair(
            first=members[a].metric,
            second=members[b].metric,
            n_clusters=int(result.clusters[k]),
            diff=result.value("mean", k),
            diff_ci=result.interval(k),
            p=float(adjusted[k]),
            p_raw=float(result.p_difference[k]),
        )
        for (a, b), k in place.items()
    )


def _against(
    result: Contrast, adjusted: np.ndarray, place: dict, i: int, other: int | None, name: str
) -> dict:
    """Difference of member ``i`` to member ``other``; nothing to say of a member against itself."""
    if other is None or i == other:
        return {f"diff_{name}": None, f"diff_{name}_ci": NO_ENDS, f"p_{name}": None}
    k = place[min(i, other), max(i, other)]
    diff, ends = result.value("mean", k), result.interval(k)
    if i > other and diff is not None:
        diff, ends = -diff + 0.0, (-ends[1] + 0.0, -ends[0] + 0.0)
    return {f"diff_{name}": diff, f"diff_{name}_ci": ends, f"p_{name}": float(adjusted[k])}


def letters(separated: np.ndarray) -> list[str]:
    """Letters per member such that two members share one exactly where they are not ``separated`` [M, M].

    The insert-and-absorb method (Piepho 2004); members are in order of their means, and so are the letters.
    """
    size = len(separated)
    columns = [set(range(size))]
    for a, b in itertools.combinations(range(size), 2):
        if not separated[a, b]:
            continue
        split = [part for whole in columns for part in _split(whole, a, b)]
        columns = []
        for part in sorted(split, key=len, reverse=True):
            if not any(part <= kept for kept in columns):
                columns.append(part)
    columns.sort(key=sorted)
    return ["".join(_letter(k) for k, column in enumerate(columns) if i in column) for i in range(size)]


def _split(whole: set[int], a: int, b: int) -> list[set[int]]:
    return [whole - {a}, whole - {b}] if a in whole and b in whole else [whole]


def _letter(k: int) -> str:
    """a to z, then a1 to z1, and so on."""
    turn, place = divmod(k, 26)
    return string.ascii_lowercase[place] + (str(turn) if turn else "")
