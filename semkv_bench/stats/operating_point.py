"""The cheapest setting that is no worse than the reference, and its confirmation on other examples."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from scipy import stats

from semkv_bench.stats.equivalence import (
    SAFE,
    Judgement,
    difference_moments,
    judge,
    over_all_looks,
    p_no_worse,
)
from semkv_bench.stats.guarded import guarded_interval
from semkv_bench.stats.multiplicity import shares
from semkv_bench.stats.options import StatsOptions
from semkv_bench.stats.pairing import PairedScores, SettingInfo
from semkv_bench.stats.result import Confirmation
from semkv_bench.stats.spending import Look

__all__ = [
    "candidates",
    "choose",
    "clusters_needed_at_best",
    "clusters_to_confirm",
    "confirm",
    "interval_of_choice",
]

_ELIGIBLE = ("uniform", "mixed")
_FULL_BITS = 16.0


def choose(paired: PairedScores, judgement: Judgement) -> SettingInfo | None:
    """Fewest bits of the whole cache among the uniform and mixed settings that are ``equivalent`` or ``no_worse``.

    None where there is none that costs less than the reference. By effective bits where records do not say what caches
    cost; where one has none of these, by code bits. Ties go to fewer code bits, then to the higher average, then by
    name.
    """
    full = _cost(paired.settings[0]) or _FULL_BITS
    able = [
        (info, float(judgement.moments.mean[i]))
        for i, (info, verdict) in enumerate(zip(paired.settings, judgement.verdicts, strict=True))
        if verdict in SAFE and info.kind in _ELIGIBLE and _cost(info) < full
    ]
    if not able:
        return None
    paid = all(info.paid_bits is not None for info, _ in able)

    def price(item: tuple[SettingInfo, float]) -> tuple:
        info, mean = item
        return (info.paid_bits if paid else info.code_bits, info.code_bits, -mean, info.name)

    return min(able, key=price)[0]


def _cost(info: SettingInfo) -> float:
    return info.code_bits if info.paid_bits is None else info.paid_bits


def clusters_to_confirm(options: StatsOptions) -> int:
    """Clusters that a half needs before it could call anything equivalent, even if every pair tied.

    From the plus-two interval of ``n`` ties (standard error sqrt(2 / ((n + 1)(n + 2))), n + 1 degrees of
    freedom), and from the chance (1 - margin)**n that ties hide a drop of the margin.
    """
    n = 1
    while (
        stats.t.sf(options.margin * math.sqrt((n + 1) * (n + 2) / 2), n + 1) >= options.alpha
        or (1 - options.margin) ** n >= options.alpha
    ):
        n += 1
    return n


def clusters_needed_at_best(settings: Sequence[SettingInfo], options: StatsOptions) -> int:
    """Clusters below which no setting could be called equivalent, even if all of them tied with the reference."""
    tested = [info for info in settings if info.kind != "full"]
    eligible = [info.kind in _ELIGIBLE for info in tested]
    if not any(eligible):
        return 0
    share = float(shares(tested).weights[eligible].max())
    return clusters_to_confirm(replace(options, alpha=options.alpha * share))


def candidates(paired: PairedScores) -> int:
    """How many settings the operating point is chosen from."""
    return sum(info.kind in _ELIGIBLE for info in paired.settings)


def interval_of_choice(
    paired: PairedScores, judgement: Judgement, column: int, options: StatsOptions, look: Look | None
) -> tuple[float, float]:
    """Interval of the chosen setting's difference that would hold for every one it was chosen from (Bonferroni)."""
    confidence = 1 - (1 - options.confidence) / candidates(paired)
    level = paired.confidence(confidence, look)[column]
    low, high = guarded_interval(judgement.moments.column(column), level)
    return float(low[0]), float(high[0])


def confirm(
    paired: PairedScores,
    point: SettingInfo,
    options: StatsOptions,
    chance: float,
    look: Look | None = None,
    split: str = "",
) -> tuple[Confirmation | None, str | None]:
    """Test the operating point on two halves of each task's clusters, drawn by ``split``.

    Returns the result and None, or None and the reason why there is no confirmation. It is confirmed if it holds on
    the first half, adjusted for all settings as in the report, and on the second by itself at ``alpha``. A setting
    that does not hold passes the first with probability alpha at most, whichever was chosen, and the second
    with another alpha. At a ``look`` of a sequential run the tests are those over all looks.
    """
    if paired.worst is not None:
        return None, "rows are missing"
    first, second = _halves(paired.tasks, split, paired.documents)
    level = options if look is None else replace(options, alpha=look.level(options.alpha))
    need = max(clusters_to_confirm(level), clusters_needed_at_best(paired.settings, level))
    if paired.take(second).n_clusters < need:
        return None, (
            f"too few examples to test on two halves: {paired.n_clusters} clusters, {2 * need} needed at margin "
            f"{options.margin:g}"
        )
    column = paired.column(point.name)
    halves = [paired.take(half) for half in (first, second)]
    if any(np.isnan(half.measures["score"]).all(axis=0).any() for half in halves):
        return None, "one setting has no examples in one half"
    adjusted = float(judge(halves[0], options, chance, look=look).p_no_worse[column])
    m = difference_moments(halves[1], options.average, [column])
    p = float(over_all_looks(p_no_worse(m, options), look)[0])
    low, high = guarded_interval(
        m, options.confidence if look is None else look.confidence(options.confidence)
    )
    result = Confirmation(
        setting=point.name,
        clusters_to_choose=halves[0].n_clusters,
        clusters_to_test=int(m.clusters[0]),
        diff=float(m.mean[0]),
        diff_ci=(float(low[0]), float(high[0])),
        p_adjusted=adjusted,
        p_no_worse=p,
        confirmed=max(adjusted, p) < options.alpha,
    )
    return result, None


def _halves(
    tasks: np.ndarray, split: str, documents: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Two random halves of every task's clusters, the odd ones shared out in turn; a document is all in one half."""
    rng = np.random.default_rng(int.from_bytes(hashlib.sha256(split.encode()).digest()[:8], "big"))
    first: list[int] = []
    second: list[int] = []
    if documents is not None:
        chosen = np.isin(documents, (names := rng.permutation(np.unique(documents)))[: len(names) // 2])
        return np.flatnonzero(chosen), np.flatnonzero(~chosen)
    for task in range(int(tasks.max()) + 1):
        members = rng.permutation(np.flatnonzero(tasks == task))
        cut = len(members) // 2 + (len(members) % 2 if len(first) <= len(second) else 0)
        first.extend(members[:cut])
        second.extend(members[cut:])
    return np.sort(np.array(first, dtype=int)), np.sort(np.array(second, dtype=int))
