"""Layers whose memory does not grow with the tokens: convolution and recurrent states, a set for every row."""

from typing import Any

import torch
from transformers.cache_utils import DummyLayer, LinearAttentionLayer

__all__ = ["NoLayer", "State", "StateRows"]

State = dict[str, dict[int, torch.Tensor]]
"""One row's states: tensors by number, ``conv_states`` and ``recurrent_states`` apart."""

_NAMES = ("conv_states", "recurrent_states")


class NoLayer(DummyLayer):
    """A layer without a cache of its own: a feed-forward block, or attention over another layer's keys and values."""


class StateRows(LinearAttentionLayer):
    """States of one layer for several rows, which transformers updates in place: tensors [rows, ...].

    A state cannot be rewound, so it is copied (``row_state``) before anything that may be undone.
    """

    def __init__(self, number_of_states: int = 1):
        super().__init__(number_of_states=number_of_states)
        self._in_use = 0
        self._buffers: State = {name: {} for name in _NAMES}

    @property
    def state_rows(self) -> int:
        """Rows in use, the first of the buffers."""
        return self._in_use

    @state_rows.setter
    def state_rows(self, rows: int) -> None:
        self._in_use = rows
        for name in _NAMES:
            for number, buffer in self._buffers[name].items():
                getattr(self, name)[number] = buffer[:rows]

    def reserve_states(self, rows: int) -> None:
        """Start anew with ``rows`` rows that have seen nothing."""
        LinearAttentionLayer.__init__(self, number_of_states=self.number_of_states)
        self._in_use, self._buffers = rows, {name: {} for name in _NAMES}

    def lazy_initialization(self, **states: Any) -> None:
        """Allocate a state in the shape of the first one; see transformers."""
        LinearAttentionLayer.lazy_initialization(self, **states)
        for name in _NAMES:
            held = getattr(self, name)
            self._buffers[name] |= {number: held[number] for number in held if held[number] is not None}

    def copy_states(self, source: "StateRows") -> None:
        """Give every row the states of the first row of ``source``."""
        for name in ("is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state"):
            setattr(self, name, dict(getattr(source, name)))
        self.conv_kernel_size = dict(source.conv_kernel_size)
        self.device, self.dtype = source.device, source.dtype
        for name in _NAMES:
            for number, held in source._buffers[name].items():
                self._buffers[name][number] = held[:1].repeat(self._in_use, *[1] * (held.dim() - 1))
        self.state_rows = self._in_use

    def row_state(self, row: int) -> State:
        """A copy of the states of one row."""
        return {name: {i: held[row].clone() for i, held in self._buffers[name].items()} for name in _NAMES}

    def set_row_state(self, row: int, state: State) -> None:
        """Put back what ``row_state`` returned."""
        for name in _NAMES:
            for number, held in state[name].items():
                self._buffers[name][number][row].copy_(held)

    def move_state(self, source: int, target: int) -> None:
        """Overwrite row ``target`` with row ``source``."""
        self.set_row_state(target, self.row_state(source))

    def swap_states(self, one: int, other: int) -> None:
        """Let two rows change places."""
        first, second = self.row_state(one), self.row_state(other)
        self.set_row_state(one, second)
        self.set_row_state(other, first)

    @property
    def state_nbytes(self) -> int:
        """Bytes of the states of all rows."""
        return sum(held.nbytes for name in _NAMES for held in self._buffers[name].values())
