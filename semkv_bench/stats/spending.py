"""Looking at growing data several times without erring more often: the error rate is spent look by look.

A test at level alpha that is made at every one of K looks errs more often than alpha. Lan and DeMets (1983)
fix beforehand how much of alpha may be used up by the time a share ``t`` of the data is in, and each look's
bound follows from what the earlier looks have used. The spending function here is the one of O'Brien-Fleming
type, which spends almost nothing early, so that the last look is nearly a plain test.

Bounds are found by integrating the density of the running sum over the paths that crossed no earlier bound
(Armitage, McPherson and Rowe 1969), the sum having independent normal increments.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
from scipy.interpolate import PchipInterpolator
from scipy.optimize import brentq
from scipy.special import ndtr
from scipy.stats import norm

__all__ = ["Look", "Looks", "bounds", "spent"]

_REACH = 9.0  # standard deviations of the running sum that are integrated
_NODES = np.arange(0.0, 6.21, 0.2)


def spent(alpha: float, time: float) -> float:
    """How much of a one-sided ``alpha`` may be used up when the share ``time`` of the information is in."""
    return 0.0 if time <= 0 else 2 * float(norm.sf(norm.isf(alpha / 2) / math.sqrt(min(time, 1.0))))


def bounds(alpha: float, times: tuple[float, ...]) -> tuple[float, ...]:
    """Upper bounds of the standardized statistic, one a look, of one-sided overall level ``alpha``.

    ``times`` are the shares of the information at the looks, increasing, the last at most 1. Two-sided bounds
    of level alpha are the one-sided ones of alpha / 2. For five equal steps and alpha 0.025 they are
    4.877, 3.357, 2.680, 2.290, 2.031.
    """
    found = [float(norm.isf(spent(alpha, times[0])))]
    # Positions and masses of the paths that go on, on the scale of the running sum (variance = time).
    position, mass = _nodes(times[0], found[0] * math.sqrt(times[0]), _smallest_step(times))
    mass = mass * norm.pdf(position, scale=math.sqrt(times[0]))
    for before, now in pairwise(times):
        step = math.sqrt(now - before)
        target = spent(alpha, now) - spent(alpha, before)
        bound = _bound(position, mass, step, target, math.sqrt(now))
        found.append(bound / math.sqrt(now))
        here, weight = _nodes(now, bound, _smallest_step(times))
        mass = weight * (norm.pdf(here[:, None], position[None, :], step) @ mass)
        position = here
    return tuple(found)


def _smallest_step(times: tuple[float, ...]) -> float:
    return math.sqrt(min((b - a for a, b in pairwise(times)), default=1.0))


def _nodes(time: float, upper: float, step: float) -> tuple[np.ndarray, np.ndarray]:
    """Gauss-Legendre positions and weights from far below up to ``upper``, close enough for steps of ``step``."""
    deviation = math.sqrt(time)
    low, high = -_REACH * deviation, min(upper, _REACH * deviation)
    number = int(np.clip(math.ceil(5 * (high - low) / step), 120, 1500))
    unit, weight = _legendre(number)
    return low + (unit + 1) * (high - low) / 2, weight * (high - low) / 2


@lru_cache(maxsize=64)
def _legendre(number: int) -> tuple[np.ndarray, np.ndarray]:
    return np.polynomial.legendre.leggauss(number)


def _bound(position: np.ndarray, mass: np.ndarray, step: float, target: float, deviation: float) -> float:
    """Where the running sum, one step on, exceeds with probability ``target``."""
    floor = 1e-300

    def excess(bound: float) -> float:
        return math.log(max(float(mass @ ndtr((position - bound) / step)), floor)) - math.log(target)

    top = 2 * _REACH * deviation
    return top if target <= floor or excess(top) > 0 else float(brentq(excess, -top, top, xtol=1e-10))


@dataclass(frozen=True)
class Look:
    """Look ``number`` (from 1) of those at information shares ``times``, the last of them at the end of the plan.

    ``examples`` are the sample sizes at the looks.
    """

    times: tuple[float, ...]
    number: int
    examples: tuple[int, ...] = ()

    @property
    def so_far(self) -> tuple[float, ...]:
        """Information shares of the looks up to this one."""
        return self.times[: self.number]

    @property
    def last(self) -> Look:
        """The look at the end of the plan."""
        return Look(self.times, len(self.times), self.examples)

    def level(self, alpha: float) -> float:
        """Level of a one-sided test at this look that keeps ``alpha`` over all looks."""
        return _level(alpha, self.so_far)

    def confidence(self, confidence: float) -> float:
        """Level of an interval at this look that covers with ``confidence`` over all looks."""
        return 1 - 2 * self.level((1 - confidence) / 2)

    def over_all_looks(self, p: np.ndarray) -> np.ndarray:
        """One-sided p-values at this look, turned into the overall level whose bound they just reach.

        A value below alpha means: beyond the bound of level alpha at this look. These repeated p-values
        (Jennison and Turnbull) may be adjusted by Holm and compared with alpha like any others.
        """
        level = _table(self.so_far)
        p = np.asarray(p, dtype=float)
        inner = norm.sf(level(np.clip(norm.isf(np.clip(p, 1e-300, 1.0)), level.x[0], level.x[-1])))
        least = float(norm.sf(level.x[0]))  # the bound of overall level one half
        outer = 0.5 + 0.5 * (p - least) / max(1 - least, 1e-12)
        return np.where(np.isnan(p), np.nan, np.where(p > least, outer, np.maximum(inner, p)))

    def at(self, numbers: Iterable[int]) -> Looks:
        """The looks ``numbers`` of the same plan, one a column."""
        return Looks(tuple(replace(self, number=int(number)) for number in numbers))


@dataclass(frozen=True)
class Looks:
    """A look for each of K columns: where settings left a run at earlier looks, each is judged at its own last one.

    A bound holds over all looks at once, so it does not matter by what rule a setting's last look was chosen.
    """

    each: tuple[Look, ...]

    def confidence(self, confidence: float) -> np.ndarray:
        """See ``Look.confidence``, [K]."""
        return np.array([look.confidence(confidence) for look in self.each])

    def level(self, alpha: float) -> np.ndarray:
        """See ``Look.level``, [K]."""
        return np.array([look.level(alpha) for look in self.each])

    def over_all_looks(self, p: np.ndarray) -> np.ndarray:
        """See ``Look.over_all_looks``, of [K]."""
        return np.array([float(look.over_all_looks(one)) for look, one in zip(self.each, p, strict=True)])


@lru_cache(maxsize=256)
def _level(alpha: float, times: tuple[float, ...]) -> float:
    return float(norm.sf(bounds(alpha, times)[-1]))


@lru_cache(maxsize=64)
def _table(times: tuple[float, ...]) -> PchipInterpolator:
    """Overall level, as a normal quantile, by the bound at the last of ``times``."""
    reached = np.array([bounds(float(norm.sf(z)), times)[-1] for z in _NODES])
    reached = reached[np.isfinite(reached)]  # so early a look may spend less of alpha than a float can say
    rising = np.concatenate([[True], np.diff(np.maximum.accumulate(reached)) > 1e-9])
    return PchipInterpolator(reached[rising], _NODES[: len(reached)][rising], extrapolate=False)
