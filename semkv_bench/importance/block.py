"""Scores of tokens that a cache holds: of a block of generated tokens, of a whole cache without its model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from semkv_bench.importance.base import Metric, Needs, read_stacked
from semkv_bench.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["cache_scores"]


def cache_scores(
    metric: Metric,
    layers: Iterable[int],
    stored: Callable[[int], tuple[Tensor, Tensor]],
    ids: Sequence[int],
    tokens: int,
    seed: int,
) -> Tensor:
    """Scores of ``tokens`` tokens by a metric that a cache alone can answer: [layers, tokens] or [1, tokens].

    stored: keys and values [heads, tokens, head_dim] of a layer; ids: what a score by token ids hangs on, the
    tokens' own last. Sweeps and the packed cache rank by this one function.

    Raises:
        ValueError: the metric needs more than a cache.
    """
    if metric.needs is Needs.CACHE:
        return read_stacked([metric.score(*stored(layer)) for layer in layers])
    if metric.needs is Needs.IDS:
        return metric.score(torch.tensor(list(ids)), seed)[None, -tokens:]
    raise ValueError(f"{metric.label} needs {metric.needs}, which a cache does not have")
