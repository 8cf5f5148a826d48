"""Samples in which examples hang together, or some tasks cannot react: false verdicts by the package's own rules."""

import numpy as np

from semkv_bench.stats import StatsOptions
from semkv_bench.stats.equivalence import difference_moments, p_degraded, p_no_worse
from semkv_bench.stats.guarded import moments
from semkv_bench.stats.pairing import PairedScores, SettingInfo
from semkv_bench.stats.sensitivity import reacting_tasks

__all__ = ["CLUSTERED", "DEAD", "clustered_cell", "dead_cell"]

ALPHA, MARGIN = 0.05, 0.03
CLUSTERED = (
    ("whole documents are lost, 5 questions each", "whole", 5, 5),
    ("questions of a document share a risk, 5 each", "risk", 5, 5),
    ("questions share a risk, 1 to 9 a document", "risk", 1, 9),
)
DEAD = (
    ("4 of 5 tasks at 0.04, nothing moves them", 0.04, 0.0, 0.0),
    ("4 of 5 tasks at 0.04, the lowest grid point takes that, too", 0.04, 0.0, 1.0),
    ("4 of 5 tasks are guesses at a chance of 0.25, drawn anew", 0.25, 0.25, 0.0),
)


def clustered_cell(
    about: str, kind: str, least: int, most: int, documents: int, reps: int, rng: np.random.Generator
) -> dict:
    """0/1 scores, the true drop at the margin; rates of false verdicts with documents as clusters, and without."""
    sizes = rng.integers(least, most + 1, documents)
    owner = np.repeat(np.arange(documents), sizes)
    if kind == "whole":
        lost = (rng.random((documents, reps)) < MARGIN)[owner]
    else:
        at_risk = rng.random((documents, reps)) < 3 * MARGIN
        lost = at_risk[owner] & (rng.random((len(owner), reps)) < 1 / 3)
    starts = np.flatnonzero(np.r_[True, owner[1:] != owner[:-1]])
    total = np.add.reduceat(lost.astype(float), starts, axis=0)
    mean, whole = -total / sizes[:, None], np.ones((documents, reps))
    row_sizes = (total > 0).astype(float)
    tasks, options = np.zeros(documents, dtype=int), StatsOptions(margin=MARGIN)
    m = moments(mean, whole, tasks, "macro", row_sizes, sizes.astype(float))
    alone = moments(-lost.astype(float), np.ones(lost.shape), np.zeros(len(owner), dtype=int), "macro")
    return {
        "about": about,
        "documents": documents,
        "questions": len(owner),
        "false_equivalent": float((p_no_worse(m, options) < ALPHA).mean()),
        "false_degraded": float((p_degraded(m, options) < ALPHA).mean()),
        "false_equivalent_without": float((p_no_worse(alone, options) < ALPHA).mean()),
    }


def dead_cell(
    about: str, score: float, chance: float, taken: float, per_task: int, reps: int, rng: np.random.Generator
) -> dict:
    """Five tasks, one of which can react; the setting under test loses the margin of the living task's answers."""
    wrong = {"task": 0, "run": 0}
    for _ in range(reps):
        paired = _dead_sample(score, chance, taken, per_task, rng)
        for rule in wrong:
            options = StatsOptions(margin=MARGIN, sensitivity=rule)
            levels = {f"t{code}": chance if code else 0.0 for code in range(5)}
            kept = reacting_tasks(paired, options, levels).paired
            m = difference_moments(kept, "macro", [1])
            wrong[rule] += int(p_no_worse(m, options)[0] < ALPHA)
    return {
        "about": about,
        "per_task": per_task,
        "false_equivalent": wrong["task"] / reps,
        "false_equivalent_without": wrong["run"] / reps,
    }


def _dead_sample(
    score: float, chance: float, taken: float, per_task: int, rng: np.random.Generator
) -> PairedScores:
    tasks = np.arange(5 * per_task) % 5
    living = tasks == 0
    full, other = ((rng.random(len(tasks)) < np.where(living, 0.7, score)).astype(float) for _ in range(2))
    dead = other if chance else full
    lost = living & (rng.random(len(tasks)) < MARGIN / 0.7)
    setting = np.where(living, full * ~lost, dead)
    end = np.where(living, full * (rng.random(len(tasks)) < 0.1), dead * (rng.random(len(tasks)) >= taken))
    scores = np.stack([full, setting, end], axis=1)
    infos = [SettingInfo("full", "full", None, 16.0, None, None)]
    infos += [SettingInfo(f"L{2**bits}", "uniform", "q", float(bits), None, None) for bits in (3, 1)]
    return PairedScores(
        settings=tuple(infos),
        task_names=tuple(f"t{code}" for code in range(5)),
        tasks=tasks,
        measures={"score": scores},
        references={"score": np.repeat(full[:, None], 3, axis=1)},
        evidence=np.ones(scores.shape, dtype=int),
        row_sizes=np.abs(scores - full[:, None]),
        recorded=len(tasks),
        repeats=0,
        sizes=np.ones(len(tasks)),
    )
