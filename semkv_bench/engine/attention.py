"""Attention over rows: keys are never copied for grouped queries, and places can be hidden by row, layer and head.

Where a mask is given, transformers repeats keys and values for every query head; for rows of a long prompt that moves
far more memory than attention reads. Here the queries that share a key-value head are laid side by side as if they
were tokens of one head, [rows, kv_heads, group * new, head_dim], which every kernel of torch's
``scaled_dot_product_attention`` takes, with a mask for each key-value head or without.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from semkv_bench.engine.rows import RowCache
from semkv_bench.importance.sources import DELETED
from semkv_bench.models.load import LoadedModel

__all__ = ["grouped_attention", "hides_places", "row_attention"]

_NAME = "+rows"
_TAKEN = ("sdpa", "eager")
# Arguments that change attention in ways that only the model's own function knows.
_OWN_WAYS = ("softcap", "s_aux", "position_bias")


def hides_places(loaded: LoadedModel) -> bool:
    """Does the model's attention take a mask of ours, so that rows may differ in length and tokens be deleted?"""
    return loaded.model.get_decoder().config._attn_implementation in _TAKEN


@contextmanager
def row_attention(loaded: LoadedModel, rows: RowCache) -> Iterator[None]:
    """While this lasts, the model attends to ``rows`` without copying their keys, and not to what they deleted.

    Attention other than ``sdpa`` and ``eager`` stays as it is.
    """
    decoder = loaded.model.get_decoder()
    original = decoder.config._attn_implementation
    if original not in _TAKEN:
        yield
        return
    name = original + _NAME
    if name not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(name, _over_rows(original))
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[original])
    token = DELETED.set(lambda layer: rows.attending[layer].deleted() if layer in rows.attending else None)
    try:
        decoder.set_attn_implementation(name)
        yield
    finally:
        decoder.set_attn_implementation(original)
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


def _over_rows(original: str) -> Callable[..., Any]:
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,  # some models give it by transformers' name
        **kwargs: Any,
    ) -> Any:
        mask = attention_mask
        deleted = DELETED.get()(module.layer_idx)
        plain = original == "sdpa" and all(kwargs.get(name) is None for name in _OWN_WAYS)
        # A mask for every query head is more than what to look at.
        shared = mask is None or mask.shape[1] == 1
        if plain and shared and not (mask is None and query.shape[2] > 1):
            seen = _seen(mask, deleted)
            return grouped_attention(query, key, value, seen, kwargs.get("scaling")), None
        if deleted is not None:
            mask = _additive(_seen(mask, deleted), query, key.shape[1])
        elif mask is not None and mask.dtype == torch.bool and original == "eager":
            mask = _additive(mask, query, 1)
        # Each modeling file has an eager function of its own.
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        own = ALL_ATTENTION_FUNCTIONS.get_interface(original, eager)
        return own(module, query, key, value, mask, **kwargs)

    return attention


def _seen(mask: Tensor | None, deleted: Tensor | None) -> Tensor | None:
    """What a query may look at, bool [rows or 1, kv_heads or 1, new, places]."""
    if mask is not None and mask.dtype != torch.bool:
        mask = mask == 0
    if deleted is None:
        return mask
    left = ~deleted[:, :, None]
    return left if mask is None else mask & left


def _additive(seen: Tensor, query: Tensor, kv_heads: int) -> Tensor:
    """The same as numbers to add to attention scores, for every query head where key-value heads differ."""
    if seen.shape[1] > 1:
        seen = seen.repeat_interleave(query.shape[1] // kv_heads, dim=1)
    blocked = torch.finfo(query.dtype).min
    return torch.zeros(seen.shape, dtype=query.dtype, device=query.device).masked_fill_(~seen, blocked)
