"""How the packed cache takes part in attention: it is asked once, by the layer that it has just served.

``lend`` hands a model its keys together with a reader. Until the attention call that follows, the model's
configuration names an attention function that looks for the reader; that call puts the old name back.
The model itself is not changed.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from semkv_bench.errors import SemkvError

__all__ = ["Attend", "Call", "Loan", "last_query_mask", "lend", "visible"]

_LENT = "+semkv"
_FOREIGN = (
    "the model's attention did not come back to the cache: give SemKVCache the model's own "
    "configuration, SemKVCache(model.config, ...), and a model that uses transformers' attention "
    "interface; or feed the prompt by cache.prefill(model, **inputs) with attention='dequantize'"
)
_CHANGED = (
    "the model changes values between its cache and its attention, so attention cannot be asked once more over what "
    "is stored: use attention='dequantize', and feed the prompt by cache.prefill(model, **inputs)"
)
_LOAN = "_semkv_loan"

Attend = Callable[[Tensor, Tensor, Tensor, Any], tuple[Tensor, Any]]
"""The model's own attention: query, key, value, mask -> output [rows, new, query_heads, head_dim], weights."""


@dataclass(frozen=True)
class Call:
    """One attention call: query [rows, query_heads, new, head_dim], what the cache returned, and the mask."""

    attend: Attend
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Any
    arguments: dict[str, Any]


@dataclass
class Loan:
    """Keys that went to a model with the reader that its attention is to call, and the values beside them."""

    config: Any
    original: str
    values: Tensor
    reader: Callable[[Call], tuple[Tensor, Any]]
    returned: bool = False

    def give_back(self) -> None:
        """Put the name of the model's attention back."""
        self.returned = True
        self.config._attn_implementation = self.original

    def compare(self, values: Tensor) -> None:
        """Raise SemkvError unless ``values`` are those that were lent."""
        lent = self.values
        same = values.shape == lent.shape and (
            values.data_ptr() == lent.data_ptr() or torch.equal(values, lent)
        )
        if not same:
            raise SemkvError(_CHANGED)

    def check(self) -> None:
        """Raise SemkvError if attention ran without the reader."""
        if not self.returned:
            self.give_back()
            raise SemkvError(_FOREIGN)


def lend(
    config: Any, key: Tensor, value: Tensor, reader: Callable[[Call], tuple[Tensor, Any]]
) -> tuple[Tensor, Loan]:
    """A view of ``key`` that makes the next attention call of the model of ``config`` call ``reader``,
    if that call is handed ``value``, too.

    Raises SemkvError if there is no such configuration any more.
    """
    if config is None:
        raise SemkvError(_FOREIGN)
    original = config._attn_implementation or "eager"
    loan = Loan(config, original, value, reader)
    lent = key.view_as(key)
    setattr(lent, _LOAN, loan)
    name = original + _LENT
    if name not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(name, partial(_attention, original))
    config._attn_implementation = name
    return lent, loan


def _attention(
    original: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,  # some models give it by transformers' name
    **arguments: Any,
) -> tuple[Tensor, Any]:
    mask = attention_mask
    # Each modeling file has an eager function of its own.
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    function = ALL_ATTENTION_FUNCTIONS.get_interface(original, eager)

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Any) -> tuple[Tensor, Any]:
        return function(module, query, key, value, mask, **arguments)

    loan = getattr(key, _LOAN, None)
    if loan is None:
        return attend(query, key, value, mask)
    loan.give_back()
    loan.compare(value)
    return loan.reader(Call(attend, query, key, value, mask, arguments))


def visible(mask: Any, tokens: int) -> Tensor | None:
    """Which of ``tokens`` cached tokens the newest query of every row sees, bool [rows or 1, tokens].

    None: no mask, it sees all. Raises SemkvError for a mask that is not a tensor (flex attention).
    """
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise SemkvError(
            f"SemKVCache cannot read a mask of type {type(mask).__name__}; load the model with "
            "attn_implementation='sdpa', 'eager' or 'flash_attention_2'"
        )
    if mask.dim() == 4:
        mask = mask[:, 0, -1, :tokens]
    if mask.dtype.is_floating_point:
        return mask > torch.finfo(mask.dtype).min / 2
    return mask[:, :tokens].bool()


def last_query_mask(mask: Any) -> Any:
    """The part of a mask that belongs to the newest query; masks by key are for all queries."""
    return mask[:, :, -1:] if isinstance(mask, Tensor) and mask.dim() == 4 else mask
