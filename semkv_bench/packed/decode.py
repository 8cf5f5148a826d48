"""One new token's attention straight over packed blocks, no copy of the cache in full."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from semkv_bench import kernels
from semkv_bench.models.attention_hook import Call
from semkv_bench.packed.tensor import PackedTensor

__all__ = ["attend_packed", "can_attend_packed"]


def can_attend_packed(sides: Sequence[PackedTensor]) -> bool:
    """Do kernels know both coders, and do keys and values hold the same tokens packed, some at all?"""
    keys, values = sides
    if keys.coder is None or values.coder is None or keys.buffer.shape != values.buffer.shape:
        return False
    if not any(keys.rows) or keys.opened != values.opened or keys.aside.shape != values.aside.shape:
        return False
    counts = [[[packed.tokens for packed in row] for row in side.rows] for side in sides]
    return counts[0] == counts[1] and all(
        side.coder.packed_vectors(packed) is not None
        for side in sides
        for row in side.rows
        for packed in row[:1]
    )


def attend_packed(call: Call, sides: Sequence[PackedTensor]) -> Tensor | None:
    """Output [rows, 1, query_heads, head_dim] of one query a row that sees all tokens but padding.

    None where the call asks for something else than scaled dot products.
    """
    if not call.is_plain:
        return None
    scaling = call.scaling
    query = call.query[:, :, 0]  # [rows, query_heads, head_dim]
    plain = [_over_open(query, *(side.open for side in sides), scaling)]
    if sides[0].aside.shape[2]:
        plain.append(_over_open(query, *(side.aside for side in sides), scaling))
    output = torch.empty_like(plain[0][0])
    for row in range(len(query)):
        parts, sums = _over_packed(query[row], sides, row, scaling)
        output[row], _ = kernels.merge_attention(
            torch.stack([*(part[row] for part, _ in plain), *parts]),
            torch.stack([*(total[row] for _, total in plain), *sums]),
        )
    return output[:, None].to(call.query.dtype)


def _over_open(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Output float32 [rows, query_heads, head_dim] and log-sum-exp [rows, query_heads] over open tokens."""
    grouped = query.float().unflatten(1, (keys.shape[1], -1))
    scores = grouped @ keys.float().transpose(2, 3) * scaling  # [rows, heads, group, open]
    output = scores.softmax(-1) @ values.float()
    return output.flatten(1, 2), scores.logsumexp(-1).flatten(1, 2)


def _over_packed(query: Tensor, sides: Sequence[PackedTensor], row: int, scaling: float) -> tuple[Any, Any]:
    """The same for every packed piece of one row; query [query_heads, head_dim]."""
    keys, values = sides
    pieces = list(zip(keys.rows[row], values.rows[row], strict=True))
    if not pieces:
        return [], []
    rotated = keys.coder.to_coded(query)
    found = [
        kernels.packed_attention(
            rotated, keys.coder.packed_vectors(key), values.coder.packed_vectors(value), scaling
        )
        for key, value in pieces
    ]
    return [values.coder.from_coded(output) for output, _ in found], [sums for _, sums in found]
