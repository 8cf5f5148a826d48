"""Verdicts: is a drop beyond the margin ruled out, is a gain, is a drop shown; and the sample size they need."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from semkv_bench.stats.guarded import (
    Moments,
    guarded_interval,
    moments,
    p_above,
    p_below,
    p_few_losses,
    p_higher,
    p_lower,
    p_unseen_gains,
    p_unseen_losses,
    score_interval,
)
from semkv_bench.stats.multiplicity import Shares, adjusted, holm, shares, weight_reached
from semkv_bench.stats.options import StatsOptions
from semkv_bench.stats.pairing import PairedScores
from semkv_bench.stats.spending import Look, Looks

__all__ = [
    "HOLDS",
    "SAFE",
    "Judgement",
    "clusters_needed",
    "difference_moments",
    "judge",
    "over_all_looks",
    "p_degraded",
    "p_no_better",
    "p_no_worse",
    "reference_moments",
]

SAFE = ("equivalent", "no_worse")  # hold, and no loss is detectable
HOLDS = ("equivalent", "no_worse", "floor")  # verdicts that rule out a drop beyond the margin
POWER = 0.8  # of a new sample of the size that settles a setting
_MOST_CLUSTERS = 10_000_000
_DRAWS = 100


@dataclass(frozen=True)
class Judgement:
    """Tests of all settings, arrays [S] with column 0 the reference (NaN or None there).

    ``shown`` is what the data show of each setting by themselves; ``verdicts`` is what may be said after
    asking whether this measurement could have seen a loss at all. ``family`` marks the settings whose tests
    are adjusted together, ``lacking`` those of which rows are missing, ``top_down`` and ``bottom_up`` how they share
    alpha.
    ``over_looks`` [3, S] are the p-values of no worse, no better and degraded before they are adjusted, over all looks.
    ``grown`` keeps what was worked out for larger samples: p-values of the family, by (holds, how much larger).
    """

    moments: Moments
    family: np.ndarray
    lacking: np.ndarray
    top_down: Shares
    bottom_up: Shares
    p_no_worse_raw: np.ndarray
    p_no_worse: np.ndarray
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
    too_few: bool
    over_looks: np.ndarray
    grown: dict[tuple[bool, float], np.ndarray] = field(default_factory=dict)


def reference_moments(paired: PairedScores, average: str, columns: Sequence[int] | None = None) -> Moments:
    """Moments of the scores themselves, every setting (or those in ``columns``) on its own rows, fields [S]."""
    scores = paired.measures["score"][:, slice(None) if columns is None else list(columns)]
    return moments(scores, scores, paired.tasks, average, sizes=paired.sizes, documents=paired.documents)


def difference_moments(paired: PairedScores, average: str, columns: Sequence[int] | None = None) -> Moments:
    """Moments of the paired differences of all settings, or of those in ``columns``, fields [S]."""
    chosen = slice(None) if columns is None else list(columns)
    return moments(
        paired.differences[:, chosen],
        paired.references["score"][:, chosen],
        paired.tasks,
        average,
        paired.row_sizes[:, chosen],
        paired.sizes,
        paired.documents,
    )


def judge(
    paired: PairedScores,
    options: StatsOptions,
    chance: float,
    *,
    adjust: bool = True,
    look: Look | None = None,
    before: Mapping[str, np.ndarray] | None = None,
) -> Judgement:
    """Test every setting against the reference and decide.

    ``chance`` is the average score that a guess without the prompt would reach. Repeats of the reference
    (kind full) are judged, but belong to no family of tests. Without ``adjust`` every setting is tested at
    ``alpha`` by itself, which is enough for a choice that other examples then confirm. At a ``look`` of a
    sequential run the p-values other than the raw ones are those over all looks. ``before`` are ``over_looks`` of
    settings by name as an earlier look of a raced run had them: what was shown there stays shown.
    """
    m = difference_moments(paired, options.average)
    lost, won, deg = (_p_value(test, m, paired, options) for test in (p_no_worse, p_no_better, p_degraded))
    for column, p in paired.chosen_by.items():
        deg[column] = max(deg[column], p)
    looks = paired.looks(look)
    p_diff = np.minimum(1.0, 2 * over_all_looks(np.minimum(p_lower(m), p_higher(m)), looks))
    family = np.array([info.kind != "full" for info in paired.settings])
    tested = [info for info in paired.settings if info.kind != "full"]
    top_down, bottom_up = shares(tested), shares(tested, bottom_up=True)
    over_looks = np.stack([over_all_looks(p, looks) for p in (lost, won, deg)])
    _keep_shown(over_looks, paired, look, before or {})
    no_worse, no_better, falls = over_looks.copy()
    if adjust:
        no_worse[family] = adjusted(no_worse[family], top_down)
        no_better[family] = holm(no_better[family])
        falls[family] = adjusted(falls[family], bottom_up)
    equivalent = np.maximum(no_worse, no_better)
    detectable = p_diff < options.alpha
    shown = _shown(options.alpha, no_worse, equivalent, falls, below=detectable & (m.mean < 0))
    confidence = options.confidence if look is None else look.confidence(options.confidence)
    low = _lower_end(reference_moments(paired, options.average), confidence)
    works = low > chance
    control = _positive_control(paired, shown)
    return Judgement(
        moments=m,
        family=family,
        lacking=np.array(
            [info.name in paired.missing or info.name in paired.unpaired for info in paired.settings]
        ),
        top_down=top_down,
        bottom_up=bottom_up,
        p_no_worse_raw=lost,
        p_no_worse=no_worse,
        p_equivalence_raw=np.maximum(lost, won),
        p_equivalence=equivalent,
        p_degraded_raw=deg,
        p_degraded=falls,
        p_difference=p_diff,
        detectable=detectable,
        shown=shown,
        verdicts=tuple(_allowed(verdict, works, control is not None) for verdict in shown),
        reference_low=low,
        reference_works=works,
        positive_control=control if works else None,
        too_few=_lower_end(_all_right(paired, options.average), confidence) <= chance,
        over_looks=over_looks,
    )


def _keep_shown(
    over_looks: np.ndarray, paired: PairedScores, look: Look | None, before: Mapping[str, np.ndarray]
) -> None:
    """Put into ``over_looks`` what an earlier look has shown, and all of it for a setting that has left the race."""
    for i, info in enumerate(paired.settings):
        if info.name not in before:
            continue
        over_looks[2, i] = min(over_looks[2, i], before[info.name][2])
        if paired.last_look is not None and paired.last_look[i] < look.number:
            over_looks[:2, i] = before[info.name][:2]


def _shown(
    alpha: float, no_worse: np.ndarray, equivalent: np.ndarray, degraded: np.ndarray, below: np.ndarray
) -> tuple[str, ...]:
    """What p-values [S] show of every setting; below: is it shown to lie below the reference?"""
    shown = ["reference"]
    for i in range(1, len(no_worse)):
        if no_worse[i] < alpha:
            inside = equivalent[i] < alpha
            shown.append("floor" if below[i] else "equivalent" if inside else "no_worse")
        else:
            shown.append("degraded" if degraded[i] < alpha else "inconclusive")
    return tuple(shown)


def _lower_end(scores: Moments, confidence: float) -> float:
    """Lower end of the interval of the first column's score."""
    return float(score_interval(scores, confidence)[0][0])


