"""Scores of every key-value head of a layer by itself, as methods that evict tokens make them."""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from semkv_bench.errors import UsageError
from semkv_bench.importance.attention import weight_blocks
from semkv_bench.importance.base import Metric, Recorder
from semkv_bench.importance.sources import AttentionCall, watch_attention

__all__ = ["HeadAttentionMetric", "HeadCacheMetric", "HeadMetric", "lifted"]


class HeadMetric(Metric):
    """A score for every layer, key-value head and token. Such metrics rank prompts, not generated tokens."""

    per_head = True


class HeadCacheRecorder(Recorder):
    """Scores each layer once, when all scored tokens are in its cache."""

    source = staticmethod(watch_attention)

    def __init__(self, prompt, metrics):
        super().__init__(prompt, metrics)
        self._found: list[dict[int, Tensor]] = [{} for _ in metrics]

    def hear(self, layer: int, call: AttentionCall) -> None:
        """One layer's attention call."""
        tokens = self.prompt.tokens
        if self.prompt.seen < tokens:
            return
        keys, values = (states[:, :tokens].float() for states in (call.keys, call.values))
        for metric, found in zip(self.metrics, self._found, strict=True):
            if layer not in found:
                found[layer] = self.scored(metric, layer, keys, values)

    def scored(self, metric: "HeadCacheMetric", layer: int, keys: Tensor, values: Tensor) -> Tensor:
        """One metric's scores of one layer [kv_heads, tokens], on the CPU."""
        seed = self.prompt.draw + layer if metric.seeded else 0
        return metric.score(keys, values, seed).cpu()

    def scores(self) -> list[Tensor]:
        """See ``Recorder``: [quantized layers, kv_heads, tokens]."""
        return _stacked(self)


class HeadCacheMetric(HeadMetric):
    """A score from all keys and values that a layer caches for the prompt."""

    recorder = HeadCacheRecorder

    @abstractmethod
    def score(self, keys: Tensor, values: Tensor, seed: int) -> Tensor:
        """Keys (after rotary embedding) and values float32 [kv_heads, tokens, head_dim] -> [kv_heads, tokens].

        seed: differs from layer to layer and prompt to prompt; of methods that are ``seeded``.
        """


class HeadAttentionRecorder(Recorder):
    """Adds up the attention that every token gets in every query head, from the queries that a metric counts."""

    source = staticmethod(watch_attention)

    def __init__(self, prompt, metrics):
        super().__init__(prompt, metrics)
        self._firsts = [metric.first_query(prompt.tokens) for metric in metrics]
        self._sums: list[dict[int, Tensor]] = [{} for _ in metrics]
        self._found: list[dict[int, Tensor]] = [{} for _ in metrics]

    def hear(self, layer: int, call: AttentionCall) -> None:
        """One layer's attention call."""
        if call.unmodelled:
            names = ", ".join(metric.label for metric in self.metrics)
            raise UsageError(f"{names}: attention with {', '.join(call.unmodelled)} is not supported")
        prompt = self.prompt
        heads, kv_heads = call.queries.shape[0], call.keys.shape[0]
        for sums in self._sums:
            if layer not in sums:
                # Weights and their squares.
                sums[layer] = call.keys.new_zeros(2, heads, prompt.tokens, dtype=torch.float32)
        end = prompt.start + prompt.fresh
        begin = min(end, max(min(self._firsts), prompt.start))
        for position, weights in weight_blocks(call, begin, end, prompt.start):
            for first, sums in zip(self._firsts, self._sums, strict=True):
                counted = weights[:, max(0, first - position) :]
                sums[layer][0, :, : weights.shape[-1]] += counted.sum(1)
                sums[layer][1, :, : weights.shape[-1]] += counted.square().sum(1)
        if prompt.seen >= prompt.tokens:
            for metric, sums, found in zip(self.metrics, self._sums, self._found, strict=True):
                if layer not in found:
                    found[layer] = metric.score(*sums.pop(layer), kv_heads).cpu()
                    sums[layer] = torch.empty(0)

    def scores(self) -> list[Tensor]:
        """See ``Recorder``: [quantized layers, kv_heads, tokens]."""
        return _stacked(self)


class HeadAttentionMetric(HeadMetric):
    """A score from the attention that a token gets in a layer's heads."""

    recorder = HeadAttentionRecorder

    @abstractmethod
    def first_query(self, tokens: int) -> int:
        """Position of the first query that counts, of a prompt of which ``tokens`` are scored."""

    @abstractmethod
    def score(self, sums: Tensor, squares: Tensor, kv_heads: int) -> Tensor:
        """Sums over the counted queries of attention weights, and of their squares -> [kv_heads, tokens].

        Both float32 [query heads, tokens].
        """


def lifted(scores: Tensor, always: Tensor) -> Tensor:
    """``scores`` [heads, tokens] in which the tokens ``always`` [tokens] come before all others of their head."""
    rest = scores.masked_fill(always, -torch.inf).amax(-1, keepdim=True)
    top = torch.where(rest.isfinite(), rest + 1, torch.ones_like(rest))
    return torch.where(always, top, scores)


def _stacked(recorder: Recorder) -> list[Tensor]:
    layers = recorder.prompt.loaded.shape.quantized_layers
    results = []
    for found in recorder._found:
        made: Sequence[Tensor] = [found[layer] for layer in layers]
        if len({each.shape for each in made}) > 1:
            raise UsageError(
                "layers differ in their number of key-value heads; evict by a score of whole layers"
            )
        results.append(torch.stack(made))
    return results
