"""Conversations turn by turn, and how often full precision itself runs away."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from semkv_bench.records.schema import EXAMPLE, REFERENCE, UNIT
from semkv_bench.stats.contrast import Arm, Contrast, also_with_losses, contrast
from semkv_bench.stats.equivalence import difference_moments
from semkv_bench.stats.further import NO_ENDS, RunawayDetector, Turn, TurnDrift, TurnResult
from semkv_bench.stats.guarded import guarded_interval, moments, score_interval
from semkv_bench.stats.multiplicity import holm
from semkv_bench.stats.options import StatsOptions
from semkv_bench.stats.pairing import PairedScores, cluster_labels, pair
from semkv_bench.stats.spending import Look

__all__ = ["by_turn", "recorded_units", "runaway_detector", "turn_drift"]


def recorded_units(records: pd.DataFrame) -> int:
    """Examples with their seeds, however many turns each has."""
    whole = records[records["setting"] == REFERENCE]
    return len(whole[EXAMPLE].drop_duplicates())


def by_turn(records: pd.DataFrame, options: StatsOptions, look: Look | None = None) -> tuple[Turn, ...]:
    """Score and paired difference of every setting in every turn; empty where there is but one turn."""
    numbers = sorted(records["turn"].unique())
    if len(numbers) < 2:
        return ()
    # A turn may come before anything is coded, so reads of the cache are asked of the whole run only.
    records = records.drop(columns="quantized_reads", errors="ignore")
    found = []
    for number in numbers:
        part = records[records["turn"] == number]
        if (part["setting"] == REFERENCE).any() and (part["setting"] != REFERENCE).any():
            found.append(_turn(int(number), part.reset_index(drop=True), options, look))
    return tuple(found)


def _turn(number: int, records: pd.DataFrame, options: StatsOptions, look: Look | None) -> Turn:
    paired = pair(records, options)
    here = np.flatnonzero(~np.isnan(paired.measures["score"]).all(axis=0))
    scores = paired.measures["score"][:, here]
    differences = difference_moments(paired, options.average, here)
    low, high = guarded_interval(differences, paired.confidence(options.confidence, look)[here])
    averages = moments(scores, scores, paired.tasks, options.average, sizes=paired.sizes).mean
    shares = _shares(records)
    return Turn(
        turn=number,
        n_clusters=paired.n_clusters,
        settings={
            paired.settings[i].name: TurnResult(
                score=float(averages[k]),
                diff=None if i == 0 else float(differences.mean[k]),
                diff_ci=NO_ENDS if i == 0 else (float(low[k]), float(high[k])),
                n_clusters=int(differences.clusters[k]),
                coded_share=shares.get(paired.settings[i].name),
            )
            for k, i in enumerate(here)
        },
    )


def _shares(records: pd.DataFrame) -> dict[str, float]:
    """Mean share of the cache that was coded, per setting, where records tell."""
    if "coded_share" not in records:
        return {}
    share = pd.to_numeric(records["coded_share"], errors="coerce")
    mean = share.groupby(records["setting"]).mean().dropna()
    return {name: float(value) for name, value in mean.items()}


def turn_drift(
    records: pd.DataFrame, paired: PairedScores, options: StatsOptions, look: Look | None = None
) -> tuple[TurnDrift, ...]:
    """Does a setting lose more in the last turn than in the first? One entry per setting but the reference.

    The difference from the reference in the last turn less that in the first, conversation by conversation;
    p-values Holm-adjusted over the settings. Where rows are missing, a p-value also stands with all of them lost.
    Empty where there is but one turn.
    """
    numbers = sorted(records["turn"].unique())
    names = [info.name for info in paired.settings[1:] if info.kind != "full"]
    if len(numbers) < 2 or not names:
        return ()
    first, last = numbers[0], numbers[-1]

    def drift(scored: pd.DataFrame) -> Contrast:
        tasks, sizes, sides = _sides(scored, names, (first, last))
        at = None if paired.last_look is None else paired.last_look[[paired.column(n) for n in names]]
        end, start = (replace(sides[turn], last_look=at) for turn in (last, first))
        return contrast(end, start, tasks, options, look, sizes)

    scored = _beside_reference(records)
    result = drift(scored.dropna())
    if paired.worst is not None:
        result = also_with_losses(result, drift(_with_losses(_planned(scored, records, paired))))
    adjusted = holm(result.p_difference)
    return tuple(
        TurnDrift(
            setting=name,
            first_turn=int(first),
            last_turn=int(last),
            n_clusters=int(result.clusters[k]),
            diff=_doubled(result.value("mean", k)),
            diff_ci=(_doubled(result.interval(k)[0]), _doubled(result.interval(k)[1])),
            p=float(adjusted[k]),
        )
        for k, name in enumerate(names)
    )


def _doubled(value: float | None) -> float | None:
    return None if value is None else 2 * value


def _beside_reference(records: pd.DataFrame) -> pd.DataFrame:
    """Rows of all units and settings: ``score`` and the ``reference``'s, NaN where missing, and their cluster."""
    labelled = records.assign(cluster=cluster_labels(records))
    table = labelled.pivot(index=[*UNIT, "cluster"], columns="setting", values="score")
    scores = table.drop(columns=REFERENCE).stack(future_stack=True).rename("score").reset_index()
    return scores.join(table[REFERENCE].rename("reference"), on=[*UNIT, "cluster"])