def _all_right(paired: PairedScores, average: str) -> Moments:
    """Moments of scores that are all 1, the best that a reference can reach on this sample."""
    ones = np.ones((len(paired.tasks), 1))
    return moments(ones, ones, paired.tasks, average, sizes=paired.sizes, documents=paired.documents)


def _p_value(test: Callable, m: Moments, paired: PairedScores, options: StatsOptions) -> np.ndarray:
    """``test`` on the rows that have a partner, and, where rows are missing, on the worst that they may have been."""
    if paired.worst is None:
        return test(m, options)
    return np.maximum(test(m, options), test(difference_moments(paired.worst, options.average), options))


def p_no_worse(m: Moments, options: StatsOptions) -> np.ndarray:
    """One-sided p-value of non-inferiority: small means that a drop beyond the margin is ruled out.

    See :func:`semkv_bench.stats.guarded.p_few_losses` and :func:`semkv_bench.stats.guarded.p_unseen_losses` for
    what guards it where few pairs differ, or few have been seen.
    """
    margin = options.margin
    return np.maximum.reduce([p_above(m, -margin), p_few_losses(m, margin), p_unseen_losses(m, margin)])


def p_no_better(m: Moments, options: StatsOptions) -> np.ndarray:
    """One-sided p-value that makes non-inferiority an equivalence: small means that a gain is ruled out, too."""
    return p_below(m, options.margin)


