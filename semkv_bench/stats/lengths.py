"""Cliff and operating point by the length of the prompt, and whether a setting loses more as prompts grow."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd
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


def recorded_lengths(records: pd.DataFrame) -> list[int]:
    """The lengths that prompts were made for, where there are several; else nothing."""
    if LENGTH not in records:
        return []
    compared = records.groupby(_lengths(records))["setting"].nunique()
    found = sorted(int(length) for length in compared[compared > 1].index)
    return found if len(found) > 1 else []


def _lengths(records: pd.DataFrame) -> pd.Series:
    """The length of every row, NaN where none is told; files of scores may hold them as text."""
    return pd.to_numeric(records[LENGTH], errors="coerce")


def by_length(
    records: pd.DataFrame,
    options: StatsOptions,
    chance: Mapping[str, float],
    guess: float,
    quantizer: str | None,
    rows_of: Callable[..., dict[str, TaskResult]],
    look: Look | None = None,
) -> tuple[LengthResult, ...]:
    """What a run of one length alone would say, for every length: no alpha is shared between them.

    guess: the score of a guess. quantizer: whose grid the cliff is looked for in. rows_of: scores and differences by
    setting, of paired scores.
    """
    found = []
    for length in recorded_lengths(records):
        part = records[_lengths(records) == length].reset_index(drop=True)
        paired = reacting_tasks(pair(part, options), options, chance).paired
        judgement = judge(paired, options, guess, look=look)
        grid = grid_points(paired, quantizer)
        resampled = resample_means(
            paired.differences, paired.tasks, options.average, options.resamples, options.seed, paired.sizes
        )
        point = choose(paired, judgement)
        found.append(
            LengthResult(
                length=length,
                n_clusters=paired.n_clusters,
                cliff=cliff_of(grid, judgement, resampled, options, quantizer),
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

    Least squares of the paired differences on log2 of the length, with a level for each task and standard errors that
    allow for unequal spread (HC3 of MacKinnon and White, 1985); p-values Holm-adjusted over the settings. Without
    scatter there is nothing to test, and p is null.
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
    fitted = [_slope((scores[name] - reference).dropna(), 1 - confidence[name]) for name in names]
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
    differences: pd.Series, alpha: float
) -> tuple[float | None, tuple[float | None, float | None], float | None]:
    """Slope per doubling, its interval, and p; null where the lengths or the differences do not vary."""
    length = np.log2(differences.index.get_level_values("length").to_numpy(dtype=float))
    if len(np.unique(length)) < 2:
        return None, NO_ENDS, None
    values = differences.to_numpy()
    tasks = pd.get_dummies(differences.index.get_level_values("task"), dtype=float).to_numpy()
    design = np.column_stack([length - length.mean(), tasks])
    if np.ptp(values) == 0:
        return 0.0, NO_ENDS, None
    if len(values) <= design.shape[1] + 1:
        return None, NO_ENDS, None
    fit = OLS(values, design).fit(cov_type="HC3", use_t=True)
    low, high = fit.conf_int(alpha)[0]
    if not np.isfinite(fit.pvalues[0]):
        return float(fit.params[0]), NO_ENDS, None
    return float(fit.params[0]), (float(low), float(high)), float(fit.pvalues[0])
