"""How often intervals hold the truth and tests err: by simulation, and exactly for whole losses."""

import numpy as np
from scipy import stats

from calibration.shapes import Shape
from semkv_bench.stats import StatsOptions
from semkv_bench.stats.bootstrap import percentile_interval, resample_means
from semkv_bench.stats.equivalence import p_degraded, p_no_worse
from semkv_bench.stats.guarded import Moments, guarded_interval, moments
from semkv_bench.stats.multiplicity import shares
from semkv_bench.stats.pairing import SettingInfo

__all__ = ["coverage_cell", "exact_rates", "family_rate", "margin_cell"]

CONFIDENCE, ALPHA = 0.95, 0.05
_RESAMPLES = 400
_BOOTSTRAPPED = 400  # repetitions of the percentile interval, which is only shown beside
_NEAR, _FINE = 0.046, 20_000  # rates of false verdicts that are measured again, with so many repetitions
_AT_ONCE = 10_000  # repetitions that are held in memory


def coverage_cell(shape: Shape, clusters: int, mean: float, reps: int, rng: np.random.Generator) -> dict:
    """One shape at one size: how often each interval holds the truth, and how often tests err at the margin."""
    parts = max(1, round(reps / _AT_ONCE))
    cells = [
        _coverage_part(shape, clusters, mean, reps // parts, _BOOTSTRAPPED // parts, rng)
        for _ in range(parts)
    ]
    known = {"shape": shape.name, "clusters": clusters, "true_difference": mean}
    found = known | {name: float(np.mean([cell[name] for cell in cells])) for name in cells[0]}
    if found.get("false_equivalent", 0.0) > _NEAR:
        # Near alpha the first figure decides only that a finer one, of new samples, replaces it.
        found["false_equivalent"] = _false_equivalent(shape, clusters, mean, _FINE, rng)
        found["fine"] = True
    return found


def _false_equivalent(shape: Shape, clusters: int, mean: float, reps: int, rng: np.random.Generator) -> float:
    full, setting, row_sizes = shape.sample(rng, (clusters, reps))
    m = moments(setting - full, full, shape.codes(clusters), "macro", row_sizes)
    return float((p_no_worse(m, StatsOptions(margin=-mean, alpha=ALPHA)) < ALPHA).mean())


def _coverage_part(
    shape: Shape, clusters: int, mean: float, reps: int, bootstrapped: int, rng: np.random.Generator
) -> dict[str, float]:
    tasks = shape.codes(clusters)
    full, setting, row_sizes = shape.sample(rng, (clusters, reps))
    difference = setting - full
    m = moments(difference, full, tasks, "macro", row_sizes)
    low, high = guarded_interval(m, CONFIDENCE)
    resampled = resample_means(difference[:, :bootstrapped], tasks, "macro", _RESAMPLES, 0)
    half = stats.t.isf((1 - CONFIDENCE) / 2, m.df) * np.sqrt(m.variance / m.n_eff)
    two = _plus_two(m.n_eff, m.mean, m.variance)
    cell = {
        "differing": float((np.abs(difference) > 1e-12).sum(axis=0).mean()),
        "coverage": _covers((low, high), mean),
        "misses_below": float((low > mean).mean()),
        "misses_above": float((high < mean).mean()),
        "width": float((high - low).mean()),
        "student_t": _covers((m.mean - half, m.mean + half), mean),
        "plus_two": _covers(two, mean),
        "plus_two_width": float((two[1] - two[0]).mean()),
        "percentile": _covers(percentile_interval(resampled, CONFIDENCE), mean),
    }
    if mean < 0:  # the margin is put where the truth is, so both verdicts are errors
        options = StatsOptions(margin=-mean, alpha=ALPHA)
        cell["false_equivalent"] = float((p_no_worse(m, options) < ALPHA).mean())
        cell["false_degraded"] = float((p_degraded(m, options) < ALPHA).mean())
    return cell


def margin_cell(shape: Shape, clusters: int, mean: float, reps: int, rng: np.random.Generator) -> dict:
    """How often tests err with the margin at the true drop; rates near alpha are measured again, more finely."""
    full, setting, row_sizes = shape.sample(rng, (clusters, reps))
    options = StatsOptions(margin=-mean, alpha=ALPHA)
    m = moments(setting - full, full, shape.codes(clusters), "macro", row_sizes)
    cell = {
        "shape": shape.name,
        "clusters": clusters,
        "true_difference": mean,
        "reps": reps,
        "false_equivalent": float((p_no_worse(m, options) < ALPHA).mean()),
        "false_degraded": float((p_degraded(m, options) < ALPHA).mean()),
    }
    if cell["false_equivalent"] > _NEAR:
        return cell | {
            "false_equivalent": _false_equivalent(shape, clusters, mean, _FINE, rng),
            "fine": True,
        }
    return cell


def _covers(bounds: tuple[np.ndarray, np.ndarray], mean: float) -> float:
    return float(((bounds[0] <= mean) & (mean <= bounds[1])).mean())


def _plus_two(n: np.ndarray, mean: np.ndarray, variance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Interval with one pair at -1 and one at +1 added, as they stand."""
    center = n * mean / (n + 2)
    square = (n - 1) * variance + n * (mean - center) ** 2 + (1 + center) ** 2 + (1 - center) ** 2
    half = stats.t.isf((1 - CONFIDENCE) / 2, n + 1) * np.sqrt(square / ((n + 1) * (n + 2)))
    return center - half, center + half


def exact_rates(margin: float, clusters: int, alpha: float = ALPHA) -> dict:
    """Error rates where a share ``margin`` of the examples loses everything: no simulation, all outcomes summed."""
    most = min(clusters, int(4 * clusters * margin + 30))
    m = _whole_losses(clusters, np.arange(most + 1))
    weight = stats.binom.pmf(np.arange(most + 1), clusters, margin)
    equivalent = p_no_worse(m, StatsOptions(margin=margin, alpha=alpha)) < alpha
    degraded = p_degraded(m, StatsOptions(margin=margin, alpha=alpha)) < alpha
    return {
        "margin": margin,
        "clusters": clusters,
        "alpha": alpha,
        "false_equivalent": float(weight @ equivalent),
        "false_degraded": float(weight @ degraded + stats.binom.sf(most, clusters, margin)),
    }


def family_rate(margin: float, clusters: int, grid: int, mixes: int) -> dict:
    """Chance of any false ``equivalent`` among ``grid`` uniform and ``mixes`` mixed settings.

    All are at the margin and lose examples of their own. The first false claim is made at the level that its
    setting starts with.
    """
    options = StatsOptions(margin=margin, alpha=ALPHA)
    most = min(clusters, int(4 * clusters * margin + 30))
    p = p_no_worse(_whole_losses(clusters, np.arange(most + 1)), options)
    weight = stats.binom.pmf(np.arange(most + 1), clusters, margin)
    kinds = ["uniform"] * grid + ["mixed"] * mixes
    settings = [SettingInfo(f"{i}", kind, "q", float(-i), None, None) for i, kind in enumerate(kinds)]
    none = np.prod([1 - float(weight @ (p < ALPHA * part)) for part in shares(settings).weights])
    return {
        "margin": margin,
        "clusters": clusters,
        "grid": grid,
        "mixes": mixes,
        "any_false_equivalent": float(1 - none),
    }


def _whole_losses(clusters: int, lost: np.ndarray) -> Moments:
    """Moments of one task's samples in which ``lost`` of the pairs are -1 and the rest ties; all scores at stake."""
    n, k = float(clusters), lost.astype(float)
    mean = -k / n
    third = k * (-1 - mean) ** 3 + (n - k) * (-mean) ** 3
    same = np.ones_like(k)
    return Moments(
        clusters=n * same,
        n_eff=n * same,
        df=(n - 1) * same,
        mean=mean,
        variance=(k - n * mean**2) / (n - 1),
        third=third / ((n - 1) * (n - 2) / n),
        differing=k,
        small_differences=n - k,
        spread=(k > 0).astype(float),
        reference_size=same,
        heaviest_weight=same,
        heavy_clusters=n * same[:, None],
        heavy_weight=same[:, None],
    )
