"""Rows that hold of the prompt no more than their codes: for prompts whose caches fill a memory by themselves.

What a row keeps of the prompt in 16 bits is the same in all rows, and is read from the prompt's own cache. One layer's
keys and values at a time are written out for attention. What follows the prompt lies in buffers, as in other rows.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.configuration_utils import PreTrainedConfig

from semkv_bench.engine.row_layer import Row, RowLayer, allocated
from semkv_bench.engine.rows import RowCache
from semkv_bench.engine.states import NoLayer, StateRows
from semkv_bench.errors import UsageError
from semkv_bench.kernels import PackedLayout
from semkv_bench.models.layers import CacheLayer
from semkv_bench.quantizers import Coder
from semkv_bench.quantizers.packing import Packed

__all__ = ["PackedRowLayer", "PackedRows"]

_Held = tuple[Coder, range, Packed]


class _Workspace:
    """One layer's keys and values of all rows, written out; kept for the next layer."""

    def __init__(self) -> None:
        self._buffers: dict[tuple, Tensor] = {}

    def room(self, side: int, shape: Sequence[int], like: Tensor) -> Tensor:
        """Memory of ``shape`` [rows, heads, tokens, head_dim], its content undefined, for keys (0) or values (1)."""
        rows, heads, tokens, head_dim = shape
        key, needed = (side, like.dtype, like.device), rows * heads * tokens * head_dim
        if key not in self._buffers or self._buffers[key].numel() < needed:
            self._buffers.pop(key, None)
            self._buffers[key] = like.new_empty(rows * heads * allocated(tokens) * head_dim)
        return self._buffers[key][:needed].view(*shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())


class PackedRowLayer(RowLayer):
    """As ``RowLayer``, but of the prompt every row has codes and metadata alone.

    The buffers hold what comes after token ``first``. Tokens before it that a row does not hold coded are those of the
    prompt's cache, which must stay as it is while the rows are used.
    """

    packs = True

    def __init__(self, workspace: _Workspace, sliding: bool = False):
        super().__init__(sliding)
        self._workspace = workspace
        self._prompt: tuple[Tensor, Tensor] | None = None
        self._held: tuple[list[_Held | None], list[_Held | None]] = ([], [])
        self._layouts: dict[tuple, PackedLayout] = {}

    def reserve(self, rows: int, capacity: int, book: list[Row]) -> None:
        """See ``RowLayer``; the buffers are seen to when it is known where they begin."""
        self.rows, self.lengths, self.book, self.capacity = rows, [0] * rows, book, capacity
        self._unseen, self._reading = None, {}
        self._prompt, self._held, self._layouts = None, ([None] * rows, [None] * rows), {}

    def begin(self, stored: tuple[Tensor, Tensor], settled: int) -> None:
        """See ``RowLayer``."""
        self.first, self._prompt = settled, stored
        if self.is_initialized and (
            len(self.keys) < self.rows or self.keys.shape[2] < self.capacity - self.first
        ):
            self.keys = self.values = None
            self.is_initialized = False
        if not self.is_initialized:
            self.lazy_initialization(*stored)
        self.lengths = [stored[0].shape[2]] * self.rows

    def keep(self, side: int, rows: slice, states: Tensor) -> None:
        """See ``RowLayer``: what the buffers do not hold is the prompt's own."""
        opened = states[:, :, self.first :]
        (self.keys, self.values)[side][rows, :, : opened.shape[2]].copy_(opened)

    def pack(self, side: int, row: int, coder: Coder, span: range, x: Tensor, levels: Tensor) -> None:
        """Hold the tokens ``span`` of a row as codes of x [heads, tokens, head_dim] at levels int64 [tokens]."""
        packed = coder.pack(x, levels, self._layout)
        self._held[side][row] = coder, span, packed
        opened = span.stop - self.first
        if opened > 0:
            values = coder.unpack(packed, x.dtype)[:, self.first - span.start :]
            (self.keys, self.values)[side][row, :, :opened].copy_(values)

    def _layout(self, levels: Tensor, heads: int, head_dim: int) -> PackedLayout:
        """Where codes lie, once for all rows that have these levels."""
        counts = levels.unique()
        key = (len(levels), int(counts[0]), heads, head_dim)
        if len(counts) > 1:
            return PackedLayout.build(levels, heads, head_dim)
        if key not in self._layouts:
            self._layouts[key] = PackedLayout.build(levels, heads, head_dim)
        return self._layouts[key]

    def stored(self) -> tuple[Tensor, Tensor]:
        """See ``RowLayer``: written out, valid until another layer is asked."""
        return self._written(0), self._written(1)

    def part(self, row: int, here: slice) -> tuple[Tensor, Tensor]:
        """See ``RowLayer``; of tokens before ``first`` a copy."""
        if here.start >= self.first:
            inside = slice(here.start - self.first, here.stop - self.first)
            return self.keys[row, :, inside], self.values[row, :, inside]
        sides = []
        for side, buffer in enumerate((self.keys, self.values)):
            before = buffer.new_empty(buffer.shape[1], self.first, buffer.shape[3])
            self._write_prompt(side, row, before)
            after = buffer[row, :, : max(0, here.stop - self.first)]
            sides.append(torch.cat([before[:, here.start : here.stop], after], dim=1))
        return sides[0], sides[1]

    def _written(self, side: int) -> Tensor:
        buffer = (self.keys, self.values)[side]
        _, heads, _, head_dim = buffer.shape
        out = self._workspace.room(side, (self.rows, heads, self.length, head_dim), buffer)
        for row in range(self.rows):
            self._write_prompt(side, row, out[row, :, : self.first])
        out[:, :, self.first :].copy_(buffer[: self.rows, :, : self.length - self.first])
        return out

    def _write_prompt(self, side: int, row: int, out: Tensor) -> None:
        """Fill out [heads, first, head_dim] with a row's tokens before ``first``."""
        held, plain = self._held[side][row], self._prompt[side][0]
        start = stop = 0
        if held is not None:
            coder, span, packed = held
            start, stop = min(span.start, self.first), min(span.stop, self.first)
            out[:, start:stop].copy_(coder.unpack(packed, out.dtype)[:, : stop - start])
        out[:, :start].copy_(plain[:, :start])
        out[:, stop:].copy_(plain[:, stop : self.first])

    def move_row(self, source: int, target: int) -> None:
        """See ``RowLayer``."""
        super().move_row(source, target)
        for held in self._held:
            held[target] = held[source]

    def swap_rows(self, one: int, other: int) -> None:
        """See ``RowLayer``."""
        super().swap_rows(one, other)
        for held in self._held:
            held[one], held[other] = held[other], held[one]

    @property
    def code_nbytes(self) -> int:
        """Bytes of codes and metadata, and of where codes lie."""
        held = [entry[2] for side in self._held for entry in side if entry is not None]
        layouts = {id(layout): layout for packed in held for layout in packed.layouts}
        return sum(packed.nbytes for packed in held) + sum(layout.nbytes for layout in layouts.values())


class PackedRows(RowCache):
    """A ``RowCache`` of such layers."""

    def __init__(self, config: PreTrainedConfig):
        self._workspace = _Workspace()
        super().__init__(config)

    def _layer(self, layer: CacheLayer) -> RowLayer | StateRows | NoLayer:
        if not layer.attends:
            return super()._layer(layer)
        if layer.states:
            raise UsageError("attention layers that keep states beside their tokens cannot be packed")
        return PackedRowLayer(self._workspace, layer.window is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, buffers and what attention is given."""
        packed = sum(layer.code_nbytes for layer in self.attending.values())
        return super().nbytes + packed + self._workspace.nbytes
