"""Seeded bootstrap over clusters, stratified by task, with the same resamples for all settings."""

from __future__ import annotations

import numpy as np

from semkv_bench.stats.guarded import task_weights

__all__ = ["percentile_interval", "resample_means"]

_CHUNK = 500


def resample_means(
    values: np.ndarray,
    tasks: np.ndarray,
    average: str,
    resamples: int,
    seed: int,
    sizes: np.ndarray | None = None,
) -> np.ndarray:
    """Average of every resample, [resamples, S], from cluster ``values`` [N, S] (NaN: absent).

    ``sizes`` [N] are the examples in each cluster (1).
    Each task keeps its number of clusters. All columns share the drawn clusters, so statements about several
    settings at once (the cliff) have a joint distribution. A task of which a resample holds no value of a
    setting drops out of that setting's average.
    """
    rng = np.random.default_rng(seed)
    here = ~np.isnan(values)
    held = here * (np.ones(len(tasks)) if sizes is None else sizes)[:, None]
    x = held * np.where(here, values, 0.0)
    rows = [np.flatnonzero(tasks == task) for task in range(int(tasks.max()) + 1)]
    complete = bool((held == 1).all())
    out = np.empty((resamples, values.shape[1]))
    for start in range(0, resamples, _CHUNK):
        size = min(_CHUNK, resamples - start)
        sums = np.zeros((len(rows), size, values.shape[1]))
        counts = np.zeros_like(sums)
        for task, members in enumerate(rows):
            if not len(members):
                continue
            drawn = _draws(rng, size, len(members))
            sums[task] = drawn @ x[members]
            counts[task] = len(members) if complete else drawn @ held[members]
        flat = counts.reshape(len(rows), -1)
        weights = task_weights(flat, average).reshape(counts.shape)
        out[start : start + size] = (weights * sums / np.maximum(counts, 1)).sum(axis=0)
    return out


def _draws(rng: np.random.Generator, size: int, members: int) -> np.ndarray:
    """How often each of ``members`` clusters is drawn, [size, members], when as many are drawn."""
    picks = rng.integers(0, members, (size, members)) + members * np.arange(size)[:, None]
    return np.bincount(picks.ravel(), minlength=size * members).reshape(size, members).astype(float)


def percentile_interval(means: np.ndarray, confidence: float) -> tuple[np.ndarray, np.ndarray]:
    """Plain percentile interval of resampled ``means`` [B, S], shapes [S]."""
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail], axis=0)
    return low, high
