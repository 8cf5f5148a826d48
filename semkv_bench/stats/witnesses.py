"""What stands beside a verdict and does not decide it: runaway answers, agreement with the reference, KL."""

from __future__ import annotations

import numpy as np

from semkv_bench.stats.bootstrap import percentile_interval, resample_means
from semkv_bench.stats.further import NO_ENDS, Ends
from semkv_bench.stats.guarded import moments, score_interval
from semkv_bench.stats.options import StatsOptions
from semkv_bench.stats.pairing import PairedScores
from semkv_bench.stats.result import Parting
from semkv_bench.stats.runaway import exact_mcnemar, paired_counts

__all__ = ["average_of", "witnesses"]


def average_of(values: np.ndarray, paired: PairedScores, options: StatsOptions) -> float | None:
    """Average of cluster values [N] as scores are averaged, None where there are none."""
    if np.isnan(values).all():
        return None
    column = values[:, None]
    return float(moments(column, np.abs(column), paired.tasks, options.average, sizes=paired.sizes).mean[0])


def witnesses(paired: PairedScores, options: StatsOptions, confidence: np.ndarray) -> list[dict]:
    """The fields of every setting, the reference first.

    confidence: level of each setting's intervals, [S]. Intervals of shares are of the kind that scores have; those of
    KL and of places are percentile bootstraps over clusters.
    """
    kl_ends = _bootstrapped(paired, options, "kl", confidence)
    place_ends = _bootstrapped(paired, options, "parted_at", confidence)
    found = []
    for i in range(len(paired.settings)):
        agreement, agreement_ci = _share(paired, options, "agreement", i, confidence[i])
        measured = {name: paired.measures[name][:, i] for name in ("runaway", "kl", "top1_agreement")}
        found.append(
            {
                "runaway_rate": average_of(measured["runaway"], paired, options),
                "runaway_p": _runaway_p(paired, i),
                "kl": average_of(measured["kl"], paired, options),
                "kl_ci": NO_ENDS if i == 0 else kl_ends[i],
                "top1_agreement": average_of(measured["top1_agreement"], paired, options),
                "agreement": agreement,
                "agreement_ci": NO_ENDS if i == 0 else agreement_ci,
                "parting": None if i == 0 else _parting(paired, options, i, confidence[i], place_ends[i]),
            }
        )
    return found


def _runaway_p(paired: PairedScores, i: int) -> float | None:
    runaway = paired.measures["runaway"][:, i]
    if i == 0 or np.isnan(runaway).all():
        return None
    fewer, more = paired_counts(runaway, paired.references["runaway"][:, i])
    return exact_mcnemar(more, fewer)


def _parting(
    paired: PairedScores, options: StatsOptions, i: int, confidence: float, place_ci: Ends
) -> Parting | None:
    """How the answers of a setting part from the reference's, None where that was not recorded."""
    by_token, by_token_ci = _share(paired, options, "parted_by_token", i, confidence)
    by_end, by_end_ci = _share(paired, options, "parted_by_end", i, confidence)
    if by_token is None or by_end is None:
        return None
    place = average_of(paired.measures["parted_at"][:, i], paired, options)
    return Parting(
        by_token=by_token,
        by_token_ci=by_token_ci,
        by_end=by_end,
        by_end_ci=by_end_ci,
        place=place,
        place_ci=place_ci,
    )


def _share(
    paired: PairedScores, options: StatsOptions, name: str, i: int, confidence: float
) -> tuple[float | None, Ends]:
    """The average of a measure between 0 and 1, with its interval over clusters."""
    values = paired.measures[name][:, i : i + 1]
    if np.isnan(values).all():
        return None, NO_ENDS
    found = moments(
        values, values, paired.tasks, options.average, sizes=paired.sizes, documents=paired.documents
    )
    low, high = (float(np.clip(end[0], 0, 1)) for end in score_interval(found, confidence))
    return float(found.mean[0]), (low, high)


def _bootstrapped(
    paired: PairedScores, options: StatsOptions, name: str, confidence: np.ndarray
) -> list[Ends]:
    """Percentile intervals by setting, each over the clusters that have the measure; none for a single one."""
    values = paired.measures[name]
    ends: list[Ends] = [NO_ENDS] * values.shape[1]
    patterns, pattern_of = np.unique(~np.isnan(values), axis=1, return_inverse=True)
    for number, present in enumerate(patterns.T):
        if present.sum() < 2:
            continue
        columns = np.flatnonzero(pattern_of.ravel() == number)
        means = resample_means(
            values[np.ix_(present, columns)],
            paired.tasks[present],
            options.average,
            options.resamples,
            options.seed,
            paired.sizes[present],
        )
        for k, column in enumerate(columns):
            low, high = percentile_interval(means[:, k], confidence[column])
            ends[column] = (float(low), float(high))
    return ends
