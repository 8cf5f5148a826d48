"""Which parts of the guarded rules earn their lines: each taken out alone, and simpler or other rules beside them."""

import warnings
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from unittest.mock import patch

import numpy as np
from scipy import stats

from calibration.shapes import Shape
from semkv_bench.stats import StatsOptions, guarded
from semkv_bench.stats.equivalence import p_degraded, p_no_worse
from semkv_bench.stats.guarded import Moments, moments, p_above, p_below, p_few_losses, p_unseen_losses

try:  # the package is no dependency: without it its row is missing
    from evalstats.core.paired import pairwise_differences
    from evalstats.core.router import resolve_auto_robustness_method
except ImportError:
    pairwise_differences = None

__all__ = ["RULES", "ablation_cell"]

ALPHA = 0.05
_GRID = 30  # bets of the confidence sequence


@dataclass(frozen=True)
class Sample:
    """Many samples of one shape: scores of ``full`` and of the setting [N, R] and the moments of their differences."""

    full: np.ndarray
    setting: np.ndarray
    m: Moments

    @cached_property
    def of_evalstats(self) -> tuple[np.ndarray, np.ndarray]:
        """Ends of the package's paired interval of level 1 - 2 alpha, by the method that it picks itself."""
        ends = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says which method it picked
            for pair in np.stack([self.full, self.setting]).transpose(2, 0, 1):
                method, _, bounds, _ = resolve_auto_robustness_method(pair, score_range=(0, 1))
                found = pairwise_differences(pair, 1, 0, method=method, ci=1 - 2 * ALPHA, score_range=bounds)
                ends.append((found.ci_low, found.ci_high))
        low, high = np.array(ends).T
        return low, high


def _guarded(sample: Sample, options: StatsOptions) -> tuple[np.ndarray, np.ndarray]:
    return p_no_worse(sample.m, options), p_degraded(sample.m, options)


def _without(**constants: float):
    """The guarded rules with constants of :mod:`semkv_bench.stats.guarded` replaced."""

    def rule(sample: Sample, options: StatsOptions) -> tuple[np.ndarray, np.ndarray]:
        with _patched(constants):
            return _guarded(sample, options)

    return rule


@contextmanager
def _patched(constants: dict[str, float]):
    patches = [patch.object(guarded, name, value) for name, value in constants.items()]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


def _no_binomial(sample: Sample, options: StatsOptions) -> tuple[np.ndarray, np.ndarray]:
    above, unseen = p_above(sample.m, -options.margin), p_unseen_losses(sample.m, options.margin)
    return np.maximum(above, unseen), p_degraded(sample.m, options)


def _no_unseen_losses(sample: Sample, options: StatsOptions) -> tuple[np.ndarray, np.ndarray]:
    few = p_few_losses(sample.m, options.margin)
    return np.maximum(p_above(sample.m, -options.margin), few), p_degraded(sample.m, options)


def _no_unseen_gains(sample: Sample, options: StatsOptions) -> tuple[np.ndarray, np.ndarray]:
    return p_no_worse(sample.m, options), p_below(sample.m, -options.margin)


def _not_heaviest(sample: Sample, options: StatsOptions) -> tuple[np.ndarray, np.ndarray]:
    alike = replace(sample.m, heaviest_weight=np.ones_like(sample.m.heaviest_weight))
    return _guarded(replace(sample, m=alike), options)


def _student(sample: Sample, options: StatsOptions) -> tuple[np.ndarray, np.ndarray]:
    """Student's t on the paired differences, the default of evaluation packages."""
    m = sample.m
    t = (m.mean + options.margin) / np.sqrt(np.maximum(m.variance, 1e-300) / m.n_eff)
    return stats.t.sf(t, m.df), stats.t.cdf(t, m.df)


