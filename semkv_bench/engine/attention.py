"""Attention over rows: keys are never copied for grouped queries, and places can be hidden by row, layer and head.

Where a mask is given, transformers repeats keys and values for every query head; for rows of a long prompt that moves
far more memory than attention reads. Here the queries that share a key-value head are laid side by side as if they
were tokens of one head, [rows, kv_heads, group * new, head_dim], which every kernel of torch's
``scaled_dot_product_attention`` takes, with a mask for each key-value head or without.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from semkv_bench.engine.rows import RowCache
from semkv_bench.models.attention_hook import DELETED, Call, model_attention, replaced
from semkv_bench.models.load import LoadedModel

__all__ = ["grouped_attention", "hides_places", "row_attention"]

_TAKEN = ("sdpa", "eager")


def hides_places(loaded: LoadedModel) -> bool:
    """Does the model's attention take a mask of ours, so that rows may differ in length and tokens be deleted?"""
    return model_attention(loaded.decoder.config) in _TAKEN


@contextmanager
def row_attention(loaded: LoadedModel, rows: RowCache) -> Iterator[None]:
    """While this lasts, the model attends to ``rows`` without copying their keys, and not to what they deleted.

    Attention other than ``sdpa`` and ``eager`` stays as it is.
    """
    decoder = loaded.decoder
    attention = model_attention(decoder.config)
    if attention not in _TAKEN:
        yield
        return
    token = DELETED.set(lambda layer: rows.attending[layer].deleted() if layer in rows.attending else None)
    try:
        with replaced(decoder, partial(_over_rows, attention, rows)):
            yield
    finally:
        DELETED.reset(token)


def grouped_attention(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, scaling: float | None
) -> Tensor:
    """Attention output [rows, new, heads, head_dim].

    query [rows, heads, new, head_dim]; key, value [rows, kv_heads, places, head_dim], perhaps strided; seen: bool
    [rows or 1, kv_heads or 1, new, places], None for everything.
    """
    new, kv_heads = query.shape[2], key.shape[1]
    groups = query.shape[1] // kv_heads
    if seen is not None and groups > 1 and new > 1:
        seen = seen.unsqueeze(2).expand(-1, -1, groups, -1, -1).flatten(2, 3)
    packed = query.unflatten(1, (kv_heads, groups)).flatten(2, 3)
    out = nn.functional.scaled_dot_product_attention(packed, key, value, attn_mask=seen, scale=scaling)
    return out.unflatten(2, (groups, new)).flatten(1, 2).transpose(1, 2).contiguous()


def _over_rows(attention: str, rows: RowCache, call: Call) -> tuple[Tensor, Any]:
    query, key, mask = call.query, call.key, call.mask
    layer = rows.attending.get(call.module.layer_idx)
    hidden = _either(call.deleted, None if layer is None else layer.unread(query))
    # A mask for every query head is more than what to look at.
    shared = mask is None or mask.shape[1] == 1
    if attention == "sdpa" and call.is_plain and shared and not (mask is None and query.shape[2] > 1):
        seen = _seen(mask, hidden)
        return grouped_attention(query, key, call.value, seen, call.arguments.get("scaling")), None
    if hidden is not None:
        mask = _additive(_seen(mask, hidden), query, key.shape[1])
    elif mask is not None and mask.dtype == torch.bool and attention == "eager":
        mask = _additive(mask, query, 1)
    return call.attend(query, key, call.value, mask)


def _either(deleted: Tensor | None, unread: Tensor | None) -> Tensor | None:
    """What is deleted, bool [rows, kv_heads, places], or left unread by a query, [rows, kv_heads, new, places]."""
    if deleted is None:
        return unread
    return deleted[:, :, None] if unread is None else deleted[:, :, None] | unread


def _seen(mask: Tensor | None, hidden: Tensor | None) -> Tensor | None:
    """What a query may look at, bool [rows or 1, kv_heads or 1, new, places]."""
    if mask is not None and mask.dtype != torch.bool:
        mask = mask == 0
    if hidden is None:
        return mask
    return ~hidden if mask is None else mask & ~hidden


def _additive(seen: Tensor, query: Tensor, kv_heads: int) -> Tensor:
    """The same as numbers to add to attention scores, for every query head where key-value heads differ."""
    if seen.shape[1] > 1:
        seen = seen.repeat_interleave(query.shape[1] // kv_heads, dim=1)
    blocked = torch.finfo(query.dtype).min
    return torch.zeros(seen.shape, dtype=query.dtype, device=query.device).masked_fill_(~seen, blocked)
