"""Tokens that hold the largest entries of the hidden states: RotateKV's pivots, mostly attention sinks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from semkv_bench.errors import UsageError
from semkv_bench.importance.base import Needs
from semkv_bench.importance.hidden import HiddenMetric, HiddenRecorder
from semkv_bench.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["HiddenMax"]


class _Recorder(HiddenRecorder):
    def scores(self) -> list[Tensor]:
        """See ``Recorder``: each token's largest entry where it is among the prompt's largest, else 0."""
        found = []
        for metric, largest in zip(self.metrics, super().scores(), strict=True):
            count = min(metric.entries, largest[0].numel())
            least = largest.flatten(1).topk(count, dim=1).values[:, -1:]
            first = largest[..., 0]
            found.append(torch.where(first >= least, first, 0))
        return found


@dataclass(frozen=True)
class HiddenMax(HiddenMetric):
    """Largest magnitude in the hidden state that enters the layer, of tokens that hold one of its ``entries`` largest.

    All other tokens score 0: where one token holds several of these entries, fewer tokens than entries are left.
    """

    name = "hidden_max"
    recorder = _Recorder
    # What is largest of all tokens is not known of some of them.
    needs = Needs.RECORDER
    entries: int = 20

    @property
    def label(self) -> str:
        """``hidden_max`` or ``hidden_max-8``."""
        return self.name if self.entries == 20 else f"{self.name}-{self.entries}"

    @classmethod
    def with_option(cls, option: str) -> HiddenMax:
        """With the number of entries that follows the dash."""
        if not option.isdigit() or not int(option):
            raise UsageError(
                f"importance metric {cls.name}-{option}: entries must be a whole number of at least 1"
            )
        return cls(int(option))

    def score(self, before: Tensor, after: Tensor) -> Tensor:
        """See ``HiddenMetric``; the largest entries of each token, [tokens, entries], in descending order."""
        count = min(self.entries, before.shape[-1])
        return before.float().abs().topk(count, dim=-1).values
