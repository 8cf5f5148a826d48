"""How attention from the end of the prompt spreads over tokens, and shifts from query to query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from semkv_bench.checks import whole
from semkv_bench.errors import UsageError
from semkv_bench.importance.base import Prompt
from semkv_bench.importance.heads import LastQueriesMetric, shared_keys
from semkv_bench.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["WindowEntropy", "WindowVariance", "variance"]

_WINDOW = 32
_TINY = 1e-10


@dataclass(frozen=True)
class ShiftMetric(LastQueriesMetric):
    """A score from the last ``window`` queries, which always stay. Summed over tokens it tells layers apart."""

    window: int = _WINDOW

    def __post_init__(self) -> None:
        whole(f"{self.name}'s window", self.window, 1)

    @property
    def label(self) -> str:
        """See ``Metric``."""
        return self.name if self.window == _WINDOW else f"{self.name}-{self.window}"

    @classmethod
    def with_option(cls, option: str) -> ShiftMetric:
        """See ``Metric``; the option is the window."""
        if not option.isdecimal():
            raise UsageError(f"importance metric {cls.name}-{option}: write the window as in {cls.name}-16")
        return cls(int(option))


@dataclass(frozen=True)
class WindowEntropy(ShiftMetric):
    """A token's part in the entropy of the window's attention, ``-a log a`` summed over queries."""

    name = "window_entropy"

    def summed(self, weights: Tensor, position: int, tokens: int) -> Tensor:
        """See ``HeadAttentionMetric``."""
        return -(weights * (weights + _TINY).log()).sum(1)[None]

    def score(self, sums: Tensor, keys: Tensor, prompt: Prompt) -> Tensor:
        """See ``HeadAttentionMetric``."""
        return shared_keys(sums[0], len(keys))


@dataclass(frozen=True)
class WindowVariance(ShiftMetric):
    """Variance of a token's attention over the window's queries."""

    name = "window_variance"
    sums = 2

    def summed(self, weights: Tensor, position: int, tokens: int) -> Tensor:
        """See ``HeadAttentionMetric``."""
        return torch.stack([weights.sum(1), weights.square().sum(1)])

    def score(self, sums: Tensor, keys: Tensor, prompt: Prompt) -> Tensor:
        """See ``HeadAttentionMetric``."""
        return shared_keys(variance(sums / self.window, self.window), len(keys))


def variance(means: Tensor, window: int) -> Tensor:
    """Unbiased variance over ``window`` queries from the means of weights and of their squares, [2, ...]."""
    return (means[1] - means[0].square()).clamp_min(0) * (window / max(1, window - 1))
