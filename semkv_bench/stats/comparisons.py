"""Comparisons beyond the grid: mixes against the line between their ends, metrics, deletion, turns, power."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from semkv_bench.stats.allocations import Allocated, allocated
from semkv_bench.stats.contrast import Arm, Contrast, arm_of, contrast_of, line_between
from semkv_bench.stats.further import NO_ENDS, Deletion, Interpolation
from semkv_bench.stats.multiplicity import holm
from semkv_bench.stats.options import StatsOptions
from semkv_bench.stats.pairing import PairedScores, SettingInfo
from semkv_bench.stats.rankings import rankings
from semkv_bench.stats.spending import Look
from semkv_bench.stats.turns import by_turn, recorded_units, runaway_detector, turn_drift

__all__ = ["comparisons", "deletion", "interpolation", "judged_columns"]

_SAME_BITS = 1e-6
# Pruning rounds to whole tokens, so equal memory may be recorded a little apart.
_SAME_MEMORY = 1.005


def comparisons(
    records: pd.DataFrame, paired: PairedScores, options: StatsOptions, look: Look | None = None
) -> dict[str, Any]:
    """The fields of a report that say what is beyond the grid, empty or null where there is nothing to compare."""
    return {
        "n_units_recorded": recorded_units(records),
        "n_turns": int(records["turn"].nunique()),
        "interpolation": interpolation(paired, options, look),
        "rankings": rankings(paired, options, look),
        "deletion": deletion(paired, options, look),
        "turns": by_turn(records, options, look),
        "turn_drift": turn_drift(records, paired, options, look),
        "runaway_detector": runaway_detector(records, paired, options, look),
    }


def interpolation(
    paired: PairedScores, options: StatsOptions, look: Look | None = None
) -> tuple[Interpolation, ...]:
    """Is the score of a two-level mix on the line between its ends?

    One entry per mix whose two ends were run as uniform settings (or as mixes of fraction 0 and 1): the
    difference between the mix and ``fraction * high + (1 - fraction) * low``, example by example. p-values
    are Holm-adjusted over all mixes. ``ends_differ`` says whether the ends were shown to differ: a line
    between equal ends is flat, and being on it says little.
    """
    mixes = [mix for mix in allocated(paired.settings) if mix.kind == "mixed" and 0 < mix.share < 1]
    ends = [(mix, _end(paired, mix, mix.high, 1.0), _end(paired, mix, mix.low, 0.0)) for mix in mixes]
    ends = [found for found in ends if None not in found]
    if not ends:
        return ()
    mixes = [mix for mix, _, _ in ends]
    share = np.array([mix.share for mix in mixes])

    def both_ends(scores: PairedScores) -> tuple[Arm, Arm]:
        high, low = (arm_of(scores, [found[k] for found in ends]) for k in (1, 2))
        return high, low

    def mix_and_line(scores: PairedScores) -> tuple[Arm, Arm]:
        high, low = both_ends(scores)
        return arm_of(scores, [mix.index for mix in mixes]), line_between(high, low, share)

    result = contrast_of(paired, mix_and_line, options, look)
    apart = contrast_of(paired, both_ends, options, look)
    words = ("on the line", "above the line", "below the line")
    judged = judged_columns(result, options, words)
    return tuple(
        Interpolation(
            **_named(paired.settings[mix.index]),
            metric=mix.metric,
            high=mix.high,
            low=mix.low,
            fraction=mix.share,
            high_setting=paired.settings[top].name,
            low_setting=paired.settings[bottom].name,
            high_score=apart.value("first", k),
            low_score=apart.value("second", k),
            ends_differ=bool(apart.p_difference[k] < options.alpha),
            score=result.value("first", k),
            line=result.value("second", k),
            **judged[k],
        )
        for k, (mix, top, bottom) in enumerate(ends)
    )


def _end(paired: PairedScores, mix: Allocated, levels: int, share: float) -> int | None:
    """Column of the uniform setting of ``levels`` of the mix's quantizer, or of the mix that is all of it."""
    own = paired.settings[mix.index].quantizer
    name = f"{mix.family}-L{levels}" if mix.family else f"L{levels}"
    uniform = [
        (i, info)
        for i, info in enumerate(paired.settings)
        if info.kind == "uniform" and info.quantizer == own
    ]
    for i, info in uniform:
        if info.name == name:
            return i
    bits = math.log2(levels) if levels else None
    for i, info in uniform:
        if bits is not None and info.code_bits is not None and abs(info.code_bits - bits) < _SAME_BITS:
            return i
    alike = [
        other
        for other in allocated(paired.settings)
        if other.kind == "mixed" and other.group[:4] == mix.group[:4] and other.share == share
    ]
    return min(alike, key=lambda other: (other.metric != mix.metric, other.metric)).index if alike else None


