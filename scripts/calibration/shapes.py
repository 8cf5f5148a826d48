"""Pairs of made-up benchmark scores: mostly zeros and ones, F1, ROUGE, ties, several seeds, several tasks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

__all__ = ["FEW_COUNT", "HARD", "SHAPES", "Shape", "truth"]

# Scores of ``full`` [N, R] and of the setting: [N, R], or [K, N, R] where an example has K seeds.
Draw = Callable[[np.random.Generator, tuple[int, int]], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Shape:
    """How paired scores look: ``draw`` gives (full, setting); ``tasks`` says how clusters split.

    ``mean`` is the true difference where tasks differ in it.
    """

    name: str
    about: str
    draw: Draw
    tasks: tuple[int, ...] = (1,)
    mean: float | None = None

    def codes(self, clusters: int) -> np.ndarray:
        """Task of each cluster; ``tasks`` are the relative sizes, every task gets at least one cluster."""
        return _codes(self.tasks, clusters)

    def sample(
        self, rng: np.random.Generator, shape: tuple[int, int]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Scores of ``full`` and of the setting, means over seeds, [N, R], and ``row_sizes`` where there are seeds."""
        full, setting = self.draw(rng, shape)
        if setting.ndim == 2:
            return full, setting, None
        away = np.abs(setting - full)
        squares = (away**2).sum(axis=0)
        sizes = np.where(squares > 0, (away**3).sum(axis=0) / np.where(squares > 0, squares, 1.0), 0.0)
        return full, setting.mean(axis=0), sizes


def _codes(tasks: tuple[int, ...], clusters: int) -> np.ndarray:
    ends = np.round(np.cumsum(tasks) / sum(tasks) * clusters).astype(int)
    return np.searchsorted(ends, np.arange(clusters), side="right")


def zero_one(loss: float, gain: float = 0.0, accuracy: float = 0.6) -> Draw:
    """Right or wrong; ``loss`` and ``gain`` are shares of all pairs."""

    def draw(rng, shape):
        full = (rng.random(shape) < accuracy).astype(float)
        u = rng.random(shape)
        lost, won = (full == 1) & (u < loss / accuracy), (full == 0) & (u * (1 - accuracy) < gain)
        return full, np.where(lost, 0.0, np.where(won, 1.0, full))

    return draw


def f1(change: float, loss: float) -> Draw:
    """F1 against short answers: many 0 and 1, some between; some answers reworded, some lost."""

    def draw(rng, shape):
        u = rng.random(shape)
        full = np.where(u < 0.25, 0.0, np.where(u < 0.6, 1.0, rng.beta(2, 2, shape)))
        v, w, up = rng.random(shape), rng.random(shape), rng.random(shape) < 0.5
        reworded = np.where(up, full + (1 - full) * w * 0.25, full * (1 - w * 0.5))
        return full, np.where(v < loss, 0.0, np.where(v < loss + change, reworded, full))

    return draw


def rouge(noise: float, loss: float) -> Draw:
    """ROUGE-L of summaries: around 0.27, every pair differs a little, some summaries are lost."""

    def draw(rng, shape):
        full = rng.beta(6, 16, shape)
        near = np.clip(full + noise * rng.standard_normal(shape), 0, 1)
        return full, np.where(rng.random(shape) < loss, 0.0, near)

    return draw


def stakes(loss: float) -> Draw:
    """A tenth of the scores are 1, of which ``loss`` are lost; the rest are about 0.1 and differ by 0.01."""

    def draw(rng, shape):
        high = rng.random(shape) < 0.1
        full = np.where(high, 1.0, 0.1 + 0.05 * rng.random(shape))
        near = full + 0.01 * rng.standard_normal(shape)
        return full, np.where(high, np.where(rng.random(shape) < loss, 0.0, full), near)

    return draw


def rare(share: float, noise: float) -> Draw:
    """A ``share`` of the scores are 1, and all of those are lost; the rest are about 0.1 and differ by ``noise``."""

    def draw(rng, shape):
        high = rng.random(shape) < share
        full = np.where(high, 1.0, 0.1 + 0.05 * rng.random(shape))
        return full, np.where(high, 0.0, full + noise * rng.standard_normal(shape))

    return draw


def in_first_task(tasks: tuple[int, ...], first: Draw, others: Draw) -> Draw:
    """``first`` in the clusters of the first task, ``others`` in the rest."""

    def draw(rng, shape):
        here = (_codes(tasks, shape[0]) == 0)[:, None]
        (full, setting), (full_else, setting_else) = first(rng, shape), others(rng, shape)
        return np.where(here, full, full_else), np.where(here, setting, setting_else)

    return draw


def ties(rate: float) -> Draw:
    """Nearly all pairs tie; four in five of the others lose part of the score, one gains part."""

    def draw(rng, shape):
        full, part = rng.beta(2, 1, shape), rng.random(shape)
        differs, down = rng.random(shape) < rate, rng.random(shape) < 0.8
        return full, np.where(differs, np.where(down, full * (1 - part), full + (1 - full) * part), full)

    return draw


