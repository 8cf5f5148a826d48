"""What is decided before the first score is read: margin, error rate, average, resamples."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from semkv_bench.checks import choice, is_number, is_whole, number, whole
from semkv_bench.errors import UsageError

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["StatsOptions", "stats_options"]

MOST_RESAMPLES = 100_000  # of some hundred settings, they fit into memory


@dataclass(frozen=True)
class StatsOptions:
    """Choices of the statistics, fixed beforehand.

    ``margin`` is the largest drop of the average score (scores in 0..1) that still counts as equivalent.
    ``alpha`` is the error rate of every test. ``average`` is "macro" (mean of task means) or "micro" (all
    examples alike). ``confidence`` is the level of ``diff_ci``, ``score_ci`` and ``bootstrap_ci``; the two
    one-sided tests correspond to the interval of level ``1 - 2 * alpha``, shown as ``equivalence_ci``.
    ``unpaired`` says what happens to rows that ``full`` or a setting lacks: "error", or "drop":
    then a verdict stands only if it also stands with every missing row counted as a total loss. ``sensitivity`` is
    "task" (the margin applies to the average over the tasks that can react) or "run" (over all tasks).
    ``at_bits`` are the bits at which methods are compared with each other.
    ``looks`` are sample sizes, in planned examples, at which a sweep looks at its records and
    stops when everything that matters is decided; None looks once, at the end. ``race`` runs no further examples under
    a setting that such a look shows ``degraded``; without ``looks``, at a third and two thirds of the plan, and the
    others go on to its end.

    Raises UsageError for a value that makes no sense.
    """

    margin: float = 0.03
    alpha: float = 0.05
    average: str = "macro"
    resamples: int = 10_000
    seed: int = 0
    confidence: float = 0.95
    unpaired: str = "error"
    sensitivity: str = "task"
    looks: tuple[int, ...] | None = None
    race: bool = False
    at_bits: tuple[float, ...] = (2.5, 3.0, 3.5, 4.5)

    def __post_init__(self) -> None:
        number("stats.margin", self.margin, 0, 1, ends=False)
        number("stats.alpha", self.alpha, 0, 0.5, ends=False)
        number("stats.confidence", self.confidence, 0.5, 1, ends=False)
        whole("stats.resamples", self.resamples, 100, MOST_RESAMPLES)
        whole("stats.seed", self.seed, 0)
        choice("stats.average", self.average, ("macro", "micro"))
        choice("stats.unpaired", self.unpaired, ("error", "drop"))
        choice("stats.sensitivity", self.sensitivity, ("task", "run"))
        if not isinstance(self.race, bool):
            raise UsageError(f"stats.race={self.race} must be true or false")
        object.__setattr__(self, "looks", _sizes(self.looks))
        object.__setattr__(self, "at_bits", _bits(self.at_bits))


def stats_options(config: DictConfig) -> StatsOptions:
    """Statistics fixed by the configuration."""
    from omegaconf import OmegaConf

    return StatsOptions(**OmegaConf.to_container(config.stats))


def _sizes(looks: object) -> tuple[int, ...] | None:
    if looks is None:
        return None
    whole = isinstance(looks, (list, tuple)) and all(is_whole(size) and size > 0 for size in looks)
    if not whole or not looks or any(a >= b for a, b in pairwise(looks)):
        raise UsageError(
            f"stats.looks must be a list of growing numbers of examples, for example [40,80,120], got {looks!r}"
        )
    return tuple(looks)


def _bits(at_bits: object) -> tuple[float, ...]:
    numbers = isinstance(at_bits, (list, tuple)) and all(
        is_number(bits) and 0 < bits <= 16 for bits in at_bits
    )
    if not numbers or not at_bits or len(set(at_bits)) < len(at_bits):
        raise UsageError(
            f"stats.at_bits must be a list of different numbers of bits, above 0 and at most 16, got {at_bits!r}"
        )
    return tuple(sorted(float(bits) for bits in at_bits))
