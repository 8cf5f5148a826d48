"""Power of the verdicts, and whether the sample sizes named in a report keep their promise."""

import numpy as np

from calibration.shapes import Draw, f1, rouge, zero_one
from semkv_bench.stats import StatsOptions
from semkv_bench.stats.equivalence import POWER, p_degraded, p_no_worse
from semkv_bench.stats.guarded import Moments, moments

__all__ = ["CASES", "curve", "needed", "promise"]

CURVE = (25, 50, 75, 100, 150, 200, 300, 450, 600, 900)
_LARGE = 200_000
_MOST = 20_000

# Name, what it is, scores, and the verdict that is true of it at a margin of 0.03.
CASES: tuple[tuple[str, str, Draw, str], ...] = (
    ("ties", "0/1, no pair differs", zero_one(0.0), "equivalent"),
    ("lost_1", "0/1, 1 % lost", zero_one(0.01), "equivalent"),
    ("lost_2_won_2", "0/1, 2 % lost, 2 % won", zero_one(0.02, 0.02), "equivalent"),
    ("f1_reworded", "F1, 10 % reworded", f1(0.1, 0.0), "equivalent"),
    ("rouge_noise", "ROUGE, all differ by 0.05", rouge(0.05, 0.0), "equivalent"),
    ("lost_6", "0/1, 6 % lost", zero_one(0.06), "degraded"),
    ("lost_10", "0/1, 10 % lost", zero_one(0.10), "degraded"),
    ("lost_20", "0/1, 20 % lost", zero_one(0.20), "degraded"),
    ("f1_lost_15", "F1, 30 % reworded, 15 % lost", f1(0.3, 0.15), "degraded"),
    ("rouge_lost_25", "ROUGE, all differ by 0.05, 25 % lost", rouge(0.05, 0.25), "degraded"),
)


def power_at(draw: Draw, verdict: str, clusters: int, reps: int, rng: np.random.Generator) -> float:
    """Share of samples in which ``verdict`` is reached by a single test at alpha."""
    options = StatsOptions()
    hits = 0
    at_once = max(1, min(reps, 2_000_000 // clusters))
    for start in range(0, reps, at_once):
        number = min(at_once, reps - start)
        full, setting = draw(rng, (clusters, number))
        m = moments(setting - full, full, np.zeros(clusters, dtype=int), "macro")
        p = p_no_worse(m, options) if verdict == "equivalent" else p_degraded(m, options)
        hits += int((p < options.alpha).sum())
    return hits / reps


def curve(draw: Draw, verdict: str, reps: int, rng: np.random.Generator) -> list[float]:
    """Power at the sizes of ``CURVE``."""
    return [power_at(draw, verdict, n, reps, rng) for n in CURVE]


def needed(m: Moments, verdict: str) -> int | None:
    """The report's sample size for one setting alone, from moments of shape [1]."""
    options = StatsOptions()

    def settled(n: int) -> bool:
        more = m.grown(n / float(m.clusters[0])).scattered(100)
        p = p_no_worse(more, options) if verdict == "equivalent" else p_degraded(more, options)
        return float((p < options.alpha).mean()) >= POWER

    low, high = 4, 8
    while not settled(high):
        low, high = high, 2 * high
        if high > _MOST:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if settled(middle) else (middle, high)
    return high


def promise(draw: Draw, verdict: str, reps: int, pilots: int, rng: np.random.Generator) -> dict:
    """Power at the sizes that follow from the truth, and the spread of sizes that pilots of 60 examples name."""
    full, setting = draw(rng, (_LARGE, 1))
    whole = moments(setting - full, full, np.zeros(_LARGE, dtype=int), "macro")
    out: dict = {"verdict": verdict, "difference": float(whole.mean[0])}
    size = needed(whole, verdict)
    out["n_needed"] = size
    out["power"] = None if size is None else power_at(draw, verdict, size, reps, rng)
    full, setting = draw(rng, (60, pilots))
    several = moments(setting - full, full, np.zeros(60, dtype=int), "macro")
    margin = StatsOptions().margin
    sizes = []
    for i in range(pilots):
        m, mean = several.column(i), float(several.mean[i])
        able = abs(mean) < margin if verdict == "equivalent" else mean < -margin
        size = needed(m, verdict) if able else None
        sizes.append(np.inf if size is None else size)
    out["pilot_quartiles"] = [
        None if np.isinf(value) else float(value)
        for value in np.quantile(sizes, [0.25, 0.5, 0.75], method="nearest")
    ]
    return out
