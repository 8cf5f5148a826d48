"""Size of a token's keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from semkv_bench.importance.key_value import CacheMetric
from semkv_bench.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["KeyNorm"]


@dataclass(frozen=True)
class KeyNorm(CacheMetric):
    """Euclidean norm of a token's key, averaged over the layer's key heads.

    A quantizer's error grows with the norm, and the attention scores take it up in proportion.
    (Pruning methods read the same number the other way round and keep small keys; Devoto et al., 2024.)
    In models that normalize their keys (Qwen3, Gemma 3) the norms are nearly equal, and the ranking says little.
    """

    name = "key_norm"

    def score(self, keys: Tensor, values: Tensor) -> Tensor:
        """See ``CacheMetric``."""
        return torch.linalg.vector_norm(keys, dim=-1, dtype=torch.float32).mean(0)
