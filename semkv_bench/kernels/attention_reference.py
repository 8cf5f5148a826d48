"""Attention of one query token over a packed cache in torch: the meaning of the Triton kernel.

A whole cache may be in parts, say packed blocks and a tail in 16 bits; every part yields its own
output and log-sum-exp, and ``merge_attention`` joins them.
"""

from torch import Tensor

from semkv_bench.kernels.packed import PackedVectors
from semkv_bench.kernels.packing_reference import unpack_dequantize

__all__ = ["merge_attention", "packed_attention"]


def packed_attention(
    query: Tensor, keys: PackedVectors, values: PackedVectors, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of query [query_heads, head_dim] over packed keys and values of one sequence.

    query_heads is a multiple of the cache's heads (grouped queries, neighbours share a head). Returns
    the output float32 [query_heads, head_dim] and the natural log-sum-exp of the scores [query_heads].
    Codebook-coded keys want a rotated query; output over codebook-coded values is still rotated.
    """
    heads, head_dim = keys.layout.heads, keys.layout.head_dim
    grouped = query.float().view(heads, -1, head_dim)
    scores = grouped @ unpack_dequantize(keys).transpose(1, 2) * softmax_scale  # [heads, group, tokens]
    out = scores.softmax(-1) @ unpack_dequantize(values)
    return out.view(query.shape), scores.logsumexp(-1).view(-1)


def merge_attention(outputs: Tensor, log_sums: Tensor) -> tuple[Tensor, Tensor]:
    """Join attention over parts: outputs [parts, query_heads, head_dim], log_sums [parts, query_heads]."""
    weights = log_sums.softmax(0)
    return (weights[..., None] * outputs).sum(0), log_sums.logsumexp(0)
