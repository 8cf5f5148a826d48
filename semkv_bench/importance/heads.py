"""Scores of every key-value head of a layer by itself, as methods that evict tokens make them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from semkv_bench.errors import UsageError
from semkv_bench.importance.attention import weight_blocks
from semkv_bench.importance.base import Metric, Prompt, SourceRecorder
from semkv_bench.importance.hooks import AttentionCall, watch_attention
from semkv_bench.lazy import torch
from semkv_bench.models.load import LoadedModel

if TYPE_CHECKING:
    from torch import Tensor


__all__ = [
    "HeadAttentionMetric",
    "HeadCacheMetric",
    "HeadCacheRecorder",
    "HeadMetric",
    "LastQueriesMetric",
    "check_modelled",
    "lifted",
    "shared_keys",
    "stacked",
]


class HeadMetric(Metric):
    """A score for every layer, key-value head and token. Such metrics rank prompts, not generated tokens."""

    per_head = True


class HeadCacheRecorder(SourceRecorder):
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

    def scored(self, metric: HeadCacheMetric, layer: int, keys: Tensor, values: Tensor) -> Tensor:
        """One metric's scores of one layer [kv_heads, tokens], on the CPU."""
        seed = self.prompt.draw + layer if metric.seeded else 0
        return metric.score(keys, values, seed).cpu()

    def scores(self) -> list[Tensor]:
        """See ``Recorder``: [quantized layers, kv_heads, tokens]."""
        return stacked(self.prompt.loaded, self._found)


class HeadCacheMetric(HeadMetric):
    """A score from all keys and values that a layer caches for the prompt."""

    recorder = HeadCacheRecorder

    @abstractmethod
    def score(self, keys: Tensor, values: Tensor, seed: int) -> Tensor:
        """Keys (after rotary embedding) and values float32 [kv_heads, tokens, head_dim] -> [kv_heads, tokens].

        seed: differs from layer to layer and prompt to prompt; of methods that are ``seeded``.
        """


class HeadAttentionRecorder(SourceRecorder):
    """Adds up what every token gets in every query head, from the queries that a metric counts."""

    source = staticmethod(watch_attention)

    def __init__(self, prompt, metrics):
        super().__init__(prompt, metrics)
        self._firsts = [metric.first_query(prompt.tokens) for metric in metrics]
        self._sums: list[dict[int, Tensor]] = [{} for _ in metrics]
        self._found: list[dict[int, Tensor]] = [{} for _ in metrics]

    def hear(self, layer: int, call: AttentionCall) -> None:
        """One layer's attention call."""
        check_modelled(self.metrics, call)
        prompt = self.prompt
        for metric, sums in zip(self.metrics, self._sums, strict=True):
            if layer not in sums:
                size = (metric.sums, len(call.queries), prompt.tokens)
                sums[layer] = call.keys.new_zeros(size, dtype=torch.float32)
        end = prompt.start + prompt.fresh
        begin = min(end, max(min(self._firsts), prompt.start))
        for position, weights in weight_blocks(call, begin, end, prompt.start):
            for metric, first, sums in zip(self.metrics, self._firsts, self._sums, strict=True):
                left_out = max(0, first - position)
                if left_out < weights.shape[1]:
                    counted = weights[:, left_out:]
                    added = metric.summed(counted, position + left_out, prompt.tokens)
                    sums[layer][..., : weights.shape[-1]] += added
        if prompt.seen >= prompt.tokens:
            keys = call.keys[:, : prompt.tokens]
            for metric, sums, found in zip(self.metrics, self._sums, self._found, strict=True):
                if layer not in found:
                    found[layer] = metric.score(sums.pop(layer), keys, prompt).cpu()
                    sums[layer] = torch.empty(0)

    def scores(self) -> list[Tensor]:
        """See ``Recorder``: [quantized layers, kv_heads, tokens]."""
        return stacked(self.prompt.loaded, self._found)


class HeadAttentionMetric(HeadMetric):
    """A score from the attention that a token gets in a layer's heads. sums: numbers that are added up for a token."""

    recorder = HeadAttentionRecorder
    sums: ClassVar[int] = 1

    @abstractmethod
    def first_query(self, tokens: int) -> int:
        """Position of the first query that counts, of a prompt of which ``tokens`` are scored."""

    def summed(self, weights: Tensor, position: int, tokens: int) -> Tensor:
        """What some queries add to the sums: float32 [sums, query heads, keys].

        weights: attention [query heads, queries, keys]; position: of the first query; tokens: that are scored.
        """
        return weights.sum(1)[None]

    @abstractmethod
    def score(self, sums: Tensor, keys: Tensor, prompt: Prompt) -> Tensor:
        """Sums float32 [sums, query heads, tokens] and keys [kv_heads, tokens, head_dim] -> [kv_heads, tokens]."""


class LastQueriesMetric(HeadAttentionMetric):
    """A score from the attention of the last ``window`` tokens of the prompt, which always stay."""

    window: int

    @property
    def least_tokens(self) -> int:
        """See ``Metric``."""
        return self.window + 1

    def always_kept(self, tokens: int, count: int) -> Tensor:
        """See ``Metric``."""
        return torch.arange(tokens) >= tokens - self.window

    def first_query(self, tokens: int) -> int:
        """See ``HeadAttentionMetric``."""
        return max(0, tokens - self.window)


def shared_keys(scores: Tensor, kv_heads: int) -> Tensor:
    """Mean of scores [query heads, tokens] over the heads that share keys: [kv_heads, tokens]."""
    return scores.unflatten(0, (kv_heads, -1)).mean(1)


def check_modelled(metrics: Sequence[Metric], call: AttentionCall) -> None:
    """Raise UsageError where a call's attention weights cannot be recomputed for ``metrics``."""
    if call.unmodelled:
        names = ", ".join(metric.label for metric in metrics)
        raise UsageError(f"{names}: attention with {', '.join(call.unmodelled)} is not supported")


def lifted(scores: Tensor, always: Tensor) -> Tensor:
    """``scores`` [heads, tokens] in which the tokens ``always`` [tokens] come before all others of their head."""
    rest = scores.masked_fill(always, -torch.inf).amax(-1, keepdim=True)
    top = torch.where(rest.isfinite(), rest + 1, torch.ones_like(rest))
    return torch.where(always, top, scores)


def stacked(loaded: LoadedModel, scores: Sequence[Mapping[int, Tensor]]) -> list[Tensor]:
    """Scores [quantized layers, kv_heads, tokens] of every metric, from those of its layers by their index."""
    layers = loaded.shape.quantized_layers
    results = []
    for found in scores:
        made: Sequence[Tensor] = [found[layer] for layer in layers]
        if len({each.shape for each in made}) > 1:
            raise UsageError(
                "layers differ in their number of key-value heads; evict by a score of whole layers"
            )
        results.append(torch.stack(made))
    return results
