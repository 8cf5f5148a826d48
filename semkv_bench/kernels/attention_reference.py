"""Attention of one new token a row over a packed cache in torch: the meaning of the Triton kernel.

A row's cache has coded pieces and tokens in 16 bits (sinks, a recent window, an open block). Each of the two yields
an output and a log-sum-exp, for outputs over codes may be in another basis; ``merge_attention`` joins them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from semkv_bench.kernels.packed import PackedVectors
from semkv_bench.kernels.packing_reference import unpack_dequantize

__all__ = ["Piece", "attention_work", "merge_attention", "packed_attention"]

Piece = tuple[PackedVectors, PackedVectors]
"""Keys and values of the same tokens, in the same order."""


def attention_work(rows: Sequence[Sequence[Piece]]) -> Sequence[Sequence[Piece]]:
    """What ``packed_attention`` wants to know of the coded pieces of every row; it holds while they are the same."""
    return rows


def packed_attention(
    query: Tensor,
    turned: Tensor,
    work: Sequence[Sequence[Piece]],
    plain: Sequence[tuple[Tensor, Tensor]],
    softmax_scale: float,
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Attention of query [rows, query_heads, head_dim] over coded pieces, and over plain tokens.

    turned: the query in the basis that keys are coded in; output over coded values is in theirs.
    plain: keys and values [rows, heads, tokens, head_dim] in 16 bits or 32. query_heads is a multiple of the cache's
    heads (grouped queries, neighbours share a head). Returns two outputs float32 [rows, query_heads, head_dim], each
    with the natural log-sum-exp of its scores [rows, query_heads]: zeros and -inf where there are no tokens.
    """
    coded = [
        _over(
            row,
            torch.cat([unpack_dequantize(keys) for keys, _ in pieces], dim=1),
            torch.cat([unpack_dequantize(values) for _, values in pieces], dim=1),
            softmax_scale,
        )
        if pieces
        else _nothing(row)
        for row, pieces in zip(turned, work, strict=True)
    ]
    open_ = [_nothing(row) for row in query]
    if plain:
        keys, values = (torch.cat(side, dim=2) for side in zip(*plain, strict=True))
        if keys.shape[2]:
            open_ = [_over(*row, softmax_scale) for row in zip(query, keys, values, strict=True)]
    return _stacked(coded), _stacked(open_)


def _stacked(rows: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    outputs, sums = zip(*rows, strict=True)
    return torch.stack(outputs), torch.stack(sums)


def _over(query: Tensor, keys: Tensor, values: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor]:
    grouped = query.float().view(len(keys), -1, query.shape[-1])
    scores = grouped @ keys.float().transpose(1, 2) * softmax_scale  # [heads, group, tokens]
    out = scores.softmax(-1) @ values.float()
    return out.view(query.shape), scores.logsumexp(-1).view(-1)


def _nothing(query: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.zeros_like(query, dtype=torch.float32)
    return out, torch.full_like(out[:, 0], -torch.inf)


def merge_attention(outputs: Tensor, log_sums: Tensor) -> tuple[Tensor, Tensor]:
    """Join attention over parts: outputs [..., parts, query_heads, head_dim], log_sums [..., parts, query_heads].

    A part without tokens has a log-sum of -inf; where all are, zeros and -inf come out.
    """
    if not log_sums.shape[-2]:
        return outputs.sum(-3), log_sums.sum(-2) - torch.inf
    highest = log_sums.amax(-2, keepdim=True).clamp_min(torch.finfo(torch.float32).min)
    weights = (log_sums - highest).exp()
    total = weights.sum(-2)
    merged = (weights[..., None] * outputs).sum(-3) / total.clamp_min(torch.finfo(torch.float32).tiny)[
        ..., None
    ]
    return merged, total.log() + highest.squeeze(-2)
