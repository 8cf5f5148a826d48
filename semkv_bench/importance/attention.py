"""The attention family: how much attention a token gets, from blocks of recomputed attention weights."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING

from semkv_bench.errors import UsageError
from semkv_bench.importance.base import Metric, Needs, SourceRecorder, read_stacked
from semkv_bench.importance.hooks import AttentionCall, watch_attention
from semkv_bench.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["AttentionMetric", "attention_weights", "weight_blocks"]

# Bytes of one block of float32 weights: what a CPU's second-level caches hold, what keeps a GPU busy.
_BLOCK_BYTES = {"cpu": 2 << 20, "cuda": 256 << 20}
_LEAST_QUERIES = 16


class AttentionRecorder(SourceRecorder):
    """Adds the weights of every block to one float32 number per metric, quantized layer and token."""

    source = staticmethod(watch_attention)

    def __init__(self, prompt, metrics):
        super().__init__(prompt, metrics)
        self._firsts = [metric.first_query(prompt.tokens) for metric in metrics]
        self._received: list[dict[int, Tensor]] = [{} for _ in metrics]

    def hear(self, layer: int, call: AttentionCall) -> None:
        """One layer's attention call; its scored queries hand out their attention."""
        if call.unmodelled:
            names = ", ".join(metric.label for metric in self.metrics)
            raise UsageError(f"{names}: attention with {', '.join(call.unmodelled)} is not supported")
        prompt = self.prompt
        end = prompt.start + prompt.fresh
        begin = min(end, max(min(self._firsts), prompt.start))
        for received in self._received:
            if layer not in received:
                received[layer] = call.keys.new_zeros(prompt.tokens, dtype=torch.float32)
        for position, weights in weight_blocks(call, begin, end, prompt.start):
            for first, received in zip(self._firsts, self._received, strict=True):
                counted = weights[:, max(0, first - position) :]
                received[layer][: weights.shape[-1]] += counted.flatten(0, 1).sum(0) / len(weights)

    def scores(self) -> list[Tensor]:
        """See ``Recorder``."""
        layers = self.prompt.loaded.shape.quantized_layers
        return [read_stacked([received[layer] for layer in layers]) for received in self._received]


class AttentionMetric(Metric):
    """Attention that a token gets, summed over queries and averaged over a layer's query heads."""

    recorder = AttentionRecorder
    needs = Needs.ATTENTION

    @abstractmethod
    def first_query(self, tokens: int) -> int:
        """Position of the first query that counts, of a prompt of which ``tokens`` are scored."""


def weight_blocks(call: AttentionCall, begin: int, end: int, start: int) -> Iterator[tuple[int, Tensor]]:
    """Softmax weights of the queries at positions ``begin`` to ``end``, a few queries at a time.

    Yields the position of the first query and the float32 weights [heads, queries, keys], keys up to the
    last query of the block. ``start`` is the position of the call's first query.
    """
    budget = _BLOCK_BYTES.get(call.keys.device.type, _BLOCK_BYTES["cuda"]) // (4 * len(call.queries))
    queries = call.queries[:, begin - start : end - start] * call.scaling
    origin = begin
    while begin < end:
        count = min(_queries_in(budget, begin), end - begin)
        block = queries[:, begin - origin : begin - origin + count]
        yield begin, attention_weights(block, call.keys[:, : begin + count], call.softcap)
        begin += count


def attention_weights(
    queries: Tensor, keys: Tensor, softcap: float | None = None, deleted: Tensor | None = None
) -> Tensor:
    """Causal softmax weights float32 [heads, new, stored] of the newest tokens of a cache.

    queries [heads, new, head_dim], already scaled, neighbours share a key-value head; keys [kv_heads, stored,
    head_dim], the queries' own last. Scores are bounded to +-softcap by a hyperbolic tangent. deleted: bool [kv_heads,
    stored], keys that no query sees. Products are in the type of the arguments.
    """
    heads, new, head_dim = queries.shape
    kv_heads, stored, _ = keys.shape
    grouped = queries.reshape(kv_heads, heads // kv_heads * new, head_dim)
    scores = torch.bmm(grouped, keys.transpose(1, 2)).float().view(kv_heads, -1, new, stored)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    scores[..., stored - new :] += torch.full((new, new), -torch.inf, device=scores.device).triu_(1)
    if deleted is not None:
        scores = scores.masked_fill_(deleted[:, None, None], -torch.inf)
    return scores.flatten(0, 1).softmax(-1)


def _queries_in(budget: int, begin: int) -> int:
    """The largest count with count * (begin + count) <= budget, but not less than ``_LEAST_QUERIES``."""
    return max(_LEAST_QUERIES, (math.isqrt(begin * begin + 4 * budget) - begin) // 2)
