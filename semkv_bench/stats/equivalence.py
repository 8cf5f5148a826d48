"""Verdicts: two one-sided tests within a margin, a test of a drop beyond it, Holm's adjustment, sample size."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from statsmodels.stats.multitest import multipletests

from semkv_bench.stats.guarded import Moments, guarded_interval, moments, p_above, p_below, score_interval
from semkv_bench.stats.options import StatsOptions
from semkv_bench.stats.pairing import PairedScores

__all__ = ["Judgement", "clusters_needed", "holm", "judge", "reference_moments"]

HOLDS = ("equivalent", "floor")
_MOST_CLUSTERS = 10_000_000


@dataclass(frozen=True)
class Judgement:
    """Tests of all settings, arrays [S] with column 0 the reference (NaN or None there).

    ``shown`` is what the data show of each setting by themselves; ``verdicts`` is what may be said after
    asking whether this measurement could have seen a loss at all. ``family`` marks the settings whose tests
    are adjusted together.
    """

    moments: Moments
    family: np.ndarray
    p_equivalence_raw: np.ndarray
    p_equivalence: np.ndarray
    p_degraded_raw: np.ndarray
    p_degraded: np.ndarray
    p_difference: np.ndarray
    detectable: np.ndarray
    shown: tuple[str, ...]
    verdicts: tuple[str, ...]
    reference_low: float
    reference_works: bool
    positive_control: str | None


def holm(p: np.ndarray) -> np.ndarray:
    """Holm-adjusted p-values (step-down, family-wise)."""
    p = np.asarray(p, dtype=float)
    return multipletests(p, method="holm")[1] if p.size else p


def reference_moments(paired: PairedScores, average: str) -> Moments:
    """Moments of the scores themselves, every setting on its own rows, fields [S]."""
    scores = paired.measures["score"]
    return moments(scores, scores, paired.tasks, average)


def judge(paired: PairedScores, options: StatsOptions, chance: float, *, adjust: bool = True) -> Judgement:
    """Test every setting against the reference and decide.

    ``chance`` is the average score that a guess without the prompt would reach. Repeats of the reference
    (kind full) are judged, but belong to no family of tests. Without ``adjust`` every setting is tested at
    ``alpha`` by itself, which is enough for a choice that other examples then confirm.
    """
    m = moments(paired.differences, paired.references["score"], paired.tasks, options.average)
    above = p_above(m, -options.margin)
    p_eq = np.maximum(above, p_below(m, options.margin))
    p_deg = p_below(m, -options.margin)
    p_diff = np.minimum(1.0, 2 * np.minimum(p_below(m, 0.0), p_above(m, 0.0)))
    family = np.array([info.kind != "full" for info in paired.settings])
    eq, deg = p_eq.copy(), p_deg.copy()
    if adjust:
        eq[family], deg[family] = holm(p_eq[family]), holm(p_deg[family])
    detectable = p_diff < options.alpha

    shown = ["reference"]
    for i in range(1, len(paired.settings)):
        if eq[i] < options.alpha:
            shown.append("floor" if detectable[i] and m.mean[i] < 0 else "equivalent")
        else:
            shown.append("degraded" if deg[i] < options.alpha else "inconclusive")
    low = float(score_interval(reference_moments(paired, options.average), options.confidence)[0][0])
    works = low > chance
    control = _positive_control(paired, shown)
    return Judgement(
        moments=m,
        family=family,
        p_equivalence_raw=p_eq,
        p_equivalence=eq,
        p_degraded_raw=p_deg,
        p_degraded=deg,
        p_difference=p_diff,
        detectable=detectable,
        shown=tuple(shown),
        verdicts=tuple(_allowed(verdict, works, control is not None) for verdict in shown),
        reference_low=low,
        reference_works=works,
        positive_control=control if works else None,
    )


def _positive_control(paired: PairedScores, shown: list[str]) -> str | None:
    """A grid point that was seen to lose quality: the one with most bits."""
    for info, verdict in zip(paired.settings, shown, strict=True):
        if info.kind == "uniform" and verdict == "degraded":
            return info.name
    return None


def _allowed(verdict: str, works: bool, controlled: bool) -> str:
    """Without a working reference nothing can be said; without a positive control nothing is called safe."""
    if verdict == "reference":
        return verdict
    if not works or (verdict in HOLDS and not controlled):
        return "insensitive"
    return verdict


def clusters_needed(judgement: Judgement, index: int, options: StatsOptions) -> int | None:
    """Clusters that would settle an inconclusive setting if more of the same kind came in, else None.

    The p-value must then pass Holm's threshold at the setting's present rank in the family.
    """
    if judgement.verdicts[index] != "inconclusive":
        return None
    m = judgement.moments.column(index)
    mean = float(m.mean[0])
    if mean >= options.margin or math.isclose(mean, -options.margin, abs_tol=1e-12):
        return None
    holds = mean > -options.margin
    raw = judgement.p_equivalence_raw if holds else judgement.p_degraded_raw
    rank = int((raw[judgement.family] >= raw[index]).sum())

    def settled(factor: float) -> bool:
        more = m.grown(factor)
        if holds:
            p = max(float(p_above(more, -options.margin)[0]), float(p_below(more, options.margin)[0]))
        else:
            p = float(p_below(more, -options.margin)[0])
        return p * rank < options.alpha

    have = int(m.clusters[0])
    low, high = have, 2 * have
    while not settled(high / have):
        low, high = high, 2 * high
        if high > _MOST_CLUSTERS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if settled(middle / have) else (middle, high)
    return high


def intervals(m: Moments, options: StatsOptions) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The deciding interval at the shown confidence, and at the level of the two one-sided tests."""
    return {
        "diff_ci": guarded_interval(m, options.confidence),
        "equivalence_ci": guarded_interval(m, 1 - 2 * options.alpha),
    }
