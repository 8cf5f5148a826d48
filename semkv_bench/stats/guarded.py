"""Guarded intervals for the average of paired differences that are mostly ties.

Benchmark differences are bounded, discrete and mostly zero. A sample then often holds none of the rare
large losses that make up the drop, its spread comes out too small, and the usual intervals miss. The remedy
of Agresti and Min (2005) for paired proportions, carried over here, is to add made-up pairs at the ends of
the scale before the interval is formed ("plus-two": one at -1, one at +1). Added as they stand they cost too
much where many pairs differ by little, so each bound is guarded on its own side only, and by what the data
have not yet shown:

* All pairs tie: exactly plus-two, both bounds. That alone would call a sample equivalent too early, see
  :func:`p_few_losses`; nor is any sample that is too small to have seen a rare whole loss, see
  :func:`p_unseen_losses`.
* Lower bound, which decides equivalence: one tie and ``LOSS_WEIGHT`` pairs that lose everything. "Everything"
  is the whole scale while few pairs differ and shades, by ``ENOUGH`` differing pairs, into the size of a whole loss
  in these data: the mean of the reference's scores, each weighted with its square, so
  that a few large scores among many small ones count (1 for 0/1 scores, 0.33 for ROUGE around 0.27), or that
  of the differences where it is larger. A cluster of several seeds or turns is lost whole only if they are
  lost together; as far as the data show that they are lost one by one, the size shrinks.
* Upper bound, which decides degradation: one pair that gains the whole scale and one tie. By ``ENOUGH``
  differing pairs the first fades to one more pair at the average, and from half of that on the tie fades,
  too, since ties that stay would pull the bound towards 0 in every sample. The tie stays where nearly all
  pairs differ by as much as the largest: what is rare then is a pair that is not lost. Rare gains are not
  guarded beyond that. With Johnson's (1978) correction for skewness, because a few large losses among many
  ties would otherwise make the bound too loose; the correction is capped, because with two or three losses it
  goes too far: of k losses that are Poisson, at least ``k - 1.96 * sqrt(k) + 1.0`` are shown to be expected
  (exact limits, k from 2 to 6), and Johnson's term is 1.45 instead of 1.0.

The guard enters once for the whole sample. With several tasks the average is a weighted sum over strata, of
``n_eff = sum(weight**3)**-0.5`` clusters: n for equal weights, and leaning towards the heavy clusters of small
tasks otherwise. The losses added to the lower bound weigh as much as the heaviest cluster, since all that is lost
may be lost in the smallest task.
Constants were set by simulation (scripts/calibrate_statistics.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

__all__ = [
    "Bound",
    "Moments",
    "guarded_interval",
    "lower_side",
    "moments",
    "p_above",
    "p_below",
    "p_few_losses",
    "p_higher",
    "p_lower",
    "p_unseen_gains",
    "p_unseen_losses",
    "score_interval",
    "task_weights",
    "upper_side",
]

ENOUGH = 20.0
LOSS_WEIGHT = 1.5
SKEW_CAP = 0.36
TIE = 1e-12
_POOLED_DF = 1.0
_ONE_WHOLE = 0.3  # of a cluster lost whole counts as seen before the data say how seeds are lost


@dataclass(frozen=True)
class Moments:
    """Summary of one or many samples of cluster values; fields have shape [S], one entry a sample.

    ``variance`` and ``third`` are the second and third central moment of one cluster of average weight;
    ``spread`` and ``reference_size`` are the size-weighted mean absolute difference and reference score.
    ``differing`` and ``small_differences`` count, in effective clusters, those that are not ties, and those that
    differ by at most half of ``spread``. ``heaviest_weight`` is the weight of the heaviest cluster, ``1 / n_eff``
    being 1. ``heavy_clusters`` and ``heavy_weight`` [S, T] are clusters and weight in the average of the task
    with the heaviest clusters, of the two with the heaviest, and so on.
    """

    clusters: np.ndarray
    n_eff: np.ndarray
    df: np.ndarray
    mean: np.ndarray
    variance: np.ndarray
    third: np.ndarray
    differing: np.ndarray
    small_differences: np.ndarray
    spread: np.ndarray
    reference_size: np.ndarray
    heaviest_weight: np.ndarray
    heavy_clusters: np.ndarray
    heavy_weight: np.ndarray

    def grown(self, factor: float | np.ndarray) -> Moments:
        """The same kind of data, ``factor`` (or [S]) times as many clusters."""
        return replace(
            self,
            clusters=self.clusters * factor,
            n_eff=self.n_eff * factor,
            df=self.df * factor,
            differing=self.differing * factor,
            small_differences=self.small_differences * factor,
            heavy_clusters=self.heavy_clusters * np.reshape(factor, (-1, 1)),
        )

    def scattered(self, draws: int) -> Moments:
        """``draws`` samples of the same kind, means spread as those of new samples would be; from shape [1]."""
        at = stats.norm.ppf((np.arange(draws) + 0.5) / draws)
        many = {name: np.repeat(getattr(self, name), draws, axis=0) for name in self.__dataclass_fields__}
        return replace(Moments(**many), mean=self.mean + at * np.sqrt(self.variance / self.n_eff))

    def column(self, index: int) -> Moments:
        """Only sample ``index``; fields keep shape [1]."""
        return Moments(**{name: getattr(self, name)[index : index + 1] for name in self.__dataclass_fields__})


@dataclass(frozen=True)
class Bound:
    """One bound as a function of the quantile: ``center + t * se + skew``, see :meth:`at`. Shapes [S]."""

    center: np.ndarray
    se: np.ndarray
    df: np.ndarray
    skew: np.ndarray

    def at(self, t: np.ndarray) -> np.ndarray:
        """Position ``t`` standard errors from the centre, moved for skewness (Johnson 1978).

        The move is held below a share of the distance, which also keeps the position increasing in ``t``.
        """
        reach = np.abs(t) * self.se
        moved = np.clip(self.skew * (1 + 2 * t * t), -SKEW_CAP * reach, SKEW_CAP * reach)
        return self.center + t * self.se + moved


def task_weights(counts: np.ndarray, average: str) -> np.ndarray:
    """Weight of each task in the average, [T, S], from its cluster counts [T, S]; columns sum to 1."""
    present = counts > 0
    raw = present.astype(float) if average == "macro" else counts.astype(float)
    return raw / np.maximum(raw.sum(axis=0), 1e-300)


def moments(
    values: np.ndarray,
    stakes: np.ndarray,
    tasks: np.ndarray,
    average: str,
    row_sizes: np.ndarray | None = None,
    sizes: np.ndarray | None = None,
    documents: np.ndarray | None = None,
) -> Moments:
    """Moments of cluster ``values`` [N, S] (NaN: absent) stratified by ``tasks`` [N] (codes 0..T-1).

    ``stakes`` [N, S] are the reference's scores; ``row_sizes`` [N, S] how far the single rows of a cluster are
    from the reference's (see :class:`semkv_bench.stats.pairing.PairedScores`), not given where a cluster is
    one row. ``sizes`` [N] are the examples in each cluster (1): a task's average is that of its examples,
    the ratio estimator of cluster sampling (Cochran 1977). ``documents`` [N] are equal where clusters of several
    tasks are about one document, which then counts once: as if its clusters all came out alike.
    Every column needs at least one value. A task's variance is
    shrunk towards the pooled one by one degree of freedom, which also serves tasks with a single cluster;
    where no task has two, the variance around the overall mean stands in.
    """
    here = ~np.isnan(values)
    x, stake = np.where(here, values, 0.0), np.where(here, stakes, 0.0)
    member = (tasks[None, :] == np.arange(int(tasks.max()) + 1)[:, None]).astype(float)  # [T, N]
    n_t = member @ here  # [T, S]
    held = here * (np.ones(len(tasks)) if sizes is None else sizes)[:, None]
    examples_t = member @ held
    weight_t = task_weights(examples_t, average)
    safe_n = np.maximum(n_t, 1)
    mean_t = member @ (held * x) / np.maximum(examples_t, 1)
    mean = (weight_t * mean_t).sum(axis=0)
    share = held * (safe_n / np.maximum(examples_t, 1))[tasks]  # of the average cluster of the task
    away = share * (x - mean_t[tasks])
    unit = share * (weight_t / safe_n)[tasks]  # weight of each cluster
    n_eff = 1 / np.sqrt((unit**3).sum(axis=0))

    clusters, strata = n_t.sum(axis=0), (n_t > 0).sum(axis=0)
    var_t, df = _task_variances(member @ (away * away), n_t, weight_t, clusters - strata)
    df = (
        df * (examples_t**2 / np.maximum(member @ held**2, 1)).sum(axis=0) / clusters
    )  # Kish's effective number
    lone = clusters == strata
    if lone.any():
        around = share * (x - mean)
        overall = (around * around).sum(axis=0) / np.maximum(clusters - 1, 1)
        var_t, df = np.where(lone, overall, var_t), np.where(lone, clusters - 1, df)
    third = (away**3).sum(axis=0) / np.maximum(((safe_n - 1) * (safe_n - 2) / safe_n).sum(axis=0), 1)
    size = np.abs(x)
    whole = _size_weighted(unit, stake)
    if row_sizes is not None:
        whole = whole * _lost_together(unit, size, np.where(here, row_sizes, 0.0), whole)
    spread, squares = _size_weighted(unit, size), (unit * unit).sum(axis=0)
    found = Moments(
        clusters=clusters,
        n_eff=n_eff,
        df=df,
        mean=mean,
        variance=n_eff * (weight_t**2 * var_t / safe_n).sum(axis=0),
        third=n_eff**2 * (weight_t**3 * third / safe_n**2).sum(axis=0),
        differing=(unit * (size > TIE)).sum(axis=0) / squares,
        small_differences=(unit * (size <= spread / 2)).sum(axis=0) / squares,
        spread=spread,
        reference_size=whole,
        heaviest_weight=n_eff * unit.max(axis=0),
        **_heaviest_tasks(*_strata(n_t, weight_t, unit, here, tasks, sizes)),
    )
    return found if documents is None else _of_documents(found, unit, documents)


def _of_documents(m: Moments, unit: np.ndarray, documents: np.ndarray) -> Moments:
    """As many clusters fewer as the weights of the ``documents``, each that of all its clusters, count for less."""
    member = (documents[None, :] == np.unique(documents)[:, None]).astype(float)  # [documents, N]
    weight = member @ unit
    fewer = m.grown((unit**2).sum(axis=0) / (weight**2).sum(axis=0))
    return replace(fewer, clusters=(weight > 0).sum(axis=0), heaviest_weight=fewer.n_eff * weight.max(axis=0))


def _strata(
    n_t: np.ndarray,
    weight_t: np.ndarray,
    unit: np.ndarray,
    here: np.ndarray,
    tasks: np.ndarray,
    sizes: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Clusters and weight of the tasks, or of the clusters of one size in a task where sizes differ."""
    if sizes is None or (sizes == sizes[0]).all():
        return n_t, weight_t
    _, code = np.unique(np.stack([tasks, sizes]), axis=1, return_inverse=True)
    member = (code.ravel()[None, :] == np.arange(code.max() + 1)[:, None]).astype(float)
    return member @ here, member @ unit


