"""Stretches of tokens of several rows, each at its own place, read and written by one copy."""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

__all__ = ["Stretches", "stretches"]


@dataclass(frozen=True, eq=False)
class Stretches:
    """``tokens`` tokens of each of some rows of a buffer [rows, heads, tokens, head_dim].

    starts: row and first token of each. device: of the buffer.
    """

    starts: tuple[tuple[int, int], ...]
    tokens: int
    device: torch.device

    @cached_property
    def block(self) -> tuple[slice, slice] | None:
        """The same as slices of rows and of tokens, where rows follow each other and begin at one place."""
        rows, firsts = zip(*self.starts, strict=True)
        if len(set(firsts)) > 1 or rows != tuple(range(rows[0], rows[0] + len(rows))):
            return None
        return slice(rows[0], rows[0] + len(rows)), slice(firsts[0], firsts[0] + self.tokens)

    @cached_property
    def index(self) -> tuple[Tensor, Tensor]:
        """Rows int64 [n, 1] and places int64 [n, tokens]."""
        rows, firsts = torch.tensor(self.starts).to(self.device).T[..., None]
        return rows, firsts + torch.arange(self.tokens, device=self.device)

    def take(self, buffer: Tensor) -> Tensor:
        """Their values [n, heads, tokens, head_dim]: a view of the buffer, or a copy."""
        if self.block is not None:
            return buffer[self.block[0], :, self.block[1]]
        rows, places = self.index
        return buffer[rows, :, places].transpose(1, 2)

    def put(self, buffer: Tensor, values: Tensor) -> None:
        """Write values [n, heads, tokens, head_dim] there."""
        if self.block is not None:
            buffer[self.block[0], :, self.block[1]].copy_(values)
        else:
            rows, places = self.index
            buffer[rows, :, places] = values.transpose(1, 2)


@lru_cache(maxsize=8)
def stretches(starts: tuple[tuple[int, int], ...], tokens: int, device: torch.device) -> Stretches:
    """``Stretches`` that all layers of a step share, for what they upload."""
    return Stretches(starts, tokens, device)
