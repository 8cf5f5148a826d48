"""One ranking of tokens from the scores of several layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from semkv_bench.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["shared"]


def shared(scores: Tensor) -> Tensor:
    """Importance [tokens], from 0 to 1, of scores [layers, tokens]: the mean of a token's ranks in the layers.

    Every layer has one vote. The scores themselves grow by orders of magnitude from layer to layer (norms of
    hidden states do), so their mean would be the ranking of the loudest layer. Equal scores
    share their mean rank, so that ties stay ties. Heads that were scored by themselves, [layers, heads, tokens], have
    a vote each.
    """
    scores = scores.flatten(0, -2)
    tokens = scores.shape[-1]
    ordered = scores.sort(-1).values
    below = torch.searchsorted(ordered, scores, right=False)
    up_to = torch.searchsorted(ordered, scores, right=True)
    return ((below + up_to - 1) / (2 * max(1, tokens - 1))).float().mean(0)
