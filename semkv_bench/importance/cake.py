"""Attention from the end of the prompt, and how much it shifts there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from semkv_bench.importance.snapkv import WindowMetric
from semkv_bench.importance.window_shift import variance
from semkv_bench.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["Cake"]

_GAMMA = 200


@dataclass(frozen=True)
class Cake(WindowMetric):
    """Mean attention from the window plus 200 times its variance over the window's queries (arXiv 2503.12491).

    The paper's counts by layer are the budget ``cake``.
    """

    name = "cake"
    sums = 2

    def summed(self, weights: Tensor, position: int, tokens: int) -> Tensor:
        """See ``HeadAttentionMetric``."""
        return torch.stack([weights.sum(1), weights.square().sum(1)])

    def of_window(self, means: Tensor) -> Tensor:
        """See ``WindowMetric``."""
        return means[0] + _GAMMA * variance(means, self.window)
