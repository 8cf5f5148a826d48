"""Attention from the end of the prompt, pooled over neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from semkv_bench.checks import whole
from semkv_bench.errors import UsageError
from semkv_bench.importance.base import Prompt
from semkv_bench.importance.heads import LastQueriesMetric, lifted, shared_keys
from semkv_bench.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["SnapKV", "WindowMetric"]

_WINDOW, _KERNEL = 64, 5


@dataclass(frozen=True)
class WindowMetric(LastQueriesMetric):
    """A score from the attention of the last ``window`` tokens, pooled over ``kernel`` neighbours; they always stay.

    pooling: ``avg`` or ``max``, in every query head; the heads that share keys are averaged. ``snapkv-32``,
    ``snapkv-32-7`` and ``snapkv-32-7-max`` name window, kernel and pooling; 64, 5 and avg are the defaults.
    """

    window: int = _WINDOW
    kernel: int = _KERNEL
    pooling: str = "avg"

    def __post_init__(self) -> None:
        whole(f"{self.name}'s window", self.window, 1)
        whole(f"{self.name}'s kernel", self.kernel, 1)
        if self.kernel % 2 == 0:
            raise UsageError(f"{self.name}'s kernel={self.kernel} must be odd")
        if self.pooling not in ("avg", "max"):
            raise UsageError(f"{self.name}'s pooling={self.pooling} must be avg or max")

    @property
    def label(self) -> str:
        """See ``Metric``."""
        options = [self.window, self.kernel, self.pooling]
        for default in ("avg", _KERNEL, _WINDOW):
            if options[-1] != default:
                break
            options.pop()
        return "-".join(map(str, [self.name, *options]))

    @classmethod
    def with_option(cls, option: str) -> WindowMetric:
        """See ``Metric``; the options are window, kernel and pooling."""
        window, _, rest = option.partition("-")
        kernel, _, pooling = rest.partition("-")
        kernel, pooling = kernel or str(_KERNEL), pooling or "avg"
        if not (window.isdecimal() and kernel.isdecimal()):
            raise UsageError(
                f"importance metric {cls.name}-{option}: write window, kernel and pooling as in {cls.name}-32-7-max"
            )
        return cls(int(window), int(kernel), pooling)

    def score(self, sums: Tensor, keys: Tensor, prompt: Prompt) -> Tensor:
        """See ``HeadAttentionMetric``."""
        tokens = sums.shape[-1]
        if tokens < self.least_tokens:
            raise UsageError(
                f"{self.label} says nothing of {tokens} tokens, which all lie in its window; use {self.name}-N"
            )
        wanted = self.of_window(sums[..., : tokens - self.window] / self.window)
        pool = torch.nn.functional.avg_pool1d if self.pooling == "avg" else torch.nn.functional.max_pool1d
        pooled = pool(wanted[None], self.kernel, stride=1, padding=self.kernel // 2)[0]
        scores = torch.nn.functional.pad(shared_keys(pooled, len(keys)), (0, self.window))
        return lifted(scores, self.always_kept(tokens, 0).to(scores.device))

    def of_window(self, means: Tensor) -> Tensor:
        """Means over the window of what is summed, [sums, query heads, tokens before it] -> [query heads, tokens]."""
        return means[0]


@dataclass(frozen=True)
class SnapKV(WindowMetric):
    """Mean attention from the window (Li et al., 2024, arXiv 2404.14469)."""

    name = "snapkv"
