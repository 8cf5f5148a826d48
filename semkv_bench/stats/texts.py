"""A text's windows under every setting: perplexity, KL divergence and top-1 agreement with intervals over windows."""

from __future__ import annotations

import math

import numpy as np

from semkv_bench.stats.bootstrap import percentile_interval, resample_means
from semkv_bench.stats.further import Ends, TextResult
from semkv_bench.stats.guarded import moments
from semkv_bench.stats.options import StatsOptions
from semkv_bench.stats.pairing import PairedScores

__all__ = ["text_results"]


def text_results(paired: PairedScores, options: StatsOptions) -> tuple[TextResult, ...]:
    """One entry per setting, the reference first; none where no likelihoods were recorded.

    Intervals are percentile bootstraps over windows, each of a setting by itself; they decide nothing. ``ratio`` is the
    setting's perplexity over the reference's on the same windows, its interval that of the paired differences.
    """
    likelihood = paired.measures["nll"]
    if np.isnan(likelihood[:, 0]).all():
        return ()
    nll = _Averaged(likelihood, paired, options)
    change = _Averaged(likelihood - paired.references["nll"], paired, options)
    kl = _Averaged(paired.measures["kl"], paired, options)
    same = _Averaged(paired.measures["top1_agreement"], paired, options)
    return tuple(
        TextResult(
            setting=info.name,
            n_windows=int((~np.isnan(likelihood[:, k])).sum()),
            nll=nll.mean(k),
            perplexity=_exp(nll.mean(k)),
            perplexity_ci=nll.ends(k, exponential=True),
            ratio=_exp(change.mean(k)),
            ratio_ci=change.ends(k, exponential=True),
            kl=kl.mean(k),
            kl_ci=kl.ends(k),
            top1_agreement=same.mean(k),
            top1_agreement_ci=same.ends(k),
        )
        for k, info in enumerate(paired.settings)
    )


class _Averaged:
    """Averages over clusters of values [N, S], and their percentile intervals."""

    def __init__(self, values: np.ndarray, paired: PairedScores, options: StatsOptions):
        self._means = moments(values, np.abs(values), paired.tasks, options.average, sizes=paired.sizes).mean
        resampled = resample_means(
            values, paired.tasks, options.average, options.resamples, options.seed, paired.sizes
        )
        self._low, self._high = percentile_interval(resampled, options.confidence)
        self._absent = np.isnan(values).all(axis=0)

    def mean(self, column: int) -> float | None:
        """The average of a setting's column; None where nothing was measured."""
        return None if self._absent[column] else float(self._means[column])

    def ends(self, column: int, exponential: bool = False) -> Ends:
        """Ends of its percentile interval, of its exponential if asked; None twice where nothing was measured."""
        if self._absent[column]:
            return (None, None)
        ends = (float(self._low[column]), float(self._high[column]))
        return tuple(map(_exp, ends)) if exponential else ends


def _exp(value: float | None) -> float | None:
    """Infinite where a float does not hold it, which a report shows as unknown."""
    if value is None:
        return None
    return math.exp(value) if value < 700 else math.inf
