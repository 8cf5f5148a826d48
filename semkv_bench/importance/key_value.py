"""The key/value family: scores from a token's own entries in the cache."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from semkv_bench.importance.base import Metric, Needs, SourceRecorder, read_stacked
from semkv_bench.importance.hooks import AttentionCall, watch_attention
from semkv_bench.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["CacheMetric"]


class CacheRecorder(SourceRecorder):
    """Keeps one float32 number per metric, quantized layer and token."""

    source = staticmethod(watch_attention)

    def __init__(self, prompt, metrics):
        super().__init__(prompt, metrics)
        layers = prompt.loaded.shape.quantized_layers
        self._found: list[dict[int, list[Tensor]]] = [{layer: [] for layer in layers} for _ in metrics]

    def hear(self, layer: int, call: AttentionCall) -> None:
        """One layer's attention call; its newest keys and values are scored."""
        new = slice(self.prompt.start, self.prompt.start + self.prompt.fresh)
        for metric, found in zip(self.metrics, self._found, strict=True):
            found[layer].append(metric.score(call.keys[:, new], call.values[:, new]))

    def scores(self) -> list[Tensor]:
        """See ``Recorder``."""
        return [read_stacked([torch.cat(parts) for parts in found.values()]) for found in self._found]


class CacheMetric(Metric):
    """A score from the key and value vectors that one layer caches for a token."""

    recorder = CacheRecorder
    needs = Needs.CACHE

    @abstractmethod
    def score(self, keys: Tensor, values: Tensor) -> Tensor:
        """Keys (after rotary embedding) and values [kv_heads, tokens, head_dim] -> float32 [tokens]."""
