"""Is the difference between two samples of records real? Tests on the examples that both hold."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

__all__ = ["Sample", "Tested", "permutation_test", "tolerance_test"]

PERMUTATIONS = 20_000
_TIE = 1e-12
_POWER = 0.9

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Sample:
    """One value a cluster: ``new[i]`` and ``old[i]`` are of the same one, in the task ``tasks[i]``; all [clusters]."""

    old: Array
    new: Array
    tasks: NDArray[np.int64]

    def known(self) -> "Sample":
        """Without clusters that lack a value on either side."""
        keep = ~(np.isnan(self.old) | np.isnan(self.new))
        return Sample(self.old[keep], self.new[keep], self.tasks[keep])

    @property
    def size(self) -> int:
        """Clusters."""
        return len(self.old)


@dataclass(frozen=True)
class Tested:
    """Difference new - old, its standard error and degrees of freedom, and the p-value of its test."""

    difference: float
    error: float
    df: float
    p: float

    def visible(self, level: float, tolerance: float = 0.0) -> float:
        """The difference that a test at ``level`` shows nine times in ten."""
        if not self.error:
            return tolerance
        return tolerance + float(stats.t.isf(level / 2, self.df) + stats.t.ppf(_POWER, self.df)) * self.error


def tolerance_test(sample: Sample, tolerance: float) -> Tested:
    """Is the average difference beyond +-``tolerance``? Student's t, averaged over tasks, variance pooled.

    For values that are roughly normal, such as logarithms of KL. p is 1 where there are too few clusters to
    tell spread, and where nothing differs.
    """
    difference, error, df = _difference(sample)
    excess = abs(difference) - tolerance
    if error == 0:
        return Tested(difference, 0.0, df, 0.0 if excess > _TIE and df >= 1 else 1.0)
    if df < 1:
        return Tested(difference, error, 1.0, 1.0)
    far = (abs(difference) + tolerance) / error
    p = float(stats.t.sf(excess / error, df) + stats.t.sf(far, df))
    return Tested(difference, error, df, min(1.0, p))


def permutation_test(sample: Sample, seed: int, permutations: int = PERMUTATIONS) -> Tested:
    """Does the average differ at all? Exact for any distribution: signs of differences are flipped.

    Two-sided; the smallest p-value is 1 / (permutations + 1).
    """
    difference, error, df = _difference(sample)
    if not sample.size or (error == 0 and abs(difference) <= _TIE):
        return Tested(difference, error, max(df, 1.0), 1.0)
    rng = np.random.default_rng(seed)
    drawn = _flipped(sample, rng, permutations)
    beyond = int((np.abs(drawn) >= abs(difference) - _TIE).sum())
    return Tested(difference, error, max(df, 1.0), (1 + beyond) / (permutations + 1))


def _difference(sample: Sample) -> tuple[float, float, float]:
    """Average difference over tasks, its standard error, degrees of freedom."""
    if not sample.size:
        return 0.0, 0.0, 0.0
    tasks = np.unique(sample.tasks)
    total = squares = share = 0.0
    for task in tasks:
        here = (sample.new - sample.old)[sample.tasks == task]
        total += here.mean() / len(tasks)
        squares += float(((here - here.mean()) ** 2).sum())
        share += 1 / len(here) / len(tasks) ** 2
    df = sample.size - len(tasks)
    variance = squares / df if df else 0.0
    return float(total), math.sqrt(variance * share), float(df)


def _flipped(sample: Sample, rng: np.random.Generator, permutations: int) -> Array:
    values = sample.new - sample.old
    weights = _weights(sample.tasks)
    signs = rng.integers(0, 2, (permutations, len(values))) * 2 - 1
    return signs @ (values * weights)


def _weights(tasks: NDArray[np.int64]) -> Array:
    """Weight of every cluster in an average of task means."""
    codes, counts = np.unique(tasks, return_counts=True)
    size = dict(zip(codes.tolist(), counts.tolist(), strict=True))
    return np.array([1 / size[task] / len(codes) for task in tasks.tolist()])