def _plus_two(sample: Sample, options: StatsOptions) -> tuple[np.ndarray, np.ndarray]:
    """A pair at -1 and one at +1 as heavy as the heaviest cluster, binomial at whole losses, Student's t below."""
    m = sample.m
    w = m.heaviest_weight
    n = m.n_eff + 2 * w
    center = m.n_eff * m.mean / n
    square = (m.n_eff - 1) * m.variance + m.n_eff * (m.mean - center) ** 2
    square = square + w * ((1 + center) ** 2 + (1 - center) ** 2)
    se = np.sqrt(square / ((n - 1) * n))
    whole = replace(m, differing=np.zeros_like(m.differing))
    holds = np.maximum(
        stats.t.sf((center + options.margin) / se, m.df + 2), p_few_losses(whole, options.margin)
    )
    return holds, _student(sample, options)[1]


def _betting(sample: Sample, options: StatsOptions) -> tuple[np.ndarray, np.ndarray]:
    """Betting (Waudby-Smith and Ramdas 2024) on differences mapped to 0..1, the capital a mean over a grid of bets."""
    y, at = (sample.setting - sample.full + 1) / 2, (1 - options.margin) / 2
    out = []
    for sign, room in ((1, at), (-1, 1 - at)):
        bets = (np.arange(1, _GRID + 1) / (_GRID + 1)) / room
        capital = np.stack([np.log1p(sign * bet * (y - at)).cumsum(axis=0) for bet in bets])
        mixed = np.logaddexp.reduce(capital, axis=0) - np.log(_GRID)
        out.append(np.minimum(1.0, np.exp(-mixed.max(axis=0))))
    return out[0], out[1]


def _evalstats(sample: Sample, options: StatsOptions) -> tuple[np.ndarray, np.ndarray]:
    """Does the interval lie above, or below, the margin? It has no p-value for that: 0 says yes, 1 no."""
    low, high = sample.of_evalstats
    return np.where(low > -options.margin, 0.0, 1.0), np.where(high < -options.margin, 0.0, 1.0)


RULES = {
    "guarded (decides)": _guarded,
    "without the binomial rule": _no_binomial,
    "without unseen losses": _no_unseen_losses,
    "without unseen gains": _no_unseen_gains,
    "without Johnson's term": _without(SKEW_CAP=0.0),
    "Johnson's term not capped": _without(SKEW_CAP=0.99),
    "LOSS_WEIGHT 1": _without(LOSS_WEIGHT=1.0),
    "ENOUGH without limit": _without(ENOUGH=1e9),
    "guards of weight one": _not_heaviest,
    "plus-two, twelve lines": _plus_two,
    "betting": _betting,
    "Student's t": _student,
}
if pairwise_differences is not None:
    RULES["evalstats' default"] = _evalstats
# They take examples one by one, all of equal weight; the package's seeds would have to be given one by one, too.
_ONE_TASK = ("betting", "evalstats' default")
_ONE_SEED = ("evalstats' default",)


def ablation_cell(shape: Shape, clusters: int, mean: float, reps: int, rng: np.random.Generator) -> dict:
    """Error rates of every rule with the margin at the true drop, and its power with the margin 0.03 beside it."""
    full, setting, row_sizes = shape.sample(rng, (clusters, reps))
    m = moments(setting - full, full, shape.codes(clusters), "macro", row_sizes)
    sample = Sample(full, setting, m)
    cell = {"shape": shape.name, "clusters": clusters, "true_difference": mean, "rules": {}}
    for name, rule in RULES.items():
        if (name in _ONE_TASK and len(shape.tasks) > 1) or (name in _ONE_SEED and row_sizes is not None):
            continue
        row = {}
        if mean < 0:
            holds, falls = rule(sample, StatsOptions(margin=-mean))
            row = {"false_equivalent": float((holds < ALPHA).mean())}
            row["false_degraded"] = float((falls < ALPHA).mean())
        row["power_no_worse"] = float(
            (rule(sample, StatsOptions(margin=max(0.03, 0.03 - mean)))[0] < ALPHA).mean()
        )
        if mean < -0.04:
            row["power_degraded"] = float((rule(sample, StatsOptions(margin=-mean - 0.03))[1] < ALPHA).mean())
        cell["rules"][name] = row
    return cell