def deletion(paired: PairedScores, options: StatsOptions, look: Look | None = None) -> tuple[Deletion, ...]:
    """Is it better to delete tokens, or to keep all of them at fewer bits, for the same memory?

    Every pruned setting is compared with the uniform and the mixed setting of each quantizer that are nearest
    to its bits from below (half a percent above counts as equal; among equals, a mix by the same
    metric first). A pruned setting with nothing at or below its memory has one entry with ``against`` null.
    p-values are Holm-adjusted over all comparisons.
    """
    pairs = []
    metrics = {each.index: each.metric for each in allocated(paired.settings)}
    for i, info in enumerate(paired.settings):
        if info.kind == "prune":
            found = _retained(paired.settings, info)
            pairs += [(i, j) for j in found] or [(i, None)]
    matched = [pair for pair in pairs if pair[1] is not None]

    def sides(scores: PairedScores) -> tuple[Arm, Arm]:
        first, second = (arm_of(scores, [pair[k] for pair in matched]) for k in (0, 1))
        return first, second

    result = contrast_of(paired, sides, options, look)
    words = ("alike within the margin", "deletion loses less", "deletion loses more")
    judged = dict(zip(matched, judged_columns(result, options, words), strict=True))
    scores = {pair: (result.value("first", k), result.value("second", k)) for k, pair in enumerate(matched)}
    return tuple(_deleted(paired, pair, metrics, judged, scores) for pair in pairs)


def _deleted(
    paired: PairedScores, pair: tuple, metrics: dict[int, str], judged: dict, scores: dict
) -> Deletion:
    pruned, kept = paired.settings[pair[0]], None if pair[1] is None else paired.settings[pair[1]]
    score, against = scores.get(pair, (None, None))
    return Deletion(
        setting=pruned.name,
        metric=metrics.get(pair[0]),
        effective_bits=pruned.effective_bits,
        cache_bits=pruned.cache_bits,
        score=score,
        against=kept and kept.name,
        against_kind=kept and kept.kind,
        against_effective_bits=kept and kept.effective_bits,
        against_cache_bits=kept and kept.cache_bits,
        against_score=against,
        **judged.get(pair, _UNMATCHED),
    )


_UNMATCHED = {
    "n_clusters": 0,
    "diff": None,
    "diff_ci": NO_ENDS,
    "p_difference": None,
    "p_equivalence": None,
    "verdict": "nothing to compare with",
}


def _retained(settings: Sequence[SettingInfo], pruned: SettingInfo) -> list[int]:
    """Columns of the coded settings to compare ``pruned`` with: per quantizer one uniform, one mixed."""
    if pruned.paid_bits is None:
        return []
    best: dict[tuple, tuple] = {}
    for i, info in enumerate(settings):
        bits = info.paid_bits
        coded = info.kind in ("uniform", "mixed") and bits is not None
        if not coded or bits > pruned.paid_bits * _SAME_MEMORY:
            continue
        place = (-bits, pruned.metric is None or info.metric != pruned.metric, info.name, i)
        key = (info.quantizer or "", info.kind != "uniform")
        best[key] = min(best.get(key, place), place)
    return [best[key][-1] for key in sorted(best)]


def _named(info: SettingInfo) -> dict:
    return {
        "setting": info.name,
        "quantizer": info.quantizer,
        "code_bits": info.code_bits,
        "effective_bits": info.effective_bits,
    }


def judged_columns(result: Contrast, options: StatsOptions, words: tuple[str, str, str]) -> list[dict]:
    """Difference, p-values and verdict per column; ``words`` are for alike, above and below."""
    eq, different = holm(result.p_equivalence), holm(result.p_difference)
    alike, above, below = words
    rows = []
    for k in range(len(result.mean)):
        if eq[k] < options.alpha:
            verdict = alike
        elif different[k] < options.alpha:
            verdict = above if result.mean[k] > 0 else below
        else:
            verdict = "not decided"
        rows.append(
            {
                "n_clusters": int(result.clusters[k]),
                "diff": result.value("mean", k),
                "diff_ci": result.interval(k),
                "p_difference": float(different[k]),
                "p_difference_raw": float(result.p_difference[k]),
                "p_equivalence": float(eq[k]),
                "p_equivalence_raw": float(result.p_equivalence[k]),
                "verdict": verdict,
            }
        )
    return rows
