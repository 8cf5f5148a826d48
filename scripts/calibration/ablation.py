"""Which parts of the guarded rules earn their lines: each taken out alone, and simpler or other rules beside them."""

from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import numpy as np
from scipy import stats

from calibration.shapes import Shape
from semkv_bench.stats import StatsOptions, guarded
from semkv_bench.stats.equivalence import p_degraded, p_no_worse
from semkv_bench.stats.guarded import Moments, moments, p_above, p_below, p_few_losses

__all__ = ["RULES", "ablation_cell"]

ALPHA = 0.05
_GRID = 30  # bets of the confidence sequence


def _guarded(m: Moments, x: np.ndarray, options: StatsOptions) -> tuple[np.ndarray, np.ndarray]:
    return p_no_worse(m, options), p_degraded(m, options)


def _without(**constants: float):
    """The guarded rules with constants of :mod:`semkv_bench.stats.guarded` replaced."""

    def rule(m: Moments, x: np.ndarray, options: StatsOptions) -> tuple[np.ndarray, np.ndarray]:
        with _patched(constants):
            return _guarded(m, x, options)

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


def _no_binomial(m: Moments, x: np.ndarray, options: StatsOptions) -> tuple[np.ndarray, np.ndarray]:
    return p_above(m, -options.margin), p_degraded(m, options)


def _no_unseen_gains(m: Moments, x: np.ndarray, options: StatsOptions) -> tuple[np.ndarray, np.ndarray]:
    return p_no_worse(m, options), p_below(m, -options.margin)


def _not_heaviest(m: Moments, x: np.ndarray, options: StatsOptions) -> tuple[np.ndarray, np.ndarray]:
    return _guarded(replace(m, heaviest=np.ones_like(m.heaviest)), x, options)


def _student(m: Moments, x: np.ndarray, options: StatsOptions) -> tuple[np.ndarray, np.ndarray]:
    """Student's t on the paired differences, the default of evaluation packages."""
    t = (m.mean + options.margin) / np.sqrt(np.maximum(m.variance, 1e-300) / m.n_eff)
    return stats.t.sf(t, m.df), stats.t.cdf(t, m.df)


def _plus_two(m: Moments, x: np.ndarray, options: StatsOptions) -> tuple[np.ndarray, np.ndarray]:
    """A pair at -1 and one at +1 as heavy as the heaviest cluster, binomial at whole losses, Student's t below."""
    w = m.heaviest
    n = m.n_eff + 2 * w
    center = m.n_eff * m.mean / n
    square = (m.n_eff - 1) * m.variance + m.n_eff * (m.mean - center) ** 2
    square = square + w * ((1 + center) ** 2 + (1 - center) ** 2)
    se = np.sqrt(square / ((n - 1) * n))
    whole = replace(m, differing=np.zeros_like(m.differing))
    holds = np.maximum(
        stats.t.sf((center + options.margin) / se, m.df + 2), p_few_losses(whole, options.margin)
    )
    return holds, _student(m, x, options)[1]


def _betting(m: Moments, x: np.ndarray, options: StatsOptions) -> tuple[np.ndarray, np.ndarray]:
    """Betting (Waudby-Smith and Ramdas 2024) on differences mapped to 0..1, the capital a mean over a grid of bets."""
    y, at = (x + 1) / 2, (1 - options.margin) / 2
    out = []
    for sign, room in ((1, at), (-1, 1 - at)):
        bets = (np.arange(1, _GRID + 1) / (_GRID + 1)) / room
        capital = np.stack([np.log1p(sign * bet * (y - at)).cumsum(axis=0) for bet in bets])
        mixed = np.logaddexp.reduce(capital, axis=0) - np.log(_GRID)
        out.append(np.minimum(1.0, np.exp(-mixed.max(axis=0))))
    return out[0], out[1]


RULES = {
    "guarded (decides)": _guarded,
    "without the binomial rule": _no_binomial,
    "without unseen gains": _no_unseen_gains,
    "without Johnson's term": _without(SKEW_CAP=0.0),
    "Johnson's term not capped": _without(SKEW_CAP=0.99),
    "LOSS_WEIGHT 1": _without(LOSS_WEIGHT=1.0),
    "KNOWN not used": _without(KNOWN=20.0001),
    "ENOUGH without limit": _without(ENOUGH=1e9, KNOWN=2e9),
    "guards of weight one": _not_heaviest,
    "plus-two, twelve lines": _plus_two,
    "betting": _betting,
    "Student's t": _student,
}


def ablation_cell(shape: Shape, clusters: int, mean: float, reps: int, rng: np.random.Generator) -> dict:
    """Error rates of every rule with the margin at the true drop, and its power with the margin 0.03 beside it."""
    full, setting, row_sizes = shape.sample(rng, (clusters, reps))
    tasks, x = shape.codes(clusters), setting - full
    m = moments(x, full, tasks, "macro", row_sizes)
    cell = {"shape": shape.name, "clusters": clusters, "true_difference": mean, "rules": {}}
    for name, rule in RULES.items():
        if name == "betting" and len(shape.tasks) > 1:
            continue  # it bets on examples one by one, all of equal weight
        row = {}
        if mean < 0:
            holds, falls = rule(m, x, StatsOptions(margin=-mean))
            row = {"false_equivalent": float((holds < ALPHA).mean())}
            row["false_degraded"] = float((falls < ALPHA).mean())
        row["power_no_worse"] = float(
            (rule(m, x, StatsOptions(margin=max(0.03, 0.03 - mean)))[0] < ALPHA).mean()
        )
        if mean < -0.04:
            row["power_degraded"] = float((rule(m, x, StatsOptions(margin=-mean - 0.03))[1] < ALPHA).mean())
        cell["rules"][name] = row
    return cell
