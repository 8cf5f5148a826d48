"""Tokens that vary against the range of the stretch behind them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from semkv_bench.checks import whole
from semkv_bench.errors import UsageError
from semkv_bench.importance.heads import HeadCacheMetric, lifted
from semkv_bench.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["LagKV"]

_LAG = 128


@dataclass(frozen=True)
class LagKV(HeadCacheMetric):
    """Spread of a token's channels, scaled by the range that the next ``lag`` tokens span (arXiv 2504.04704).

    The tokens after ``sinks`` fall into stretches of ``lag``; a token's score is its rank within its own, of the
    mean of what keys and values say. Sinks, the last whole stretch and what follows it are always kept.
    ``lagkv-32`` names a lag of 32; 128 is the default. Prompts below ``sinks + 2 * lag`` tokens have no scores.
    """

    name = "lagkv"
    lag: int = _LAG
    sinks: int = 4

    def __post_init__(self) -> None:
        whole(f"{self.name}'s lag", self.lag, 1)
        whole(f"{self.name}'s sinks", self.sinks, 0)

    @property
    def label(self) -> str:
        """See ``Metric``."""
        return self.name if self.lag == _LAG else f"{self.name}-{self.lag}"

    @classmethod
    def with_option(cls, option: str) -> LagKV:
        """See ``Metric``; the option is the lag."""
        if not option.isdecimal():
            raise UsageError(f"importance metric {cls.name}-{option}: write the lag as in {cls.name}-32")
        return cls(int(option))

    @property
    def least_tokens(self) -> int:
        """See ``Metric``."""
        return self.sinks + 2 * self.lag

    def always_kept(self, tokens: int, count: int) -> Tensor:
        """See ``Metric``."""
        positions = torch.arange(tokens)
        return (positions < self.sinks) | (positions >= self._scored_end(tokens))

    def score(self, keys: Tensor, values: Tensor, seed: int) -> Tensor:
        """See ``HeadCacheMetric``."""
        tokens = keys.shape[1]
        if tokens < self.least_tokens:
            raise UsageError(f"{self.label} says nothing of {tokens} tokens; it needs {self.least_tokens}")
        whole = slice(self.sinks, self._scored_end(tokens) + self.lag)
        spreads = [_spread(x[:, whole].unflatten(1, (-1, self.lag))) for x in (keys, values)]
        ranks = (sum(spreads) / 2).argsort(-1).argsort(-1) / self.lag
        scores = torch.zeros(len(keys), tokens)
        scores[:, self.sinks : self._scored_end(tokens)] = ranks.flatten(1).cpu()
        return lifted(scores, self.always_kept(tokens, 0))

    def _scored_end(self, tokens: int) -> int:
        return self.sinks + ((tokens - self.sinks) // self.lag - 1) * self.lag


def _spread(x: Tensor) -> Tensor:
    """x [heads, stretches, lag, head_dim] -> [heads, stretches - 1, lag]."""
    low, high = x[:, 1:].amin(2, keepdim=True), x[:, 1:].amax(2, keepdim=True)
    return ((x[:, :-1] - low) / (high - low)).std(-1).softmax(-1)
