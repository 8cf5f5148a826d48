"""From records to the content of report.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from semkv_bench.records.normalize import normalize
from semkv_bench.records.schema import REFERENCE
from semkv_bench.stats.allocations import allocated
from semkv_bench.stats.bootstrap import percentile_interval, resample_means
from semkv_bench.stats.cliff import cliff_of, grid_points
from semkv_bench.stats.comparisons import comparisons
from semkv_bench.stats.equivalence import (
    Judgement,
    clusters_needed,
    difference_moments,
    intervals,
    reference_moments,
)
from semkv_bench.stats.further import NO_ENDS, Ends
from semkv_bench.stats.guarded import guarded_interval, moments, score_interval
from semkv_bench.stats.lengths import by_length, length_trend
from semkv_bench.stats.methods import compared_methods
from semkv_bench.stats.operating_point import candidates, choose, confirm, interval_of_choice
from semkv_bench.stats.options import StatsOptions
from semkv_bench.stats.pairing import PairedScores
from semkv_bench.stats.perturbed import by_perturbation
from semkv_bench.stats.places import by_depth, by_place
from semkv_bench.stats.power import residuals, seen_drops
from semkv_bench.stats.racing import judged
from semkv_bench.stats.result import (
    Assay,
    Cliff,
    NoiseFloor,
    OperatingPoint,
    Report,
    Sequential,
    SettingResult,
    TaskResult,
)
from semkv_bench.stats.runaway import exact_mcnemar, paired_counts
from semkv_bench.stats.spending import Look, spent
from semkv_bench.stats.texts import text_results
from semkv_bench.stats.turns import recorded_units
from semkv_bench.stats.witnesses import average_of, witnesses

__all__ = ["analyze"]


def analyze(
    frame: pd.DataFrame,
    options: StatsOptions | None = None,
    *,
    chance: Mapping[str, float] | None = None,
    preregistered: bool = False,
    look: Look | None = None,
    split: str = "",
) -> Report:
    """Statistics of one set of records.

    ``frame`` has one row per example, seed, turn and setting (see :func:`semkv_bench.records.schema.normalize` for
    its columns). ``chance`` is each task's score of a guess that ignores the prompt, 0 where not given.
    ``preregistered`` says whether margin and alpha were fixed before the first record. The same records in
    any order give the same report, bit for bit. ``split``, the hash of a run's protocol, decides how the
    examples are halved to confirm the operating point. ``look`` is where a sequential run stands; ``frame`` then holds
    that look's sample, and the report says in ``sequential`` what was spent.

    Raises UsageError for records that cannot be analysed.
    """
    options = options or StatsOptions()
    records = normalize(frame)
    found = judged(records, options, chance or {}, look)
    whole, paired, dead = found.whole, found.paired, found.reacting.dead
    alive = records[~records["task"].isin(dead)].reset_index(drop=True)
    guess, judgement = found.guess, found.judgement
    resampled = resample_means(
        paired.differences, paired.tasks, options.average, options.resamples, options.seed, paired.sizes
    )
    cliffs = {
        name or "": cliff_of(grid_points(paired, name), judgement, resampled, options, name)
        for name in _quantizers(paired)
    }
    main = _main_quantizer(paired) or ""
    settings = _settings(paired, judgement, resampled, cliffs, options, look)
    one_task = partial(_one_task, options=options, look=look)
    return Report(
        model=_only(records, "model"),
        quantizer=_named(_quantizers(paired)),
        engine=_only(records, "engine"),
        protocol=_only(records, "protocol"),
        reference=REFERENCE,
        **_decided(options),
        **_counts(whole),
        preregistered=bool(preregistered),
        assay=_assay(judgement, guess, paired, dead),
        settings=settings,
        tasks=_tasks(whole, options, look),
        cliff=cliffs[main],
        cliffs=cliffs,
        operating_point=_operating_point(paired, judgement, options, guess, look, split),
        sequential=None if look is None else _sequential(look, options),
        noise_floor=_noise_floor(settings),
        warnings=_warnings(whole),
        texts=text_results(whole, options),
        depths=by_depth(records, options, one_task),
        places=by_place(alive, options, one_task),
        lengths=by_length(
            alive,
            options,
            chance or {},
            guess,
            sorted(cliffs, key=lambda name: name != main),
            one_task,
            look,
        ),
        length_trend=length_trend(alive, paired, options, look),
        perturbed=by_perturbation(alive, paired, options, look),
        methods=compared_methods(paired, settings, options, look),
        **comparisons(alive, paired, options, look) | {"n_units_recorded": recorded_units(records)},
    )


def _decided(options: StatsOptions) -> dict[str, Any]:
    """What was decided before, as fields of the report."""
    return {
        name: getattr(options, name)
        for name in ("alpha", "margin", "average", "confidence", "resamples", "seed")
    }


def _counts(paired: PairedScores) -> dict[str, int]:
    """How much evidence there is, as fields of the report."""
    return {
        "n_examples": int(paired.evidence[:, 0].sum()),
        "n_examples_recorded": paired.recorded,
        "n_repeats_collapsed": paired.repeats,
        "n_clusters": paired.n_clusters,
    }


def _only(records: pd.DataFrame, name: str) -> str | None:
    """The one value of a column that holds at most one."""
    known = records[name].dropna().unique() if name in records else ()
    return str(known[0]) if len(known) else None


def _quantizers(paired: PairedScores) -> list[str | None]:
    """Quantizers of the uniform settings, or of the others where there is no grid."""
    uniform = {info.quantizer for info in paired.settings if info.kind == "uniform"}
    found = uniform or {info.quantizer for info in paired.settings if info.kind != "full"}
    return sorted(found, key=lambda name: (name is None, name or ""))


def _named(quantizers: list[str | None]) -> str | tuple[str, ...] | None:
    known = tuple(name for name in quantizers if name is not None)
    return (known[0] if len(known) == 1 else known) if known else None


def _main_quantizer(paired: PairedScores) -> str | None:
    """Whose cliff is reported first: the quantizer with most grid points, then by name."""
    return min(_quantizers(paired), key=lambda name: -len(grid_points(paired, name)))


def _float(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def _pair(bounds: tuple[np.ndarray, np.ndarray], index: int) -> Ends:
    return (_float(bounds[0][index]), _float(bounds[1][index]))


def _settings(
    paired: PairedScores,
    judgement: Judgement,
    resampled: np.ndarray,
    cliffs: Mapping[str, Cliff],
    options: StatsOptions,
    look: Look | None,
) -> tuple[SettingResult, ...]:
    scores = reference_moments(paired, options.average)
    confidence = paired.confidence(options.confidence, look)
    low, high = score_interval(scores, confidence)
    score_ci = (np.clip(low, 0, 1), np.clip(high, 0, 1))
    shown = intervals(paired, judgement.moments, options, look)
    shown["bootstrap_ci"] = percentile_interval(resampled, options.confidence)
    allocations = {each.index: each.description() for each in allocated(paired.settings)}
    drops = seen_drops(paired, judgement, options, look)
    below = judgement.detectable & (judgement.moments.mean < 0)
    left = residuals(paired.settings, judgement.verdicts, below, cliffs)
    beside = witnesses(paired, options, confidence)
    return tuple(
        SettingResult(
            setting=info.name,
            kind=info.kind,
            quantizer=info.quantizer,
            method=info.quantizer,
            family=info.family,
            levels=info.levels,
            options=info.options,
            code_bits=info.code_bits,
            packed_bits=info.packed_bits,
            effective_bits=info.effective_bits,
            cache_bits=info.cache_bits,
            read_bits=info.read_bits,
            compression=info.compression,
            n=int(paired.evidence[:, i].sum()),
            n_clusters=int(judgement.moments.clusters[i]),
            n_unpaired=paired.unpaired.get(info.name, 0),
            n_missing=paired.missing.get(info.name, 0),
            score=float(scores.mean[i]),
            score_ci=_pair(score_ci, i),
            **_comparison(paired, judgement, shown, options, i, look),
            **beside[i],
            allocation=allocations.get(i),
            left_at_look=_left_at(paired, look, i),
            detectable_drop=drops[i],
            residual=left[i],
        )
        for i, info in enumerate(paired.settings)
    )


def _left_at(paired: PairedScores, look: Look | None, i: int) -> int | None:
    """Number of the look at which a setting left a raced run; None where it is run to its end."""
    early = look is not None and paired.last_look is not None and paired.last_look[i] < look.number
    return int(paired.last_look[i]) if early else None


_CLAIMS = ("p_no_worse", "p_equivalence", "p_degraded")
_CHANCES = (*_CLAIMS, *(f"{claim}_raw" for claim in _CLAIMS), "p_difference")


def _comparison(
    paired: PairedScores,
    judgement: Judgement,
    shown: Mapping[str, tuple],
    options: StatsOptions,
    i: int,
    look: Look | None,
) -> dict:
    """The fields of setting ``i`` that compare it with the reference, null for the reference itself."""
    if i == 0:
        nothing = ("diff", *_CLAIMS, "detectable", "n_needed")
        return dict.fromkeys(nothing) | {"diff_ci": NO_ENDS, "verdict": "reference"}
    worse, better = paired_counts(paired.measures["score"][:, i], paired.references["score"][:, i])
    reference = average_of(paired.references["score"][:, i], paired, options)
    return {
        "reference_score": reference,
        "diff": float(judgement.moments.mean[i]),
        **{name: _pair(bounds, i) for name, bounds in shown.items()},
        **{name: float(getattr(judgement, name)[i]) for name in _CHANCES},
        "n_worse": worse,
        "n_better": better,
        "p_mcnemar": exact_mcnemar(worse, better),
        "detectable": bool(judgement.detectable[i]),
        "verdict": judgement.verdicts[i],
        "n_needed": clusters_needed(judgement, i, options, look),
    }


def _tasks(
    paired: PairedScores, options: StatsOptions, look: Look | None
) -> dict[str, dict[str, TaskResult]]:
    return {
        task: _one_task(paired.take(np.flatnonzero(paired.tasks == code)), options, look)
        for code, task in enumerate(paired.task_names)
    }


def _one_task(part: PairedScores, options: StatsOptions, look: Look | None) -> dict[str, TaskResult]:
    """Scores of all clusters of ``part`` as if they were of one task."""
    here = np.flatnonzero(~np.isnan(part.measures["score"]).all(axis=0))
    single = np.zeros(len(part.tasks), dtype=int)
    m = difference_moments(replace(part, tasks=single), options.average, here)
    bounds = guarded_interval(m, part.confidence(options.confidence, look)[here])
    scores = part.measures["score"][:, here]
    averages = moments(scores, scores, single, options.average, sizes=part.sizes).mean
    return {
        part.settings[i].name: TaskResult(
            score=float(averages[k]),
            diff=None if i == 0 else float(m.mean[k]),
            diff_ci=NO_ENDS if i == 0 else _pair(bounds, k),
            n_clusters=int(m.clusters[k]),
        )
        for k, i in enumerate(here)
    }


def _assay(judgement: Judgement, guess: float, paired: PairedScores, dead: dict[str, str]) -> Assay:
    return Assay(
        sensitive=judgement.reference_works and judgement.positive_control is not None,
        positive_control=judgement.positive_control,
        reference_above_chance=bool(judgement.reference_works),
        reference_low=judgement.reference_low,
        chance=guess,
        tasks=tuple(task for task in paired.task_names if task not in dead),
        dead_tasks=dead,
        too_few=judgement.too_few,
    )


def _sequential(look: Look, options: StatsOptions) -> Sequential:
    return Sequential(
        look=look.number,
        looks=len(look.times),
        examples=tuple(look.examples),
        information=tuple(look.times),
        alpha_spent=spent(options.alpha, look.so_far[-1]),
        alpha_at_look=look.level(options.alpha),
        raced=options.race,
    )


def _operating_point(
    paired: PairedScores,
    judgement: Judgement,
    options: StatsOptions,
    guess: float,
    look: Look | None,
    split: str,
) -> OperatingPoint | None:
    info = choose(paired, judgement)
    if info is None:
        return None
    confirmation, reason = confirm(paired, info, options, guess, look, split)
    column = paired.column(info.name)
    return OperatingPoint(
        setting=info.name,
        kind=info.kind,
        code_bits=info.code_bits,
        packed_bits=info.packed_bits,
        effective_bits=info.effective_bits,
        cache_bits=info.cache_bits,
        compression=info.compression,
        verdict=judgement.verdicts[column],
        n_missing=paired.missing.get(info.name, 0) + paired.unpaired.get(info.name, 0),
        diff=float(judgement.moments.mean[column]),
        diff_ci=interval_of_choice(paired, judgement, column, options, look),
        candidates=candidates(paired),
        confirmation=confirmation,
        confirmation_reason=reason,
    )


def _noise_floor(settings: tuple[SettingResult, ...]) -> NoiseFloor | None:
    """The reference against its own repeat, where one was run (kind full under another name)."""
    repeats = [row for row in settings[1:] if row.kind == "full"]
    if not repeats:
        return None
    names = ("setting", "diff", "diff_ci", "n_worse", "n_better")
    return NoiseFloor(**{name: getattr(repeats[0], name) for name in names})


def _warnings(paired: PairedScores) -> tuple[str, ...]:
    found = []
    whole, clusters = paired.n_clusters, len(paired.tasks)
    noun = "examples" if paired.evidence[:, 0].sum() == whole else "clusters"
    for i, info in enumerate(paired.settings[1:], start=1):
        have = int((~np.isnan(paired.measures["score"][:, i])).sum())
        raced = paired.last_look is not None and paired.last_look[i] < paired.last_look[0]
        if have < clusters and not raced:
            found.append(f"{info.name} covers {have} of {clusters} {noun}")
        if paired.unpaired.get(info.name):
            found.append(f"{info.name}: {paired.unpaired[info.name]} rows have no partner under {REFERENCE}")
    if paired.shared:
        found.append(
            f"{paired.shared} examples share a document with another and count with it as one cluster"
        )
    if paired.across_tasks:
        found.append(
            f"{paired.across_tasks} examples share a document or prompt with one of another task and count with it as "
            "one cluster"
        )
    if paired.same_prompts:
        found.append(
            f"{paired.same_prompts} examples have the prompt of another and count with it as one cluster"
        )
    return tuple(found)
