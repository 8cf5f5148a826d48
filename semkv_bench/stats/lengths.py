"""Cliff and operating point by the length of the prompt, and whether a setting loses more as prompts grow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd
from scipy.stats import t as student
from statsmodels.api import OLS

from semkv_bench.stats.bootstrap import resample_means
from semkv_bench.stats.cliff import cliff_of, grid_points
from semkv_bench.stats.equivalence import judge
from semkv_bench.stats.further import NO_ENDS
from semkv_bench.stats.multiplicity import holm
from semkv_bench.stats.operating_point import choose
from semkv_bench.stats.options import StatsOptions
from semkv_bench.stats.pairing import PairedScores, cluster_labels, pair
from semkv_bench.stats.result import LengthResult, LengthTrend, TaskResult
from semkv_bench.stats.sensitivity import reacting_tasks
from semkv_bench.stats.spending import Look

__all__ = ["LENGTH", "by_length", "length_trend", "recorded_lengths"]

LENGTH = "task_length"
_PERMUTATIONS = 4999


def recorded_lengths(records: pd.DataFrame) -> list[int]:
    """The lengths that prompts were made for, where there are several; else nothing."""
    if LENGTH not in records:
        return []
    compared = records.groupby(_lengths(records))["setting"].nunique()
    found = sorted(int(length) for length in compared[compared > 1].index)
    return found if len(found) > 1 else []


def _lengths(records: pd.DataFrame) -> pd.Series:
    """The length of every row, NaN where none above 0 is told; files of scores may hold them as text."""
    found = pd.to_numeric(records[LENGTH], errors="coerce")
    return found.where(found > 0)


def by_length(
    records: pd.DataFrame,
    options: StatsOptions,
    chance: Mapping[str, float],
    guess: float,
    quantizers: Sequence[str],
    rows_of: Callable[..., dict[str, TaskResult]],
    look: Look | None = None,
) -> tuple[LengthResult, ...]:
    """What a run of one length alone would say, for every length: no alpha is shared between them.

    guess: the score of a guess. quantizers: in whose grids cliffs are looked for, the main one first, empty for one
    without a name. rows_of: scores and differences by setting, of paired scores.
    """
    found = []
    for length in recorded_lengths(records):
        part = records[_lengths(records) == length].reset_index(drop=True)
        paired = reacting_tasks(pair(part, options), options, chance).paired
        judgement = judge(paired, options, guess, look=look)
        resampled = resample_means(
            paired.differences, paired.tasks, options.average, options.resamples, options.seed, paired.sizes
        )
        point = choose(paired, judgement)
        cliffs = {
            name: cliff_of(grid_points(paired, name or None), judgement, resampled, options, name or None)
            for name in quantizers
        }
        found.append(
            LengthResult(
                length=length,
                n_clusters=paired.n_clusters,
                cliff=cliffs[quantizers[0]],
                cliffs=cliffs,
                operating_point=None if point is None else point.name,
                cache_bits=None if point is None else point.cache_bits,
                settings=rows_of(paired),
            )
        )
    return tuple(found)


def length_trend(
    records: pd.DataFrame, paired: PairedScores, options: StatsOptions, look: Look | None = None
) -> tuple[LengthTrend, ...]:
    """By how much the difference from the reference changes with every doubling of the length, by setting.

    Least squares of the paired differences on log2 of the length, with a level for each task. The interval has standard
    errors that allow for unequal spread (HC3 of MacKinnon and White, 1985) and, since these vanish where differences
    repeat, a pair of guards at the ends of the scale for every length. p is the larger of that fit's and that of a
    permutation of the lengths within tasks, Holm-adjusted over the settings.
    """
    if not recorded_lengths(records):
        return ()
    confidence = dict(
        zip([i.name for i in paired.settings], paired.confidence(options.confidence, look), strict=True)
    )
    labelled = records.assign(cluster=cluster_labels(records), length=_lengths(records))
    scores = labelled.pivot_table(index=["task", "cluster", "length"], columns="setting", values="score")
    reference = scores[paired.settings[0].name]
    names = [info.name for info in paired.settings[1:] if info.kind != "full" and info.name in scores]
    fitted = [
        _slope((scores[name] - reference).dropna(), 1 - confidence[name], options.seed) for name in names
    ]
    tested = [k for k, (_, _, p) in enumerate(fitted) if p is not None]
    adjusted = dict(zip(tested, holm([fitted[k][2] for k in tested]), strict=True)) if tested else {}
    return tuple(
        LengthTrend(
            setting=name,
            slope=slope,
            slope_ci=ends,
            p=float(adjusted[k]) if k in adjusted else None,
        )
        for k, (name, (slope, ends, _)) in enumerate(zip(names, fitted, strict=True))
    )


def _slope(
    differences: pd.Series, alpha: float, seed: int
) -> tuple[float | None, tuple[float | None, float | None], float | None]:
    """Slope per doubling, its interval, and p; null where the lengths or the differences do not vary."""
    length = np.log2(differences.index.get_level_values("length").to_numpy(dtype=float))
    lengths = np.unique(length)
    if len(lengths) < 2:
        return None, NO_ENDS, None
    values = differences.to_numpy()
    task, names = pd.factorize(differences.index.get_level_values("task"))
    if np.ptp(values) == 0:
        return 0.0, NO_ENDS, None
    centred = length - np.bincount(task, length)[task] / np.bincount(task)[task]
    if not (centred**2).sum():
        return None, NO_ENDS, None
    slope = float(centred @ values / (centred**2).sum())
    # Guards stand at every length alike, so that they pull towards no trend.
    guarded = np.concatenate([values, np.repeat([-1.0, 1.0], len(lengths))])
    at = np.concatenate([length, lengths, lengths])
    levels = np.eye(len(names) + 1)[np.concatenate([task, np.full(2 * len(lengths), len(names))])]
    fit = OLS(guarded, np.column_stack([at - at.mean(), levels])).fit(cov_type="HC3", use_t=True)
    half = float(student.ppf(1 - alpha / 2, fit.df_resid) * fit.bse[0])
    apart = float(2 * student.sf(abs(slope) / float(fit.bse[0]), fit.df_resid))
    return slope, (slope - half, slope + half), max(apart, _permuted(centred, values, task, seed))


def _permuted(centred: np.ndarray, values: np.ndarray, task: np.ndarray, seed: int) -> float:
    """Share of permutations of ``values`` within tasks whose slope is as steep."""
    draw = np.random.default_rng(seed)
    sums = np.zeros(_PERMUTATIONS)
    for number in np.unique(task):
        mine = task == number
        shuffled = draw.permuted(np.tile(values[mine], (_PERMUTATIONS, 1)), axis=1)
        sums += shuffled @ centred[mine]
    steep = np.abs(sums) >= abs(centred @ values) * (1 - 1e-12)
    return float((1 + steep.sum()) / (1 + _PERMUTATIONS))
