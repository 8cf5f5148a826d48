"""The keys, or the values, of one layer: packed tokens of every row, then an open buffer."""

import torch
from torch import Tensor

from semkv_bench.packed.ranking import Layouts
from semkv_bench.quantizers import Coder
from semkv_bench.quantizers.packing import Packed, joined, shortened

__all__ = ["OPEN_STEP", "PackedTensor", "empty_buffer"]

OPEN_STEP = 8  # tokens by which an open buffer grows


def empty_buffer(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Uninitialised memory that may be written in and out of inference mode."""
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=like.dtype, device=like.device)


class PackedTensor:
    """Tokens [rows, heads, tokens, head_dim], the first of them coded unless ``coder`` is None.

    aside   tokens before all others that are never coded, [rows, heads, n, head_dim] in the model's own type
    rows    packed pieces of every row; a piece that ends within a block is followed by another piece
    opened  tokens in the open buffer [rows, heads, capacity, head_dim], in the model's own type
    settled tokens of every row before the open ones, padding included; 0 of a side without a coder
    """

    def __init__(self, coder: Coder | None, like: Tensor):
        self.coder = coder
        self.settled = 0
        self.rows: list[list[Packed]] = [[] for _ in range(len(like))]
        self.buffer = empty_buffer((like.shape[0], like.shape[1], 0, like.shape[3]), like)
        self.aside = self.buffer
        self.opened = 0

    @property
    def open(self) -> Tensor:
        """What is not coded yet, or never will be: [rows, heads, opened, head_dim]."""
        return self.buffer[:, :, : self.opened]

    @property
    def plain_nbytes(self) -> int:
        """Bytes of the tokens in the model's own type, room for new ones included."""
        return self.buffer.nbytes + self.aside.nbytes

    def put_aside(self, tokens: int) -> None:
        """Make the first ``tokens`` open tokens ones that are never coded; nothing is coded before them."""
        if tokens:
            self.aside = torch.cat([self.aside, self.open[:, :, :tokens]], dim=2)
            self.drop(tokens)

    def crop_aside(self, tokens: int) -> None:
        """Keep the first ``tokens`` of the tokens that are never coded."""
        self.aside = self.aside[:, :, :tokens].clone()

    def append(self, states: Tensor) -> None:
        """Add states [rows, heads, new, head_dim] to the open buffer."""
        new = states.shape[2]
        if self.opened + new > self.buffer.shape[2]:
            self._resize(self.opened + new)
        self.opened += new
        self.buffer[:, :, self.opened - new : self.opened].copy_(states)

    def code_row(
        self, row: int, x: Tensor, levels: Tensor, layouts: Layouts, pair: tuple[Tensor, Tensor] | None
    ) -> None:
        """Code x [heads, tokens, head_dim] at levels int64 [tokens], the next tokens of one row.

        pair: levels of keys and values, where attention is to read the codes themselves.
        """
        if pair is None:
            packed = self.coder.pack(x, levels, layouts.layout)
        else:
            layout = layouts.aligned(levels, pair, *x.shape[::2])
            packed = self.coder.pack(layout.sort(x), layout.sort(levels[None])[0], lambda *_: layout)
        pieces = self.rows[row]
        if pieces and pieces[-1].divisible and packed.divisible:
            last = pieces[-1]
            # Small pieces fill a block of the layout together; their codes move and stay what they are.
            if type(last.layouts[0]) is type(packed.layouts[0]) and layouts.joins(
                last.layouts[0], packed.tokens
            ):
                packed = joined(last, packed, layouts.joined)
                pieces = pieces[:-1]
        # Never in place: rows of a beam search may share one list.
        self.rows[row] = [*pieces, packed]

    def drop(self, tokens: int) -> None:
        """Remove the first ``tokens`` tokens from the open buffer: they are settled."""
        kept = self.open[:, :, tokens:]
        self.opened -= tokens
        self.settled += tokens
        self._resize(self.opened, kept)

    def write(self, out: Tensor, padding: list[int]) -> Tensor:
        """Fill out [rows, heads, tokens, head_dim] with all tokens, zeros where a row is padded."""
        first_open = out.shape[2] - self.opened
        for row, pieces in enumerate(self.rows):
            start = self.aside.shape[2]
            if start:
                out[row, :, :start].copy_(self.aside[row])
            else:
                start = padding[row] if pieces else first_open
                out[row, :, :start].zero_()
            for packed in pieces:
                end = start + packed.tokens
                self.coder.unpack_into(packed, out[row, :, start:end])
                start = end
        out[:, :, first_open:].copy_(self.open)
        return out

    def crop_coded(self, tokens: list[int], layouts: Layouts) -> None:
        """Keep the first ``tokens[row]`` coded tokens of every row, with the codes that they have."""
        for row, left in enumerate(tokens):
            kept = []
            for packed in self.rows[row]:
                count = min(left, packed.tokens)
                left -= count
                if count == packed.tokens:
                    kept.append(packed)
                elif count:
                    kept.append(shortened(packed, count, layouts.shortened))
            self.rows[row] = kept

    def select(self, rows: list[int]) -> None:
        """Make ``rows`` the new rows; equal ones share their packed tokens."""
        self.rows = [self.rows[row] for row in rows]
        chosen = torch.tensor(rows, device=self.buffer.device)
        self.buffer, self.aside = self.buffer[chosen], self.aside[chosen]

    def _resize(self, tokens: int, kept: Tensor | None = None) -> None:
        kept = self.buffer if kept is None else kept
        rows, heads, _, head_dim = self.buffer.shape
        capacity = -(-tokens // OPEN_STEP) * OPEN_STEP
        larger = empty_buffer((rows, heads, capacity, head_dim), self.buffer)
        larger[:, :, : kept.shape[2]].copy_(kept)
        self.buffer = larger
