"""A ranking by chance."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from semkv_bench.importance.model_free import ControlMetric
from semkv_bench.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["Random"]


@dataclass(frozen=True)
class Random(ControlMetric):
    """Uniform random numbers, one per token, drawn anew for every seed and every prompt.

    With the seed alone all prompts of a run would share one draw, and its luck would not average out.
    """

    name = "random"
    seeded = True

    def score(self, ids: Tensor, seed: int) -> Tensor:
        """See ``ControlMetric``."""
        text = f"{seed}:{','.join(map(str, ids.tolist()))}"
        digest = hashlib.sha256(text.encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
        return torch.rand(len(ids), generator=generator)