def longest(share: float, loss: float) -> Draw:
    """F1: only the longest ``share`` of the prompts changes, half of them a little, ``loss`` of them to nothing."""

    def draw(rng, shape):
        full, _ = f1(0.0, 0.0)(rng, shape)
        long, u, part = rng.random(shape) < share, rng.random(shape), rng.random(shape)
        changed = np.where(u < loss, 0.0, np.where(u < loss + 0.5, full * (1 - 0.5 * part), full))
        return full, np.where(long, changed, full)

    return draw


def halves(down: float, up: float) -> Draw:
    """Scores 0, 0.5 and 1, of which ``down`` fall by one step and ``up`` rise by one."""

    def draw(rng, shape):
        full, u = rng.choice([0.0, 0.5, 1.0], shape, p=[0.2, 0.3, 0.5]), rng.random(shape)
        return full, np.clip(full - 0.5 * (u < down) + 0.5 * (u > 1 - up), 0, 1)

    return draw


def similarity(noise: float, drop: float) -> Draw:
    """Edit similarity: noise on every pair, and all of them ``drop`` lower."""

    def draw(rng, shape):
        full = rng.beta(5, 3, shape)
        return full, np.clip(full - drop + noise * rng.standard_normal(shape), 0, 1)

    return draw


def steady(drop: float, gain: float) -> Draw:
    """All scores ``drop`` lower, but ``gain`` of them jump to 1."""

    def draw(rng, shape):
        full = 0.2 + 0.5 * rng.random(shape)
        return full, np.where(rng.random(shape) < gain, 1.0, full - drop)

    return draw


def seeds(loss: float) -> Draw:
    """Three seeds an example: whether the example is at risk is shared, whether it is lost is not."""

    def draw(rng, shape):
        full = (rng.random(shape) < 0.6).astype(float)
        at_risk = rng.random(shape) < 2 * loss / 0.6
        lost = rng.random((3, *shape)) < 0.5
        return full, full * (1 - at_risk * lost)

    return draw


def seeds_f1(loss: float) -> Draw:
    """Three seeds an example, F1: each seed's answer is reworded or lost on its own."""

    def draw(rng, shape):
        one = f1(0.3, loss)
        full, _ = one(rng, shape)
        v = rng.random((3, *shape))
        w, up = rng.random((3, *shape)), rng.random((3, *shape)) < 0.5
        reworded = np.where(up, full + (1 - full) * w * 0.25, full * (1 - w * 0.5))
        return full, np.where(v < loss, 0.0, np.where(v < loss + 0.3, reworded, full))

    return draw


def seeds_f1_shared(loss: float) -> Draw:
    """Three seeds an example, F1: an example is lost by all seeds or by none, rewording is each seed's own."""

    def draw(rng, shape):
        full, reworded = seeds_f1(0.0)(rng, shape)
        return full, np.where(rng.random(shape) < loss, 0.0, reworded)

    return draw


def seeds_f1_mixed(alone: float, together: float) -> Draw:
    """Three seeds an example, F1: a seed's answer is reworded or lost on its own, or the example by all seeds."""

    def draw(rng, shape):
        full, scores = seeds_f1(alone)(rng, shape)
        return full, np.where(rng.random(shape) < together, 0.0, scores)

    return draw


SHAPES = (
    Shape("zero_one_2", "0/1, 2 % of pairs lose the whole score", zero_one(0.02)),
    Shape("zero_one_3", "0/1, 3 % of pairs lose the whole score", zero_one(0.03)),
    Shape("zero_one_5", "0/1, 5 % of pairs lose the whole score", zero_one(0.05)),
    Shape("zero_one_10", "0/1, 10 % of pairs lose the whole score", zero_one(0.10)),
    Shape("zero_one_both", "0/1, 10 % lose, 5 % gain", zero_one(0.10, 0.05)),
    Shape("zero_one_many", "0/1, 30 % lose, 5 % gain", zero_one(0.30, 0.05)),
    Shape("f1_reworded", "F1, 30 % reworded, none lost", f1(0.3, 0.0)),
    Shape("f1_lost_5", "F1, 30 % reworded, 5 % lost", f1(0.3, 0.05)),
    Shape("f1_lost_10", "F1, 30 % reworded, 10 % lost", f1(0.3, 0.10)),
    Shape("rouge_noise", "ROUGE, all differ by 0.05, none lost", rouge(0.05, 0.0)),
    Shape("rouge_lost_5", "ROUGE, all differ by 0.05, 5 % lost", rouge(0.05, 0.05)),
    Shape("rouge_lost_10", "ROUGE, all differ by 0.10, 10 % lost", rouge(0.10, 0.10)),
    Shape("ties_2", "2 % of pairs differ in part of the score", ties(0.02)),
    Shape("ties_5", "5 % of pairs differ in part of the score", ties(0.05)),
    Shape("seeds_5", "three seeds an example, 5 % lost, shared risk", seeds(0.05)),
    Shape("seeds_f1_5", "three seeds an example, F1, 5 % lost by each seed alone", seeds_f1(0.05)),
    Shape("macro_3", "3 tasks, 0/1, 10 % lose", zero_one(0.10), (1,) * 3),
    Shape("macro_10", "10 tasks, F1, 5 % lost", f1(0.3, 0.05), (1,) * 10),
    Shape("macro_21", "21 tasks, 0/1, 5 % lose", zero_one(0.05), (1,) * 21),
    Shape("macro_21_f1", "21 tasks, F1, 5 % lost", f1(0.3, 0.05), (1,) * 21),
    Shape(
        "macro_unequal", "6 tasks of sizes 1:1:2:2:4:4, 0/1, 10 % lose", zero_one(0.10), (1, 1, 2, 2, 4, 4)
    ),
    Shape("seeds_f1_shared", "three seeds an example, F1, 5 % lost by all seeds", seeds_f1_shared(0.05)),
    Shape("seeds_f1_shared_2", "three seeds an example, F1, 2 % lost by all seeds", seeds_f1_shared(0.02)),
    Shape(
        "seeds_f1_mixed",
        "three seeds an example, F1, 5 % lost by each alone, 5 % by all",
        seeds_f1_mixed(0.05, 0.05),
    ),
    Shape(
        "seeds_f1_mixed_10",
        "three seeds an example, F1, 10 % lost by each alone, 10 % by all",
        seeds_f1_mixed(0.1, 0.1),
    ),
)