def _heaviest_tasks(n_t: np.ndarray, weight_t: np.ndarray) -> dict[str, np.ndarray]:
    """Clusters and weight of the first, the first two, ... tasks by weight of a cluster, from [T, S], [S, T] each."""
    order = np.argsort(-weight_t / np.maximum(n_t, 1), axis=0, kind="stable")
    clusters, weight = (np.cumsum(np.take_along_axis(x, order, axis=0), axis=0).T for x in (n_t, weight_t))
    return {"heavy_clusters": clusters, "heavy_weight": weight}


def _task_variances(
    squares: np.ndarray, n_t: np.ndarray, weight_t: np.ndarray, pooled_df: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    pooled = squares.sum(axis=0) / np.maximum(pooled_df, 1)
    own_df = np.maximum(n_t - 1, 0)
    var_t = (squares + _POOLED_DF * pooled) / (own_df + _POOLED_DF)
    # Satterthwaite's formula for equal variances: it sees the design only, so one loss cannot shrink it.
    share = weight_t**2 / np.maximum(n_t, 1)
    df = share.sum(axis=0) ** 2 / (share**2 / (own_df + _POOLED_DF)).sum(axis=0)
    return var_t, np.minimum(df, pooled_df)


def _size_weighted(unit: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Mean of ``size`` weighted by its square: the size of those that count."""
    squares = (unit * size**2).sum(axis=0)
    return np.where(squares > 0, (unit * size**3).sum(axis=0) / np.where(squares > 0, squares, 1.0), 0.0)


def _lost_together(unit: np.ndarray, size: np.ndarray, rows: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """How much of the size of a row's loss is left in its cluster's, [S]: 1 where rows are lost together.

    A share of one cluster that was lost whole is taken as seen, so that small differences alone teach nothing.
    """
    squares, seen = unit * size**2, _ONE_WHOLE * whole**3 * unit.max(axis=0)
    left, had = (squares * size).sum(axis=0) + seen, (squares * rows).sum(axis=0) + seen
    return np.where(had > 0, np.minimum(left / np.where(had > 0, had, 1.0), 1.0), 1.0)


def lower_side(m: Moments) -> Bound:
    """The bound that must stay above -margin for equivalence (use negative ``t``)."""
    fresh, tied = _unseen(m), np.clip(1 - m.differing, 0, 1)
    loss = fresh + (1 - fresh) * np.maximum(m.reference_size, m.spread)
    weight = np.where(m.differing > 0, LOSS_WEIGHT * m.heaviest_weight, 1.0)
    side = _with_guards(_tied(m, tied), -loss, weight, tied, np.ones_like(loss))
    return replace(side, skew=np.zeros_like(side.skew))


def _unseen(m: Moments) -> np.ndarray:
    """How little the sample says about the size of a change, from 1 to 0: few pairs differ."""
    return np.clip(1 - m.differing / ENOUGH, 0, 1)


def upper_side(m: Moments) -> Bound:
    """The bound that must fall below -margin for degradation, below 0 for a detectable loss (positive ``t``)."""
    fresh, tied = _unseen(m), np.clip(1 - m.differing, 0, 1)
    second = np.clip(2 - 2 * np.minimum(m.differing, m.small_differences) / ENOUGH, 0, 1)
    high = fresh + (1 - fresh) * m.mean
    return _with_guards(_tied(m, tied), -tied, second, high, np.ones_like(fresh))


def _tied(m: Moments, tied: np.ndarray) -> Moments:
    """A sample of ties counts as many clusters as if all of them weighed as much as the heaviest, [S]."""
    return replace(m, n_eff=m.n_eff / (1 + tied * (m.heaviest_weight - 1)))


def _with_guards(
    m: Moments, low: np.ndarray, low_weight: np.ndarray, high: np.ndarray, high_weight: np.ndarray
) -> Bound:
    """Mean, standard error and skewness of the sample with guards at ``low`` and ``high`` added."""
    n = m.n_eff + low_weight + high_weight
    center = (m.n_eff * m.mean + low_weight * low + high_weight * high) / n
    shift, d_low, d_high = m.mean - center, low - center, high - center
    inner = np.maximum(m.n_eff - 1, 0) * m.variance
    second = inner + m.n_eff * shift**2 + low_weight * d_low**2 + high_weight * d_high**2
    third = (
        m.n_eff * m.third
        + 3 * shift * inner
        + m.n_eff * shift**3
        + low_weight * d_low**3
        + high_weight * d_high**3
    )
    skew = third / np.maximum(second, 1e-300) / (6 * n)
    return Bound(center, np.sqrt(second / ((n - 1) * n)), m.df + low_weight + high_weight, skew)


def guarded_interval(m: Moments, confidence: float) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper end, shapes [S], of the two-sided interval, cut to the scale -1..1."""
    low, high, tail = lower_side(m), upper_side(m), (1 - confidence) / 2
    # The guards of one or two pairs could pull both ends past the average.
    lower = np.minimum(low.at(-stats.t.isf(tail, low.df)), m.mean)
    upper = np.maximum(high.at(stats.t.isf(tail, high.df)), m.mean)
    return np.clip(lower, -1, 1), np.clip(upper, -1, 1)


def score_interval(m: Moments, confidence: float) -> tuple[np.ndarray, np.ndarray]:
    """Interval of an average score, guarded by one example at 0 and one at 1; not cut to the scale."""
    one = np.ones_like(m.mean)
    side = _with_guards(m, np.zeros_like(one), one, one, one)
    half = stats.t.isf((1 - confidence) / 2, side.df) * side.se
    return side.center - half, side.center + half


def p_above(m: Moments, threshold: float) -> np.ndarray:
    """One-sided p of "the average is at most ``threshold``": small means it is shown to lie above."""
    side = lower_side(m)
    return stats.t.sf((side.center - threshold) / side.se, side.df)


def p_below(m: Moments, threshold: float) -> np.ndarray:
    """One-sided p of "the average is at least ``threshold``": small means it is shown to lie below."""
    side = upper_side(m)
    low, high = np.full_like(side.center, -100.0), np.full_like(side.center, 100.0)
    for _ in range(60):
        middle = (low + high) / 2
        under = side.at(middle) < threshold
        low, high = np.where(under, middle, low), np.where(under, high, middle)
    return stats.t.sf((low + high) / 2, side.df)


def p_few_losses(m: Moments, margin: float) -> np.ndarray:
    """Chance that a sample loses so little in all, though the drop is ``margin``.

    Were every loss one of the same size, their number would be binomial, and the test exact, however small
    the level: n ties have probability ``(1 - margin / size)**n``, and at a margin of 0.03 it takes 99 of them to
    pass at 0.05. That matters where alpha is shared among many settings, and the normal approximation of
    :func:`p_above` does not reach so far out. The size is the whole scale while few pairs differ and shades, by
    ``ENOUGH`` differing pairs, into that of the differences seen. The drop may lie anywhere: all over
    the sample, or in the tasks whose clusters weigh most, where fewer losses make it up; the largest of these
    chances counts.
    """
    fresh = _unseen(m)
    size = np.maximum(fresh + (1 - fresh) * m.spread, margin + TIE)
    total = np.maximum(-m.mean, 0) / size
    anywhere = _p_binomial(total * m.n_eff, m.n_eff, margin / size)
    share = np.maximum(m.heavy_weight, TIE)
    rate = margin / (size[:, None] * share)
    in_heavy = _p_binomial(total[:, None] * m.heavy_clusters / share, m.heavy_clusters, np.minimum(rate, 1))
    return np.maximum(anywhere, np.where(rate < 1, in_heavy, 0.0).max(axis=1))


def p_unseen_losses(m: Moments, margin: float) -> np.ndarray:
    """Chance that a sample holds none of the whole losses that would pull its average down to ``-margin``.

    However many pairs differ by a little, they say nothing of a rare answer that is lost whole: at a margin of
    0.03 and an average of 0 it takes 99 clusters to see one with 95 %. Losses of the whole scale are the fewest that
    suffice; they may all lie in the tasks whose clusters weigh most.
    """
    return _p_unseen(margin + m.mean, m)


def p_unseen_gains(m: Moments, margin: float) -> np.ndarray:
    """The same of the gains that would lift its average back to ``-margin``.

    Where all pairs lose a little, a rare answer that turns from bad to perfect makes up for many of them.
    """
    return _p_unseen(-margin - m.mean, m)


def p_lower(m: Moments) -> np.ndarray:
    """One-sided p of "the average is at least 0", small only where unseen whole gains would not make up for it."""
    return np.maximum(p_below(m, 0.0), p_unseen_gains(m, 0.0))


def p_higher(m: Moments) -> np.ndarray:
    """One-sided p of "the average is at most 0", the other way round."""
    return np.maximum(p_above(m, 0.0), p_unseen_losses(m, 0.0))


def _p_unseen(distance: np.ndarray, m: Moments) -> np.ndarray:
    """Chance of none of the whole changes that make up ``distance``: anywhere, or in the heaviest clusters."""
    rate, share = np.maximum(distance, 0), np.maximum(m.heavy_weight, TIE)
    in_heavy = _p_none(rate[:, None] / share, m.heavy_clusters).max(axis=1)
    return np.maximum(_p_none(rate, m.n_eff), in_heavy)


def _p_none(rate: np.ndarray, n: np.ndarray) -> np.ndarray:
    return np.maximum(1 - rate, 0) ** n


def _p_binomial(lost: np.ndarray, n: np.ndarray, rate: np.ndarray) -> np.ndarray:
    """Chance of at most ``lost`` of ``n``, both any positive numbers."""
    lost = np.minimum(lost, n * (1 - TIE))
    return stats.beta.sf(rate, lost + 1, n - lost)
