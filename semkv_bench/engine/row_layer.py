"""One layer of a cache that transformers models accept: preallocated rows, one row per setting of the same prompt."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from semkv_bench.engine.states import StateRows
from semkv_bench.engine.stretches import stretches
from semkv_bench.settings.reading import Reading

# Buffers grow in steps of so many tokens, so that prompts of about one length share them.
_STEP = 256

__all__ = ["Row", "RowLayer", "StatefulRowLayer", "allocated"]


def allocated(tokens: int) -> int:
    """Tokens that the buffers of rows of ``tokens`` tokens hold."""
    return -(-tokens // _STEP) * _STEP


@dataclass
class Row:
    """What is known of one row besides its keys and values.

    index: which setting it belongs to; reads: how often, summed over layers, attention was handed coded tokens. Of the
    keys and of the values: settled: tokens before the open stretch, coded or never to be coded; pieces: sizes of the
    stretches that were stored together as the setting says, in the layers that it codes. All other tokens are in 16
    bits. A side that the setting leaves in 16 bits is counted with the other. shift: positions by which tokens stand
    before their places, where those that a setting keeps were numbered anew. read: shares of the prompt that queries
    chose to read, summed over layers, heads and queries, and how many these were.
    """

    index: int
    settled: tuple[int, int] = (0, 0)
    pieces: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    reads: int = 0
    shift: int = 0
    read: tuple[float, int] = (0.0, 0)

    @property
    def read_share(self) -> float | None:
        """Mean share of the prompt that queries read; None where none chose."""
        total, queries = self.read
        return total / queries if queries else None

    @property
    def coded(self) -> tuple[int, int]:
        """Tokens whose keys, and whose values, are stored as the setting says."""
        return sum(self.pieces[0]), sum(self.pieces[1])

    @property
    def open_from(self) -> int:
        """The first token that may still become coded on either side."""
        return min(self.settled)


class RowLayer(CacheLayerMixin):
    """One layer's keys and values in buffers that are allocated once: [rows, heads, capacity, head_dim].

    Every row has its own length; new tokens go behind a row's last one. Where lengths differ, what
    attention is given ends with the longest row, and a mask must hide the places behind the others.
    Sliding layers store every token too and leave the window to the attention mask; their values are
    the same and no token is ever moved. A deleted token stays at its place, unseen.
    """

    is_croppable = True
    packs = False  # is what is coded of the prompt held as codes, and given by ``pack``?

    def __init__(self, sliding: bool = False):
        super().__init__()
        self.is_sliding = sliding
        self.first = 0  # tokens before those that the buffers hold
        self.lengths: list[int] = []
        self.rows = 0
        self.capacity = 0
        self.book: list[Row] = []
        self.arrived: Callable[[], None] | None = (
            None  # called when tokens came, before attention is given them
        )
        self._unseen: torch.Tensor | None = None  # bool [rows, heads, capacity]
        self._reading: dict[int, tuple[Reading, torch.Tensor, int]] = {}  # by ``Row.index``

    @property
    def length(self) -> int:
        """Tokens of the longest row in use."""
        return max(self.lengths[: self.rows], default=0)

    @property
    def kv_heads(self) -> int:
        """Heads that have keys of their own, once anything was stored."""
        return self.keys.shape[1]

    def reserve(self, rows: int, capacity: int, book: list[Row]) -> None:
        """Start anew with ``rows`` empty rows of up to ``capacity`` tokens; a large enough buffer is reused.

        book: bookkeeping of the rows, shared by all layers.
        """
        self.rows, self.lengths, self.book = rows, [0] * rows, book
        self.capacity = capacity
        self._unseen, self._reading = None, {}
        if self.is_initialized and (self.keys.shape[0] < rows or self.keys.shape[2] < capacity):
            self.keys = self.values = None
            self.is_initialized = False

    def resume(self, tokens: int, capacity: int, book: list[Row]) -> None:
        """As ``reserve`` for one row, which keeps the first ``tokens`` tokens of the first row."""
        kept = None
        if self.keys.shape[2] < capacity:
            kept = tuple(side.clone() for side in self.part(0, slice(0, tokens)))
        self.reserve(1, capacity, book)
        if kept is not None:
            for view, states in zip(self.take(tokens, like=tuple(s[None] for s in kept)), kept, strict=True):
                view[0].copy_(states)
        self.lengths = [tokens]

    def lend(self, row: int, tokens: int, to: "RowLayer") -> None:
        """Let ``to`` be a layer of one row: the first ``tokens`` tokens of ``row``, in the same memory."""
        to.reserve(1, tokens, to.book)
        to.dtype, to.device, to.is_initialized = self.dtype, self.device, True
        to.keys, to.values = self.keys[row : row + 1], self.values[row : row + 1]
        to.lengths = [tokens]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate both buffers in the shape, type and device of the first states [rows, heads, tokens, dim]."""
        self.dtype, self.device = key_states.dtype, key_states.device
        # Zeros: masked places are multiplied by zero weights, which NaN would survive.
        self.keys, self.values = (
            states.new_zeros(
                self.rows, states.shape[1], allocated(self.capacity - self.first), states.shape[3]
            )
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def take(self, tokens: int, like: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Count ``tokens`` tokens as stored and return writable views of them [rows, heads, tokens, head_dim].

        like: keys and values whose heads, head_dim, type and device the buffers have.
        """
        if not self.is_initialized:
            self.lazy_initialization(*like)
        self.lengths = [tokens] * self.rows
        return self.stored()

    def begin(self, stored: tuple[torch.Tensor, torch.Tensor], settled: int) -> None:
        """Count the prompt's tokens as stored in every row.

        stored: its keys and values, of one row; settled: no later coding changes tokens before this one.
        """
        self.take(stored[0].shape[2], like=stored)

    def keep(self, side: int, rows: slice, states: torch.Tensor) -> None:
        """Let ``rows`` hold the prompt's keys (side 0) or values (1), [1, heads, tokens, head_dim], as they are."""
        target = self.stored()[side][rows]
        target.copy_(states.expand_as(target))

    def stored(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of what the rows in use hold: keys and values [rows, heads, length of the longest, head_dim]."""
        return self.keys[: self.rows, :, : self.length], self.values[: self.rows, :, : self.length]

    def part(self, row: int, here: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of some of one row's keys and values [heads, tokens, head_dim]."""
        return self.keys[row, :, here], self.values[row, :, here]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append states [rows, heads, new, head_dim]; returns views of everything stored."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new, length = key_states.shape[2], self.length
        if length + new > self.capacity:
            raise ValueError(f"the row cache holds {self.capacity} tokens; {length + new} were given")
        starts = tuple((row, held - self.first) for row, held in enumerate(self.lengths[: self.rows]))
        here = stretches(starts, new, self.device)
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            here.put(buffer, states)
        for row in range(self.rows):
            self.lengths[row] += new
        if not self.is_sliding:
            for row in self.book[: self.rows]:
                row.reads += any(row.pieces)
        if self.arrived is not None:
            self.arrived()
        return self.stored()

    def rewind(self, lengths: Sequence[int]) -> None:
        """Forget the tokens after the first ``lengths[row]`` of every row in use."""
        self.lengths[: self.rows] = map(min, self.lengths[: self.rows], lengths)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest tokens; transformers gives their number with a minus sign."""
        self.rewind([length - abs(tokens_to_remove) for length in self.lengths[: self.rows]])

    def delete(self, row: int, here: slice, deleted: torch.Tensor) -> None:
        """Let attention see no more of the tokens ``here`` of a row that are ``deleted``, bool [heads or 1, tokens]."""
        if self._unseen is None:
            places = self.first + self.keys.shape[2]
            self._unseen = self.keys.new_zeros(*self.keys.shape[:2], places, dtype=torch.bool)
        self._unseen[row, :, here] = deleted.to(self._unseen.device)

    def restore(self, row: int, start: int) -> None:
        """Undo what was deleted of a row from place ``start`` on."""
        if self._unseen is not None:
            self._unseen[row, :, start:] = False

    def deleted(self) -> torch.Tensor | None:
        """What attention must not see of the rows in use, bool [rows, heads, length of the longest]; None: nothing."""
        return None if self._unseen is None else self._unseen[: self.rows, :, : self.length]

    def read_blocks(self, row: int, reading: Reading) -> None:
        """Let the queries of a row read of the tokens that it holds now what ``reading`` chooses by their summary."""
        tokens = self.lengths[row]
        summary = reading.summary(self.part(row, slice(0, tokens))[0])
        self._reading[self.book[row].index] = reading, summary, tokens

    def unread(self, queries: torch.Tensor) -> torch.Tensor | None:
        """What each of the queries [rows, heads, new, head_dim] leaves unread, bool [rows, kv_heads, new, places].

        None: all rows read all. Counts what is read.
        """
        readers = [
            (place, row) for place, row in enumerate(self.book[: self.rows]) if row.index in self._reading
        ]
        if not readers:
            return None
        new = queries.shape[2]
        left = queries.new_zeros(self.rows, self.kv_heads, new, self.length, dtype=torch.bool)
        for place, row in readers:
            reading, summary, tokens = self._reading[row.index]
            chosen = reading.chosen(queries[place], summary, tokens)
            read = chosen.repeat_interleave(reading.block, dim=-1)[..., :tokens]
            left[place, :, :, :tokens] = ~read
            counted = self.kv_heads * new
            row.read = (row.read[0] + read.float().mean().item() * counted, row.read[1] + counted)
        return left

    def count_deleted(self, row: int) -> float:
        """Tokens of a row that were deleted, as a mean over heads."""
        return 0.0 if self._unseen is None else self._unseen[row].sum().item() / self._unseen.shape[1]

    def move_row(self, source: int, target: int) -> None:
        """Overwrite row ``target`` with row ``source``."""
        held = self.lengths[source] - self.first
        for buffer in (self.keys, self.values):
            buffer[target, :, :held].copy_(buffer[source, :, :held])
        if self._unseen is not None:
            self._unseen[target].copy_(self._unseen[source])
        self.lengths[target] = self.lengths[source]

    def swap_rows(self, one: int, other: int) -> None:
        """Let two rows change places."""
        held = max(self.lengths[one], self.lengths[other]) - self.first
        for buffer in (self.keys, self.values):
            aside = buffer[one, :, :held].clone()
            buffer[one, :, :held].copy_(buffer[other, :, :held])
            buffer[other, :, :held].copy_(aside)
        if self._unseen is not None:
            self._unseen[[one, other]] = self._unseen[[other, one]]
        self.lengths[one], self.lengths[other] = self.lengths[other], self.lengths[one]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys seen by the next ``query_length`` queries, and the position of the first of them."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens stored in the longest row."""
        return self.length

    def get_max_length(self) -> int:
        """Tokens that a row can hold."""
        return self.capacity


class StatefulRowLayer(RowLayer, StateRows):
    """A layer that attends to stored tokens and keeps a state beside them."""

    def __init__(self, number_of_states: int, sliding: bool = False):
        RowLayer.__init__(self, sliding)
        StateRows.__init__(self, number_of_states)

    def reserve_states(self, rows: int) -> None:
        """See ``StateRows``."""
        device, dtype = getattr(self, "device", None), getattr(self, "dtype", None)
        StateRows.reserve_states(self, rows)
        self.device, self.dtype = device, dtype

    def lazy_initialization(self, *tokens: torch.Tensor, **states: Any) -> None:
        """Of keys and values where these are given, else of a state."""
        (RowLayer if tokens else StateRows).lazy_initialization(self, *tokens, **states)