def p_degraded(m: Moments, options: StatsOptions) -> np.ndarray:
    """One-sided p-value of a drop beyond the margin: small means that it is shown.

    See :func:`semkv_bench.stats.guarded.p_unseen_gains` for what guards it where all pairs lose a little.
    """
    return np.maximum(p_below(m, -options.margin), p_unseen_gains(m, options.margin))


def over_all_looks(p: np.ndarray, look: Look | Looks | None) -> np.ndarray:
    """A copy of one-sided ``p``, made to hold over all looks where there is a ``look``."""
    return p.copy() if look is None else look.over_all_looks(p)


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


def clusters_needed(
    judgement: Judgement, index: int, options: StatsOptions, look: Look | None = None
) -> int | None:
    """Clusters of the same kind that settle an inconclusive setting four times in five, else None.

    The mean of a new sample scatters around the present one; its p-value (of ``no_worse`` where the present drop is
    within the margin, else of ``degraded``) must pass with probability ``POWER`` at the part of alpha that the
    setting would be tested at, which the other settings, as much larger, may have handed on. In a sequential run
    it is the test of the last look that is asked to pass. None, too, where the missing rows keep it open: they do not
    come back with more examples.
    """
    last = None if look is None else look.last
    if judgement.verdicts[index] != "inconclusive":
        return None
    m = judgement.moments.column(index)
    mean = float(m.mean[0])
    if math.isclose(mean, -options.margin, abs_tol=1e-12):
        return None
    holds = mean > -options.margin
    raw = (judgement.p_no_worse_raw if holds else judgement.p_degraded_raw)[index]
    if judgement.lacking[index] and raw > (p_no_worse if holds else p_degraded)(m, options)[0]:
        return None
    of_family = int(judgement.family[:index].sum())
    plan = judgement.top_down if holds else judgement.bottom_up

    def p_of(sample: Moments) -> np.ndarray:
        return over_all_looks((p_no_worse if holds else p_degraded)(sample, options), last)

    def level(factor: float) -> float:
        key = (holds, factor)
        if key not in judgement.grown:
            judgement.grown[key] = p_of(judgement.moments.grown(factor))[judgement.family]
        return options.alpha * weight_reached(judgement.grown[key], of_family, plan, options.alpha)

    def settled(factor: float) -> bool:
        passing = p_of(m.grown(factor).scattered(_DRAWS)) < level(factor)
        return float(passing.mean()) >= POWER

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


def intervals(
    paired: PairedScores, m: Moments, options: StatsOptions, look: Look | None = None
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The deciding interval at the shown confidence, and at the level of the two one-sided tests.

    At a ``look`` both are widened so that they hold over all looks.
    """
    levels = {"diff_ci": options.confidence, "equivalence_ci": 1 - 2 * options.alpha}
    return {name: guarded_interval(m, paired.confidence(level, look)) for name, level in levels.items()}
