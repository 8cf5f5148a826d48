"""Attention sinks and the newest tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from semkv_bench.checks import whole
from semkv_bench.errors import UsageError
from semkv_bench.importance.heads import HeadCacheMetric, lifted
from semkv_bench.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["Streaming"]


@dataclass(frozen=True)
class Streaming(HeadCacheMetric):
    """The first ``sinks`` tokens, then the newest (StreamingLLM; Xiao et al., 2023, arXiv 2309.17453).

    Tokens keep their positions, which the paper numbers anew. ``streaming-8`` names eight sinks; 4 is the default.
    """

    name = "streaming"
    sinks: int = 4

    def __post_init__(self) -> None:
        whole(f"{self.name}'s sinks", self.sinks, 0)

    @property
    def label(self) -> str:
        """See ``Metric``."""
        return self.name if self.sinks == 4 else f"{self.name}-{self.sinks}"

    @classmethod
    def with_option(cls, option: str) -> Streaming:
        """See ``Metric``; the option is the number of sinks."""
        if not option.isdecimal():
            raise UsageError(f"importance metric {cls.name}-{option}: write the sinks as in {cls.name}-8")
        return cls(int(option))

    def always_kept(self, tokens: int, count: int) -> Tensor:
        """See ``Metric``."""
        return torch.arange(tokens) < self.sinks

    def score(self, keys: Tensor, values: Tensor, seed: int) -> Tensor:
        """See ``HeadCacheMetric``."""
        positions = torch.arange(keys.shape[1], dtype=torch.float32).expand(len(keys), -1)
        return lifted(positions, self.always_kept(keys.shape[1], 0))