# However many pairs differ, few of them make up the difference, or keep their score where nearly all is lost.
FEW_COUNT = (
    Shape(
        "stakes",
        "a tenth of the scores are 1, 30 % of those lost, the rest 0.1 and differ by 0.01",
        stakes(0.3),
    ),
    Shape(
        "macro_small_12",
        "4 tasks of sizes 1:5:5:5, 0/1, 12 % lost in the small one only",
        in_first_task((1, 5, 5, 5), zero_one(0.12, accuracy=1.0), zero_one(0.0)),
        (1, 5, 5, 5),
        mean=-0.03,
    ),
    Shape(
        "macro_small_40",
        "4 tasks of sizes 1:2:2:2, 0/1, 40 % lost in the small one only",
        in_first_task((1, 2, 2, 2), zero_one(0.4, accuracy=1.0), zero_one(0.0)),
        (1, 2, 2, 2),
        mean=-0.1,
    ),
    Shape(
        "macro_kinds",
        "4 tasks, one 0/1 with 12 % lost, the others ROUGE and all differ by 0.02",
        in_first_task((1,) * 4, zero_one(0.12, accuracy=0.8), rouge(0.02, 0.0)),
        (1,) * 4,
        mean=-0.03,
    ),
    Shape("zero_one_80", "0/1, all right at first, 80 % lost", zero_one(0.80, accuracy=1.0)),
    Shape("zero_one_95", "0/1, all right at first, 95 % lost", zero_one(0.95, accuracy=1.0)),
)


# Where few prompts change, scores are coarse, all pairs are noisy, or flips go both ways.
HARD = (
    Shape("f1_longest", "F1, only the longest tenth changes, a third of it lost", longest(0.1, 0.33)),
    Shape("halves", "scores 0, 0.5, 1, 10 % a step lower, 3 % a step higher", halves(0.10, 0.03)),
    Shape("similarity", "edit similarity, noise of 0.1 on every pair, 0.03 lower", similarity(0.1, 0.03)),
    Shape("flips", "0/1, 15 % lose, 12 % gain", zero_one(0.15, 0.12)),
    Shape("steady_gains", "all 0.04 lower, 1 % jump to 1", steady(0.04, 0.01), mean=-0.04 + 0.01 * 0.59),
    Shape(
        "rare_3",
        "3 % of the scores are 1 and lost, the rest 0.1 and differ by 0.01",
        rare(0.03, 0.01),
        mean=-0.03,
    ),
    Shape(
        "macro_rare",
        "3 tasks of sizes 1:4:4, in the small one 9 % of the scores are 1 and lost, all others differ by 0.01",
        in_first_task((1, 4, 4), rare(0.09, 0.01), rouge(0.01, 0.0)),
        (1, 4, 4),
        mean=-0.03,
    ),
    Shape(
        "macro_small_f1",
        "4 tasks of sizes 1:5:5:5, F1, 30 % lost in the small one only, the others ROUGE and differ by 0.02",
        in_first_task((1, 5, 5, 5), f1(0.3, 0.3), rouge(0.02, 0.0)),
        (1, 5, 5, 5),
        mean=-(0.3 * 0.55 + 0.3 * 0.5 * (0.55 / 4 - 0.45 / 8)) / 4,
    ),
)


@cache
def truth(shape: Shape) -> float:
    """Mean difference, known or from four million pairs."""
    if shape.mean is not None:
        return shape.mean
    full, setting, _ = shape.sample(np.random.default_rng(12345), (4_000_000, 1))
    return float((setting - full).mean())
