"""The hidden-state family: scores from what enters and leaves each decoder layer."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from semkv_bench.importance.base import Metric, Needs, SourceRecorder, read_stacked
from semkv_bench.importance.hooks import watch_layers
from semkv_bench.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["HiddenMetric"]


class HiddenRecorder(SourceRecorder):
    """Keeps one float32 number per metric, layer and token."""

    source = staticmethod(watch_layers)

    def __init__(self, prompt, metrics):
        super().__init__(prompt, metrics)
        layers = prompt.loaded.shape.layers
        self._found: list[list[list[Tensor]]] = [[[] for _ in range(layers)] for _ in metrics]

    def hear(self, layer: int, before: Tensor, after: Tensor) -> None:
        """Hidden states [new, hidden] around one layer."""
        fresh = self.prompt.fresh
        for metric, found in zip(self.metrics, self._found, strict=True):
            found[layer].append(metric.score(before[:fresh], after[:fresh]))

    def scores(self) -> list[Tensor]:
        """See ``Recorder``."""
        quantized = list(self.prompt.loaded.shape.quantized_layers)
        results = []
        for metric, found in zip(self.metrics, self._found, strict=True):
            every = read_stacked([torch.cat(parts) for parts in found])
            results.append(every.mean(0, keepdim=True) if metric.averaged else every[quantized])
        return results


class HiddenMetric(Metric):
    """A score from the hidden state (residual stream) of a token around one layer.

    averaged: the scores of all layers are averaged to [1, tokens]; otherwise every quantized layer has its own.
    """

    recorder = HiddenRecorder
    needs = Needs.HIDDEN
    averaged: ClassVar[bool] = False

    @abstractmethod
    def score(self, before: Tensor, after: Tensor) -> Tensor:
        """Hidden states [tokens, hidden] that enter and leave a layer -> float32 [tokens]."""
