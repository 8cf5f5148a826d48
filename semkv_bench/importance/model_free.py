"""The controls: scores that know the prompt's tokens and nothing of the model."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from semkv_bench.importance.base import Metric, Needs, Recorder

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["ControlMetric"]


class ControlRecorder(Recorder):
    """Needs no more than the prompt's token ids."""

    def scores(self) -> list[Tensor]:
        """See ``Recorder``."""
        ids = self.prompt.ids.cpu()
        return [metric.score(ids, self.prompt.seed)[None] for metric in self.metrics]


class ControlMetric(Metric):
    """A score from token ids and seed alone, the same in all layers: [1, tokens]."""

    recorder = ControlRecorder
    needs = Needs.IDS

    @abstractmethod
    def score(self, ids: Tensor, seed: int) -> Tensor:
        """Token ids int64 [tokens] -> float32 [tokens]."""
