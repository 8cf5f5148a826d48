"""Reading less: the whole cache is stored, and each step attends to the blocks that a summary picks."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from semkv_bench.checks import choice, number, whole
from semkv_bench.errors import UsageError
from semkv_bench.grid.levels import check_levels
from semkv_bench.lazy import torch
from semkv_bench.quantizers.base import Quantizer, pair_label
from semkv_bench.settings.allocation import Uniform
from semkv_bench.settings.sets import check_tokenwise, listed
from semkv_bench.settings.setting import Coded, Setting

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["SUMMARIES", "BlockReads", "ReadAll", "Reading"]

SUMMARIES = {"minmax": 2, "mean": 1}
"""Vectors that stand for a block's keys, by kind: channel by channel their ends, or their mean."""

KIND = "read"


@dataclass(frozen=True)
class Reading:
    """Which blocks of ``block`` prompt tokens a step reads: the ``keep`` best of a key-value head, by a summary.

    by: ``minmax``, the highest product that a key within the block's ends could have with the query (Quest,
    arXiv 2406.10774); ``mean``, the product with the mean key. Heads that share keys read what is best as their mean.
    Tokens after the prompt are always read.
    """

    vectors: ClassVar[dict[str, int]] = SUMMARIES
    keep: float
    block: int = 32
    by: str = "minmax"

    def __post_init__(self) -> None:
        number("read.keep", self.keep, 0, 1)
        if not self.keep:
            raise UsageError("read.keep=0 reads nothing; read a share above 0")
        whole("read.block", self.block, 1)
        choice("read.by", self.by, tuple(SUMMARIES))

    @property
    def label(self) -> str:
        """``0.25:minmax:32`` behind ``read@``."""
        return f"{self.keep:g}:{self.by}:{self.block}"

    def blocks(self, tokens: int) -> int:
        """Blocks that ``tokens`` tokens fill; the last may be incomplete."""
        return math.ceil(tokens / self.block)

    def kept(self, tokens: int) -> int:
        """Blocks that a step reads of ``tokens`` tokens: one at least."""
        return max(1, round(self.keep * self.blocks(tokens)))

    def check(self, tokens: int) -> None:
        """Raise UsageError if nothing of ``tokens`` tokens would be left unread."""
        if self.kept(tokens) >= self.blocks(tokens):
            raise UsageError(
                f"read@{self.label} reads all {self.blocks(tokens)} blocks of a prompt of {tokens} tokens: lower "
                "read.block or read.keep, or give longer prompts"
            )

    def summary(self, keys: Tensor) -> Tensor:
        """Keys [kv_heads, tokens, head_dim] -> float32 [vectors, kv_heads, blocks, head_dim]."""
        tokens, blocks = keys.shape[1], self.blocks(keys.shape[1])
        room = (0, 0, 0, blocks * self.block - tokens)
        parts = torch.nn.functional.pad(keys.float(), room, value=math.nan).unflatten(1, (blocks, -1))
        if self.by == "mean":
            return parts.nanmean(2)[None]
        empty = parts.isnan()
        low, high = parts.masked_fill(empty, math.inf).amin(2), parts.masked_fill(empty, -math.inf).amax(2)
        return torch.stack([low, high])

    def chosen(self, queries: Tensor, summary: Tensor, tokens: int) -> Tensor:
        """Blocks that queries [heads, new, head_dim] read of a prompt of ``tokens``, bool [kv_heads, new, blocks]."""
        grouped = queries.float().unflatten(0, (summary.shape[1], -1))
        if self.by == "mean":
            scores = grouped @ summary[0].transpose(1, 2).unsqueeze(1)
        else:
            low, high = (ends.transpose(1, 2).unsqueeze(1) for ends in summary)
            scores = grouped.clamp_min(0) @ high + grouped.clamp_max(0) @ low
        scores = scores.mean(1)
        best = scores.sort(dim=-1, descending=True, stable=True).indices[..., : self.kept(tokens)]
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)


@dataclass(frozen=True)
class ReadAll:
    """Every step reads the whole cache: no settings are added."""

    def settings(self, keys: Quantizer, values: Quantizer) -> list[Setting]:
        """None."""
        return []


@dataclass(frozen=True)
class BlockReads:
    """Every combination of ``block``, ``keep``, ``by`` and ``levels``; each may be a list.

    levels: the cache is quantized too, at one setting per entry; null: it is in 16 bits.
    """

    block: Any = 32
    keep: Any = 0.25
    by: Any = "minmax"
    levels: Any = None

    def settings(self, keys: Quantizer, values: Quantizer) -> list[Setting]:
        """One setting per combination."""
        made = []
        options = (self.levels, self.by, self.block, self.keep)
        for levels, by, block, keep in itertools.product(*(listed(each, "read") for each in options)):
            reading = Reading(keep, block, by)
            name = f"read@{reading.label}"
            if levels is None:
                made.append(Setting(name, KIND, read=reading))
                continue
            check_levels([levels])
            check_tokenwise(name, keys, values, "read of it depends on which tokens are")
            label = pair_label(keys, values)
            sides = (Coded(side, Uniform(levels)) for side in (keys, values))
            made.append(Setting(f"{label}-L{levels}-{name}", KIND, label, *sides, read=reading))
        return made
