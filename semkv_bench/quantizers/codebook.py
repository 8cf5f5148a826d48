"""Lloyd-Max codebooks for one coordinate of a random unit vector.

A coordinate t of a uniformly random unit vector in d dimensions has the density
f(t) ~ (1 - t**2)**((d - 3)/2), a Beta distribution stretched to [-1, 1] with variance 1/d
(TurboQuant, arXiv 2504.19874, lemma 1). Everything here is in units of its standard deviation,
z = t * sqrt(d), so that d -> infinity is the standard normal distribution and the mean squared
errors are those of J. Max, "Quantizing for minimum distortion", 1960.
"""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from semkv_bench.lazy import scipy

__all__ = ["Codebook", "lloyd_max", "trapezoid_lloyd_max"]

_NEWTON_STEPS = 100
_SETTLED = 1e-10  # Newton converges quadratically: the step after this one would be lost in rounding


@dataclass(frozen=True)
class Codebook:
    """Optimal scalar quantizer: ``levels`` centroids, the thresholds midway, and its mean squared error.

    All in units of the coordinate's standard deviation, so ``mse`` is the squared error of a whole
    vector relative to its squared norm.
    """

    centroids: NDArray[np.float64]  # [levels], ascending, symmetric about 0
    thresholds: NDArray[np.float64]  # [levels - 1]
    mse: float


@cache
def lloyd_max(levels: int, head_dim: float) -> Codebook:
    """The optimal codebook for vectors of ``head_dim`` >= 3 values (``math.inf``: the Gaussian limit).

    Solved by Newton's method on "every centroid is the mean of its cell", which is accurate to a few
    units in the last place and takes milliseconds, so nothing is kept on disk. The solution is unique,
    for the density is log-concave.
    """
    cdf, density, tail_mean = _gaussian() if math.isinf(head_dim) else _coordinate(int(head_dim))
    centroids = _starting_point(levels, head_dim)
    for _ in range(_NEWTON_STEPS):
        means, by_lower, by_upper = _cell_means(centroids, cdf, density, tail_mean)
        step = _newton_step(means, centroids, by_lower, by_upper)
        moved = centroids + step
        # Far from the solution a Newton step may disorder the centroids; Lloyd's own step never does.
        inside = np.all(np.diff(moved) > 0) and abs(moved[0]) < math.sqrt(head_dim)
        centroids = moved if inside else means
        centroids = (centroids - centroids[::-1]) / 2
        if inside and np.abs(step).max() < _SETTLED * max(1.0, centroids[-1]):
            break
    thresholds = (centroids[1:] + centroids[:-1]) / 2
    mass = np.diff(cdf(np.concatenate([[-np.inf], thresholds, [np.inf]])))
    return Codebook(centroids, thresholds, float(1 - mass @ centroids**2))


@cache
def trapezoid_lloyd_max(levels: int, head_dim: int) -> NDArray[np.float64]:
    """The centroids that vLLM's TurboQuant has for a normal distribution of variance 1/head_dim.

    Lloyd's iteration from even centroids over 3.5 standard deviations, cells ending at 10.5, every integral by the
    trapezoidal rule of 200 panels, until no centroid moves by 1e-10 or 200 rounds are over.
    """
    sigma = 1 / math.sqrt(head_dim)
    centroids = (-3.5 + 7 * (np.arange(levels) + 0.5) / levels) * sigma
    weight = np.ones(201)
    weight[[0, -1]] = 0.5
    for _ in range(200):
        inner = (centroids[1:] + centroids[:-1]) / 2
        edges = np.concatenate([[-10.5 * sigma], inner, [10.5 * sigma]])
        points = np.linspace(edges[:-1], edges[1:], 201, axis=-1)
        density = np.exp(-(points**2) / (2 * sigma**2)) * weight
        moved = (points * density).sum(-1) / density.sum(-1)
        if np.abs(moved - centroids).max() < 1e-10:
            break
        centroids = moved
    return centroids


def _gaussian():
    def density(z):
        return np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)

    return scipy.special.ndtr, density, density


def _coordinate(head_dim: int):
    """Distribution function, density, and integral of z * density over (z, inf), for finite d."""
    half, root = (head_dim - 1) / 2, math.sqrt(head_dim)
    log_peak = scipy.special.gammaln(head_dim / 2) - scipy.special.gammaln(half) - math.log(math.pi) / 2
    peak = math.exp(log_peak)

    def inside(z):
        return np.clip(z / root, -1, 1)

    def cdf(z):
        return scipy.special.betainc(half, half, (1 + inside(z)) / 2)

    def density(z):
        return peak / root * (1 - inside(z) ** 2) ** (half - 1)

    def tail_mean(z):
        return peak * root / (head_dim - 1) * (1 - inside(z) ** 2) ** half

    return cdf, density, tail_mean


def _starting_point(levels: int, head_dim: float) -> NDArray[np.float64]:
    # High-resolution theory: centroid density ~ f**(1/3), for a normal one of 3 times the variance.
    quantiles = scipy.special.ndtri((np.arange(levels) + 0.5) / levels) * math.sqrt(3)
    reach = 0.95 * math.sqrt(head_dim)
    widest = quantiles[-1]
    return quantiles if widest < reach else quantiles * (reach / widest)


def _cell_means(centroids, cdf, density, tail_mean):
    """Mean of every cell, and what it moves by its lower and upper edge [levels], zero at the ends."""
    inner = (centroids[1:] + centroids[:-1]) / 2
    edges = np.concatenate([[-np.inf], inner, [np.inf]])
    mass = np.diff(cdf(edges))
    means = -np.diff(tail_mean(edges)) / mass
    weight = density(inner)
    by_lower = np.concatenate([[0], weight * (means[1:] - inner) / mass[1:]])
    by_upper = np.concatenate([weight * (inner - means[:-1]) / mass[:-1], [0]])
    return means, by_lower, by_upper


def _newton_step(means, centroids, by_lower, by_upper):
    # An edge moves by half of what either neighbouring centroid moves: a tridiagonal system.
    bands = np.zeros((3, len(centroids)))
    bands[0, 1:] = -by_upper[:-1] / 2
    bands[1] = 1 - (by_lower + by_upper) / 2
    bands[2, :-1] = -by_lower[1:] / 2
    return scipy.linalg.solve_banded((1, 1), bands, means - centroids)
