"""Attention less redundancy: tokens whose keys are like many others go first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from semkv_bench.errors import UsageError
from semkv_bench.importance.base import Needs, Prompt
from semkv_bench.importance.heads import LastQueriesMetric, lifted
from semkv_bench.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["RKV"]

_KERNEL = 7
_ATTENTION = 0.1
_ALIKE = 0.5


@dataclass(frozen=True)
class RKV(LastQueriesMetric):
    """0.1 x attention less 0.9 x redundancy, both shares of one (Cai et al., 2025, arXiv 2505.24133).

    Attention: from the last 8 tokens, which always stay, the most of any head that shares a key, and of 7 neighbours.
    Redundancy: softmax of a key's mean cosine to the others of its head, where each leaves out the newest that is
    like itself. Of a block of generated tokens: attention from those fed while it was open, as a mean over heads.
    """

    name = "r_kv"
    needs = Needs.ATTENTION
    reads_keys = True
    window: ClassVar[int] = 8

    def score(self, sums: Tensor, keys: Tensor, prompt: Prompt) -> Tensor:
        """See ``HeadAttentionMetric``."""
        tokens = keys.shape[1]
        if tokens < self.least_tokens:
            raise UsageError(f"{self.label} says nothing of {tokens} tokens; it needs {self.least_tokens}")
        before = tokens - self.window
        most = sums[0, :, :before].unflatten(0, (len(keys), -1)).amax(1)
        pooled = torch.nn.functional.max_pool1d(most[None], _KERNEL, stride=1, padding=_KERNEL // 2)[0]
        scores = _mixed(pooled, torch.stack([_redundancy(head) for head in keys.float()])[:, :before])
        scores = torch.nn.functional.pad(scores, (0, self.window))
        return lifted(scores, self.always_kept(tokens, 0).to(scores.device))

    def with_keys(self, received: Tensor, keys: Sequence[Tensor]) -> Tensor:
        """See ``Metric``."""
        redundant = [
            torch.stack([_redundancy(head) for head in layer.float()]).mean(0).cpu() for layer in keys
        ]
        return _mixed(received, torch.stack(redundant))


def _mixed(attention: Tensor, redundancy: Tensor) -> Tensor:
    attention = attention / attention.sum(-1, keepdim=True).clamp_min(1e-9)
    return _ATTENTION * attention - (1 - _ATTENTION) * redundancy


def _redundancy(keys: Tensor) -> Tensor:
    """Keys [tokens, head_dim] of one head -> [tokens], of sum 1."""
    unit = torch.nn.functional.normalize(keys, dim=-1)
    alike = (unit @ unit.T).fill_diagonal_(0)
    places = torch.arange(len(keys), device=keys.device)
    newest = torch.where(alike > _ALIKE, places, 0).amax(-1, keepdim=True)
    return alike.scatter_(-1, newest, 0).mean(0).softmax(-1)
