"""How the packed cache takes part in attention: it is asked once, by the layer that it has just served.

``hand_over`` gives a model its keys together with a reader, which computes the attention call that follows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from semkv_bench.errors import SemkvError
from semkv_bench.models.attention_hook import Call, Reader, attach, intercept_next

__all__ = ["Handover", "hand_over", "last_query_mask", "visible"]

_FOREIGN = (
    "the model's attention did not come back to the cache: give SemKVCache the model's own "
    "configuration, SemKVCache(model.config, ...), and a model that uses transformers' attention "
    "interface; or feed the prompt by cache.prefill(model, **inputs) with attention='dequantize'"
)
_CHANGED = (
    "the model changes values between its cache and its attention, so attention cannot be asked once more over what "
    "is stored: use attention='dequantize', and feed the prompt by cache.prefill(model, **inputs)"
)


@dataclass
class Handover:
    """Values that went to a model beside keys with a reader.

    call_off: ends the interception of attention. returned: has the reader been called?
    """

    values: Tensor
    call_off: Callable[[], None]
    returned: bool = False

    def give_back(self, values: Tensor) -> None:
        """End the loan; raises SemkvError unless ``values`` are those that were lent."""
        self.returned = True
        self.call_off()
        lent = self.values
        same = values.shape == lent.shape and (
            values.data_ptr() == lent.data_ptr() or torch.equal(values, lent)
        )
        if not same:
            raise SemkvError(_CHANGED)

    def check(self) -> None:
        """Raise SemkvError if attention ran without the reader."""
        if not self.returned:
            self.returned = True
            self.call_off()
            raise SemkvError(_FOREIGN)


def hand_over(config: Any, key: Tensor, value: Tensor, reader: Reader) -> tuple[Tensor, Handover]:
    """A view of ``key`` that makes the next attention call of the model of ``config`` call ``reader``,
    if that call is handed ``value``, too.

    Raises SemkvError if there is no such configuration any more.
    """
    if config is None:
        raise SemkvError(_FOREIGN)
    loan = Handover(value, intercept_next(config))

    def read(call: Call) -> tuple[Tensor, Any]:
        loan.give_back(call.value)
        return reader(call)

    return attach(key, read), loan


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
