"""Does a setting lose more than full precision does when prompts are mistyped? A difference of differences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pandas as pd

from semkv_bench.stats.contrast import Arm, contrast
from semkv_bench.stats.further import Perturbed
from semkv_bench.stats.multiplicity import holm
from semkv_bench.stats.options import StatsOptions
from semkv_bench.stats.pairing import PairedScores, cluster_labels
from semkv_bench.stats.spending import Look

__all__ = ["PERTURB", "by_perturbation"]

PERTURB = "perturb"


def by_perturbation(
    records: pd.DataFrame, paired: PairedScores, options: StatsOptions, look: Look | None = None
) -> tuple[Perturbed, ...]:
    """For every kind of change and every setting, what the setting loses by it beyond what the reference loses.

    Over the prompts that both stand as they were written and changed so. The difference of differences lies within -2
    and 2, so its guarded interval is formed of its half. p-values are Holm-adjusted over all kinds and settings, those
    of equivalence and of difference each by themselves.
    """
    if PERTURB not in records:
        return ()
    reference = paired.settings[0].name
    labelled = records.assign(
        cluster=cluster_labels(records), kind_of=records[PERTURB].fillna("").astype(str)
    )
    scores = labelled.pivot_table(index=["task", "cluster"], columns=["kind_of", "setting"], values="score")
    asked = _asked(scores, paired)
    if not asked:
        return ()
    tasks = pd.factorize(scores.index.get_level_values("task"))[0]

    columns = [paired.column(name) for _, name in asked]
    last = None if paired.last_look is None else paired.last_look[columns]

    def arm(of: Callable[[str], str]) -> Arm:
        mine = np.column_stack([scores[of(kind), name] for kind, name in asked])
        full = np.column_stack([scores[of(kind), reference] for kind, _ in asked])
        return Arm(mine / 2, full / 2, last)

    changed, plain = arm(lambda kind: kind), arm(lambda kind: "")
    result = contrast(changed, plain, tasks, options, look)
    whole = ~np.isnan(changed.scores + changed.references + plain.scores + plain.references)
    different = holm(result.p_difference)
    # Of halves, the margin must be halved as well.
    halved = replace(options, margin=options.margin / 2)
    alike = holm(contrast(changed, plain, tasks, halved, look).p_equivalence)
    found = []
    for k, (kind, name) in enumerate(asked):
        low, high = result.interval(k)
        of = whole[:, k]
        found.append(
            Perturbed(
                perturb=kind,
                setting=name,
                n_clusters=int(result.clusters[k]),
                full_change=_mean(2 * (changed.references - plain.references)[of, k], tasks[of], options),
                change=_mean(2 * (changed.scores - plain.scores)[of, k], tasks[of], options),
                diff=None if np.isnan(result.mean[k]) else float(2 * result.mean[k]),
                diff_ci=(None if low is None else 2 * low, None if high is None else 2 * high),
                p_difference=float(different[k]),
                p_equivalence=float(alike[k]),
                verdict=_verdict(result.mean[k], alike[k] < options.alpha, different[k] < options.alpha),
            )
        )
    return tuple(found)


def _asked(scores: pd.DataFrame, paired: PairedScores) -> list[tuple[str, str]]:
    """Kinds of change and settings of which there is all that is compared; columns of ``scores`` are such pairs."""
    reference = paired.settings[0].name
    names = [info.name for info in paired.settings[1:] if info.kind != "full"]
    kinds = sorted(kind for kind in scores.columns.levels[0] if kind)
    return [
        (kind, name)
        for kind in kinds
        for name in names
        if (kind, name) in scores and ("", name) in scores and (kind, reference) in scores
    ]


def _verdict(diff: float, alike: bool, different: bool) -> str:
    """In words: are the two losses shown to be alike, or to differ?"""
    if alike:
        return "loses as much"
    if different:
        return "loses more" if diff < 0 else "loses less"
    return "not decided"


def _mean(values: np.ndarray, tasks: np.ndarray, options: StatsOptions) -> float | None:
    if not len(values):
        return None
    if options.average == "micro":
        return float(values.mean())
    return float(np.mean([values[tasks == task].mean() for task in np.unique(tasks)]))
