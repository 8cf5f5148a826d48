"""Attention from the end of the prompt, and how much it shifts there."""

from dataclasses import dataclass

from torch import Tensor

from semkv_bench.importance.snapkv import WindowMetric

__all__ = ["Cake"]

_GAMMA = 200


@dataclass(frozen=True)
class Cake(WindowMetric):
    """Mean attention from the window plus 200 times its variance over the window's queries (arXiv 2503.12491).

    The score of CAKE alone; its own budgets by layer, from entropy and variance of a layer's attention, are not.
    """

    name = "cake"

    def of_window(self, mean: Tensor, mean_square: Tensor) -> Tensor:
        """See ``WindowMetric``."""
        return mean + _GAMMA * (mean_square - mean.square()).clamp_min(0)