def _planned(scored: pd.DataFrame, records: pd.DataFrame, paired: PairedScores) -> pd.DataFrame:
    """Without the rows of settings that had left a raced run."""
    if paired.last_look is None:
        return scored
    last = dict(zip([info.name for info in paired.settings], paired.last_look, strict=True))
    look = scored.merge(records[[*UNIT, "look"]].drop_duplicates(UNIT), on=UNIT, how="left")["look"]
    return scored[(look <= scored["setting"].map(last)).to_numpy()]


def _with_losses(scored: pd.DataFrame) -> pd.DataFrame:
    """With a missing score as 0, and the reference's missing one as 1."""
    known = scored.dropna(subset=["score", "reference"], how="all")
    return known.fillna({"score": 0.0, "reference": 1.0})


def _sides(
    scored: pd.DataFrame, names: list[str], turns: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray, dict[int, Arm]]:
    """Task codes and sizes [N] of the clusters and both turns' mean scores, halved: their difference spans -2 to 2."""
    means = scored.groupby(["task", "cluster", "turn", "setting"])[["score", "reference"]].mean() / 2
    examples = means.index.droplevel(["turn", "setting"]).unique().sort_values()
    tasks = pd.factorize(examples.get_level_values("task"), sort=True)[0]
    sizes = (
        scored.groupby(["task", "cluster"])["example_id"].nunique().reindex(examples).to_numpy(dtype=float)
    )
    sides = {}
    for turn in turns:
        part = means.xs(turn, level="turn").unstack("setting")
        tables = {
            name: part[name].reindex(index=examples, columns=names).to_numpy(dtype=float)
            for name in ("score", "reference")
        }
        sides[turn] = Arm(tables["score"], tables["reference"])
    return tasks, sizes, sides


def runaway_detector(
    records: pd.DataFrame, paired: PairedScores, options: StatsOptions, look: Look | None = None
) -> RunawayDetector | None:
    """How often the reference's own outputs count as runaway: the detector's rate of false alarms.

    ``loops`` are those that looped. Where records have no ``loop``, an output that was stopped short of its
    task's largest number of new tokens can only have looped; ``loops_exact`` is then false, and null loops
    mean that records do not tell. None where runaways are not recorded.
    """
    values = paired.measures["runaway"][:, :1]
    if np.isnan(values).all():
        return None
    known = records[(records["setting"] == REFERENCE) & records["runaway"].notna()]
    flagged = known[known["runaway"] > 0]
    m = moments(values, values, paired.tasks, options.average, sizes=paired.sizes, documents=paired.documents)
    low, high = score_interval(m, paired.confidence(options.confidence, look)[:1])
    loops, exact = _loops(records, flagged)
    return RunawayDetector(
        outputs=len(known),
        runaway=len(flagged),
        rate=float(m.mean[0]),
        rate_ci=(float(np.clip(low[0], 0, 1)), float(np.clip(high[0], 0, 1))),
        loops=loops,
        loops_exact=exact,
    )


def _loops(records: pd.DataFrame, flagged: pd.DataFrame) -> tuple[int | None, bool]:
    if "loop" in records and flagged["loop"].notna().all():
        return int(flagged["loop"].map(lambda value: str(value).lower() in ("true", "1", "1.0")).sum()), True
    if "new_tokens" not in records:
        return None, False
    tokens = pd.to_numeric(records["new_tokens"], errors="coerce")
    limit = tokens.groupby(records["task"]).max()
    own = tokens[flagged.index]
    if own.isna().any():
        return None, False
    return int((own < flagged["task"].map(limit)).sum()), False
