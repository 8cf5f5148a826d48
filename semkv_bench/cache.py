"""Caches that transformers models accept: preallocated rows, one row per setting of the same prompt."""

from collections.abc import Sequence

import torch
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.configuration_utils import PreTrainedConfig

__all__ = ["RowCache", "RowLayer", "full_attention_layers", "layer_types"]

_STORED_IN_FULL = {"full_attention", "sliding_attention", "chunked_attention"}


def layer_types(config: PreTrainedConfig) -> tuple[str, ...]:
    """Attention type of every decoder layer, ``full_attention`` where the configuration names none."""
    text = config.get_text_config(decoder=True)
    named = getattr(text, "layer_types", None)
    if named is not None:
        return tuple(named)
    window = getattr(text, "sliding_window", None) is not None and getattr(text, "use_sliding_window", True)
    return ("sliding_attention" if window else "full_attention",) * text.num_hidden_layers


def full_attention_layers(config: PreTrainedConfig) -> tuple[int, ...]:
    """Indices of the layers whose cache grows with the prompt and is quantized."""
    return tuple(i for i, kind in enumerate(layer_types(config)) if kind == "full_attention")


class RowLayer(CacheLayerMixin):
    """One layer's keys and values in buffers that are allocated once: [rows, heads, capacity, head_dim].

    Sliding layers store every token too and leave the window to the attention mask; their values are
    the same and no token is ever moved. ``reads`` counts how often attention was handed ``coded`` tokens.
    """

    is_croppable = True

    def __init__(self, sliding: bool = False):
        super().__init__()
        self.is_sliding = sliding
        self.length = 0
        self.rows = 0
        self.capacity = 0
        self.coded = False
        self.reads = 0

    def reserve(self, rows: int, capacity: int) -> None:
        """Start anew with ``rows`` empty rows of up to ``capacity`` tokens; a large enough buffer is reused."""
        self.rows, self.length, self.coded, self.reads = rows, 0, False, 0
        self.capacity = capacity
        if self.is_initialized and (self.keys.shape[0] < rows or self.keys.shape[2] < capacity):
            self.keys = self.values = None
            self.is_initialized = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate both buffers in the shape, type and device of the first states [rows, heads, tokens, dim]."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = (
            states.new_empty(self.rows, states.shape[1], self.capacity, states.shape[3])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def take(self, tokens: int, like: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Count ``tokens`` tokens as stored and return writable views of them [rows, heads, tokens, head_dim].

        like: keys and values whose heads, head_dim, type and device the buffers have.
        """
        if not self.is_initialized:
            self.lazy_initialization(*like)
        self.length = tokens
        return self.stored()

    def stored(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of what the rows hold now: keys and values [rows, heads, length, head_dim]."""
        return self.keys[: self.rows, :, : self.length], self.values[: self.rows, :, : self.length]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append states [rows, heads, new, head_dim]; returns views of everything stored."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, self.length = self.length, self.length + key_states.shape[2]
        if self.length > self.capacity:
            raise ValueError(f"the row cache holds {self.capacity} tokens; {self.length} were given")
        self.keys[: self.rows, :, start : self.length].copy_(key_states)
        self.values[: self.rows, :, start : self.length].copy_(value_states)
        self.reads += self.coded
        return self.stored()

    def rewind(self, length: int) -> None:
        """Forget the tokens after the first ``length``."""
        self.length = min(self.length, length)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest tokens; transformers gives their number with a minus sign."""
        self.rewind(self.length - abs(tokens_to_remove))

    def move_row(self, source: int, target: int) -> None:
        """Overwrite row ``target`` with row ``source``."""
        for buffer in (self.keys, self.values):
            buffer[target, :, : self.length].copy_(buffer[source, :, : self.length])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys seen by the next ``query_length`` queries, and the position of the first of them."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens stored in every row."""
        return self.length

    def get_max_length(self) -> int:
        """Tokens that a row can hold."""
        return self.capacity


class RowCache(Cache):
    """A cache of ``rows`` rows that share a prompt length and are decoded together.

    Rows that have ended leave by ``drop``: the last row takes their place, so that the rows in use stay
    at the front of the buffer and nothing else is copied.
    """

    def __init__(self, config: PreTrainedConfig):
        kinds = layer_types(config)
        unknown = sorted(set(kinds) - _STORED_IN_FULL)
        if unknown:
            raise ValueError(f"layers of type {', '.join(unknown)} have no key-value rows")
        super().__init__(layers=[RowLayer(sliding=kind != "full_attention") for kind in kinds])

    def reserve(self, rows: int, capacity: int) -> None:
        """Start anew with ``rows`` rows of up to ``capacity`` tokens each."""
        for layer in self.layers:
            layer.reserve(rows, capacity)

    def rewind(self, length: int) -> None:
        """Keep the first ``length`` tokens of every row."""
        for layer in self.layers:
            layer.rewind(length)

    def drop(self, ended: Sequence[int]) -> list[int]:
        """Let the rows ``ended`` leave.

        Returns the old indices of the rows that stay, in their new order.
        """
        order = list(range(self.layers[0].rows))
        for row in sorted(ended, reverse=True):
            last = len(order) - 1
            if row != last:
                for layer in self.layers:
                    layer.move_row(last, row)
                order[row] = order[last]
            order.pop()
            for layer in self.layers:
                layer.rows = last
        return order

    @property
    def reads(self) -> int:
        """How often, summed over layers, attention was handed coded tokens."""
        return sum(layer.reads for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes of the allocated buffers."""
        return sum(
            t.nbytes for layer in self.layers if layer.is_initialized for t in (layer.keys, layer.values)
        )
