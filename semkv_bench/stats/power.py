"""What a run could have detected: the smallest drop that would have shown, and what is left above the cliff."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from scipy import stats

from semkv_bench.stats.equivalence import HOLDS, POWER, Judgement
from semkv_bench.stats.guarded import Moments, moments, p_unseen_gains, upper_side
from semkv_bench.stats.options import StatsOptions
from semkv_bench.stats.pairing import PairedScores, SettingInfo
from semkv_bench.stats.result import Cliff
from semkv_bench.stats.spending import Look, Looks

__all__ = ["detectable_drops", "residuals", "seen_drops"]

_STEPS = 1000
_SAME_BITS = 1e-9


def seen_drops(
    paired: PairedScores, judgement: Judgement, options: StatsOptions, look: Look | None = None
) -> list[float | None]:
    """``detectable_drops`` of every setting, None for the reference and where no drop could have been seen."""
    reference = moments(
        paired.references["score"],
        paired.references["score"],
        paired.tasks,
        options.average,
        sizes=paired.sizes,
        documents=paired.documents,
    ).mean
    drops = detectable_drops(judgement.moments, reference, options, paired.looks(look))
    return [None if i == 0 or np.isnan(drop) else float(drop) for i, drop in enumerate(drops)]


def detectable_drops(
    m: Moments, reference: np.ndarray, options: StatsOptions, look: Look | Looks | None = None
) -> np.ndarray:
    """Smallest average drop per setting, [S], that ``detectable`` would have shown with a chance of 80 %.

    ``m`` are the moments of the paired differences, ``reference`` [S] the reference's average scores, which
    bound the drop. The test is the guarded one at ``alpha``, two-sided and not adjusted. The variance is the
    one observed and that of the losses that the drop would add: ties alone have none, yet a sample with a drop
    would not consist of ties. NaN where no drop could have been detected. At a ``look`` of a sequential run it
    is that look's test.
    """
    drops = np.linspace(0, 1, _STEPS + 1)[1:, None]  # [G, 1]
    flat = _dropped(m, drops)
    side = upper_side(flat)
    tail = options.alpha / 2 if look is None else look.level(options.alpha / 2)
    # Of all drops by all settings, flat.
    tail = np.tile(tail, len(drops)) if np.ndim(tail) else tail
    scatter = stats.norm.isf(1 - POWER) * np.sqrt(flat.variance / flat.n_eff)
    shortfall = side.at(stats.t.isf(tail, side.df)) + scatter
    unseen = p_unseen_gains(replace(flat, mean=flat.mean + scatter), 0.0)
    short = ((shortfall > 0) | (unseen >= tail)).reshape(len(drops), -1)  # [G, S]
    # Beyond the last drop that is missed, everything is found.
    first = np.where(short.any(axis=0), len(drops) - np.argmax(short[::-1], axis=0), 0)
    found = np.full(short.shape[1], np.nan)
    able = first < len(drops)
    found[able] = drops[first[able], 0]
    return np.where(found <= reference, found, np.nan)


def _dropped(m: Moments, drops: np.ndarray) -> Moments:
    """``m`` as it would be with average ``-drops`` [G, 1], flattened to [G * S].

    What is missing of the drop comes as whole losses on top of the differences observed; where more was lost
    than the drop, each difference stays with the probability that leaves the drop.
    """
    lost = np.maximum(-m.mean, 0)
    missing = np.maximum(drops - lost, 0)
    kept = np.where(missing > 0, 1.0, drops / np.where(lost > 0, lost, np.inf))
    mean, square = kept * m.mean, kept * (m.variance + m.mean**2)
    cube = kept * (m.third + 3 * m.mean * m.variance + m.mean**3)
    loss = np.maximum(np.maximum(m.reference_size, m.spread), drops)
    share = missing / loss
    changed = {
        "mean": np.broadcast_to(-drops, loss.shape),
        "variance": square - mean**2 + missing * (loss - missing),
        "third": cube - 3 * mean * square + 2 * mean**3 - loss**3 * share * (1 - share) * (1 - 2 * share),
        "differing": np.minimum(kept * m.differing + m.n_eff * share, m.n_eff),
        "small_differences": (m.n_eff - kept * (m.n_eff - m.small_differences)) * (1 - share),
        "spread": np.where(missing > 0, loss, m.spread),
    }
    same = {name: np.tile(value, (len(drops),) + (1,) * (value.ndim - 1)) for name, value in vars(m).items()}
    return replace(m, **{**same, **{name: value.ravel() for name, value in changed.items()}})


def residuals(
    settings: Sequence[SettingInfo],
    verdicts: Sequence[str],
    below: np.ndarray,
    cliffs: Mapping[str, Cliff],
) -> list[str | None]:
    """Per setting ``floor`` or ``not detected`` above the cliff, None elsewhere.

    Above the cliff are the uniform settings from its upper end on, and mixed and pruned settings that hold.
    ``below`` [S] says whether a setting is detectably below the reference.
    """
    found: list[str | None] = []
    for i, info in enumerate(settings):
        if info.kind == "uniform":
            cliff = cliffs.get(info.quantizer or "")
            edge = cliff and cliff.upper_bits
            above = edge is not None and info.code_bits is not None and info.code_bits >= edge - _SAME_BITS
        else:
            above = info.kind != "full" and verdicts[i] in HOLDS
        found.append(("floor" if below[i] else "not detected") if above else None)
    return found
