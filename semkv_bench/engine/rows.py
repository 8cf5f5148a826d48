"""Caches that transformers models accept: all layers' rows, and what queries at rows of their own length see."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import lt

import torch
from transformers.cache_utils import Cache
from transformers.configuration_utils import PreTrainedConfig

from semkv_bench.engine.row_layer import Row, RowLayer, StatefulRowLayer
from semkv_bench.engine.states import NoLayer, State, StateRows
from semkv_bench.errors import UsageError
from semkv_bench.models.layers import CacheLayer, cache_layers

__all__ = ["Mark", "RowCache", "row_mask"]


def row_mask(
    config: PreTrainedConfig, places: torch.Tensor, keys: int
) -> torch.Tensor | dict[str, torch.Tensor | None]:
    """What queries at ``places`` [rows, new] of rows of their own length see, bool [rows, 1, new, keys].

    The keys up to a query's own place, and of these what the kind of attention lets it; where a model has layers
    of several kinds, a mask for each.
    """
    layers = {layer.kind: layer for layer in cache_layers(config)}
    key, query = torch.arange(keys, device=places.device), places[:, None, :, None]
    masks: dict[str, torch.Tensor | None] = {}
    for kind, layer in sorted(layers.items()):
        if not layer.attends:
            # What keeps a state sees every token that is fed; no mask says so.
            masks[kind] = None
            continue
        seen = key <= query
        if layer.window is not None and kind == "chunked_attention":
            seen &= key // layer.window == query // layer.window
        elif layer.window is not None:
            seen &= key > query - layer.window
        masks[kind] = seen
    return masks if len(masks) > 1 else masks[next(iter(masks))]


@dataclass(frozen=True)
class Mark:
    """What a row returns to: copies of its bookkeeping, its length, its open tokens of every layer, and its states."""

    book: Row
    length: int
    opened: list[tuple[torch.Tensor, torch.Tensor]]
    states: list[State]


class RowCache(Cache):
    """A cache of rows that begin with the same prompt and are decoded together.

    Rows that have ended leave by ``drop``, or wait for a later turn by ``park``: the last row in use takes
    their place, so that the rows in use stay at the front of the buffer and nothing else is copied.
    """

    def __init__(self, config: PreTrainedConfig):
        super().__init__(layers=[self._layer(layer) for layer in cache_layers(config)])
        self.book: list[Row] = []
        self._config = config
        self.attending = {i: layer for i, layer in enumerate(self.layers) if isinstance(layer, RowLayer)}
        self.recurrent = {i: layer for i, layer in enumerate(self.layers) if isinstance(layer, StateRows)}
        if not self.attending:
            raise UsageError("no layer of the model has keys and values")
        self._first = next(iter(self.attending.values()))

    def _layer(self, layer: CacheLayer) -> RowLayer | StateRows | NoLayer:
        sliding = layer.window is not None
        if layer.attends:
            return StatefulRowLayer(layer.states, sliding) if layer.states else RowLayer(sliding)
        return StateRows(layer.states) if layer.states else NoLayer()

    @property
    def rows(self) -> list[Row]:
        """Bookkeeping of the rows in use."""
        return self.book[: self._first.rows]

    @property
    def lengths(self) -> list[int]:
        """Tokens stored in every row in use."""
        return self._first.lengths[: self._first.rows]

    def opened(self, row: int) -> int:
        """Tokens of a row that may still become coded."""
        return self._first.lengths[row] - self.book[row].open_from

    def count_deleted(self, row: int) -> float:
        """Tokens of a row that were deleted, as a mean over layers and heads."""
        counts = [layer.count_deleted(row) for layer in self.attending.values()]
        return sum(counts) / len(counts)

    def reserve(self, rows: int, capacity: int) -> None:
        """Start anew with ``rows`` rows of up to ``capacity`` tokens each."""
        self.book = [Row(index) for index in range(rows)]
        for layer in self.attending.values():
            layer.reserve(rows, capacity, self.book)
        for layer in self.recurrent.values():
            layer.reserve_states(rows)

    def resume(self, tokens: int, capacity: int) -> None:
        """Start anew with one row of up to ``capacity`` tokens, which keeps the first row's first ``tokens`` tokens.

        Raises ValueError where states would have to go back.
        """
        if not tokens:
            return self.reserve(1, capacity)
        if self.recurrent:
            raise ValueError("recurrent states cannot be rewound")
        self.book = [Row(0)]
        for layer in self.attending.values():
            layer.resume(tokens, capacity, self.book)

    def beginning(self, tokens: int, room: int) -> "RowCache":
        """A copy of the first row's first ``tokens`` tokens, with room for more; it has no states."""
        copied = RowCache(self._config)
        copied.reserve(1, tokens + room)
        for index, target in copied.attending.items():
            stored = tuple(side[:1, :, :tokens] for side in self.attending[index].stored())
            for view, states in zip(target.take(tokens, like=stored), stored, strict=True):
                view.copy_(states)
        return copied

    def alone(self, row: int, tokens: int) -> "RowCache":
        """The first ``tokens`` tokens of a row as a cache of their own, in the same memory; it has no states."""
        lent = RowCache(self._config)
        lent.reserve(1, tokens)
        for index, layer in self.attending.items():
            layer.lend(row, tokens, lent.attending[index])
        return lent

    def take_states(self, prompt: "RowCache") -> None:
        """Give every row the recurrent states that the only row of ``prompt`` has."""
        for index, layer in self.recurrent.items():
            layer.copy_states(prompt.recurrent[index])

    def rewind(self, length: int | Sequence[int]) -> None:
        """Keep the first ``length`` tokens of every row in use; or a number for each."""
        lengths = [length] * self._first.rows if isinstance(length, int) else length
        if self.recurrent and any(map(lt, lengths, self.lengths)):
            raise ValueError("recurrent states cannot be rewound")
        for layer in self.attending.values():
            layer.rewind(lengths)

    def drop(self, ended: Sequence[int]) -> list[int]:
        """Let the rows ``ended`` leave.

        Returns the old indices of the rows that stay, in their new order.
        """
        return self._leave(ended, "move_row", "move_state")

    def park(self, ended: Sequence[int]) -> list[int]:
        """As ``drop``, but the rows can be brought back by ``unpark``."""
        return self._leave(ended, "swap_rows", "swap_states")

    def unpark(self) -> None:
        """Bring all rows back that were parked, in the order that they have now."""
        self._use(len(self.book))

    def mark(self, lengths: Sequence[int] | None = None) -> list[Mark]:
        """The state of every row in use, its open tokens copied; with ``lengths``, as if rows ended there."""
        marks = []
        for number, (row, length) in enumerate(zip(self.rows, lengths or self.lengths, strict=True)):
            here = slice(max(row.open_from, self._first.first), length)
            opened = [
                tuple(side.clone() for side in layer.part(number, here)) for layer in self.attending.values()
            ]
            states = [layer.row_state(number) for layer in self.recurrent.values()]
            marks.append(Mark(replace(row), length, opened, states))
        return marks

    def return_to(self, marks: Sequence[Mark]) -> None:
        """Undo all that was fed and coded since ``marks``; the rows may have changed places."""
        found = {mark.book.index: mark for mark in marks}
        for number, row in enumerate(self.rows):
            mark = found[row.index]
            here = slice(max(mark.book.open_from, self._first.first), mark.length)
            for layer, opened in zip(self.attending.values(), mark.opened, strict=True):
                layer.lengths[number] = mark.length
                layer.restore(number, mark.book.open_from)
                for side, before in zip(layer.part(number, here), opened, strict=True):
                    side.copy_(before)
            for layer, state in zip(self.recurrent.values(), mark.states, strict=True):
                layer.set_row_state(number, state)
            vars(row).update(vars(mark.book))

    def _use(self, rows: int) -> None:
        for layer in self.attending.values():
            layer.rows = rows
        for layer in self.recurrent.values():
            layer.state_rows = rows

    def _leave(self, ended: Sequence[int], how: str, how_states: str) -> list[int]:
        order = list(range(self._first.rows))
        for row in sorted(ended, reverse=True):
            last = len(order) - 1
            if row != last:
                for layer in self.attending.values():
                    getattr(layer, how)(last, row)
                for layer in self.recurrent.values():
                    getattr(layer, how_states)(last, row)
                self.book[row], self.book[last] = self.book[last], self.book[row]
                order[row] = order[last]
            order.pop()
            self._use(last)
        return order

    @property
    def nbytes(self) -> int:
        """Bytes of the allocated buffers."""
        attending = (layer for layer in self.attending.values() if layer.is_initialized)
        tokens = sum(side.nbytes for layer in attending for side in (layer.keys, layer.values))
        return tokens + sum(layer.state_nbytes for layer in self.recurrent.values())
