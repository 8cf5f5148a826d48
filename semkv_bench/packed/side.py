"""The keys, or the values, of one layer: packed tokens of every row, then an open buffer."""

import torch
from torch import Tensor

from semkv_bench.kernels import PackedLayout, PackedVectors
from semkv_bench.packed.coding import PackedCoder, append, keep_first
from semkv_bench.packed.ranking import Layouts

__all__ = ["OPEN_STEP", "PackedSide", "empty_buffer"]

OPEN_STEP = 8  # tokens by which an open buffer grows


def empty_buffer(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Uninitialised memory that may be written in and out of inference mode."""
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=like.dtype, device=like.device)


class PackedSide:
    """Tokens [rows, heads, tokens, head_dim], the first of them coded unless ``coder`` is None.

    rows   packed pieces of every row; a piece that ends within a block is followed by another piece
    opened tokens in the open buffer [rows, heads, capacity, head_dim], in the model's own type
    """

    def __init__(self, coder: PackedCoder | None, like: Tensor):
        self.coder = coder
        self.rows: list[list[PackedVectors]] = [[] for _ in range(len(like))]
        self.buffer = empty_buffer((like.shape[0], like.shape[1], 0, like.shape[3]), like)
        self.opened = 0

    @property
    def open(self) -> Tensor:
        """What is not coded yet, or never will be: [rows, heads, opened, head_dim]."""
        return self.buffer[:, :, : self.opened]

    def append(self, states: Tensor) -> None:
        """Add states [rows, heads, new, head_dim] to the open buffer."""
        new = states.shape[2]
        if self.opened + new > self.buffer.shape[2]:
            self._resize(self.opened + new)
        self.opened += new
        self.buffer[:, :, self.opened - new : self.opened].copy_(states)

    def code_row(self, row: int, x: Tensor, levels: Tensor, layout: PackedLayout, layouts: Layouts) -> None:
        """Code x [heads, tokens, head_dim], the next tokens of one row."""
        packed = self.coder.encode(x, levels, layout)
        pieces = self.rows[row]
        if pieces and pieces[-1].layout.tokens % layout.block == 0:
            last = pieces[-1]
            packed = append(last, packed, layouts.joined(last.layout, layout))
            pieces = pieces[:-1]
        # Never in place: rows of a beam search may share one list.
        self.rows[row] = [*pieces, packed]

    def drop(self, tokens: int) -> None:
        """Remove the first ``tokens`` tokens from the open buffer."""
        kept = self.open[:, :, tokens:]
        self.opened -= tokens
        self._resize(self.opened, kept)

    def write(self, out: Tensor, padding: list[int]) -> Tensor:
        """Fill out [rows, heads, tokens, head_dim] with all tokens, zeros where a row is padded."""
        first_open = out.shape[2] - self.opened
        for row, pieces in enumerate(self.rows):
            start = padding[row] if pieces else first_open
            out[row, :, :start].zero_()
            for packed in pieces:
                end = start + packed.layout.tokens
                out[row, :, start:end].copy_(self.coder.decode(packed, out.dtype))
                start = end
        out[:, :, first_open:].copy_(self.open)
        return out

    def crop_coded(self, tokens: list[int], layouts: Layouts) -> None:
        """Keep the first ``tokens[row]`` coded tokens of every row, with the codes that they have."""
        for row, left in enumerate(tokens):
            kept = []
            for packed in self.rows[row]:
                count = min(left, packed.layout.tokens)
                left -= count
                if count == packed.layout.tokens:
                    kept.append(packed)
                elif count:
                    kept.append(keep_first(packed, layouts.shortened(packed.layout, count)))
            self.rows[row] = kept

    def select(self, rows: list[int]) -> None:
        """Make ``rows`` the new rows; equal ones share their packed tokens."""
        self.rows = [self.rows[row] for row in rows]
        self.buffer = self.buffer[torch.tensor(rows, device=self.buffer.device)]

    def _resize(self, tokens: int, kept: Tensor | None = None) -> None:
        kept = self.buffer if kept is None else kept
        rows, heads, _, head_dim = self.buffer.shape
        capacity = -(-tokens // OPEN_STEP) * OPEN_STEP
        larger = empty_buffer((rows, heads, capacity, head_dim), self.buffer)
        larger[:, :, : kept.shape[2]].copy_(kept)
        self.buffer = larger
