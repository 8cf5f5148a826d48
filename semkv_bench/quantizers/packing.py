"""How a cache stores what was coded together: streams of packed codes, and metadata as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from semkv_bench import kernels
from semkv_bench.kernels import AlignedLayout, PackedLayout
from semkv_bench.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["Layout", "LayoutOf", "Packed", "Stream", "joined", "shortened"]

Layout = PackedLayout | AlignedLayout
"""Where codes lie: densely, or aligned for attention, which may have tokens in an order of its own."""

LayoutOf = Callable[["Tensor", int, int], Layout]
"""From the number of codes of every token, int64 [tokens], heads, and codes of a vector to their layout."""


@dataclass(frozen=True, eq=False)
class Stream:
    """Packed codes: words int32 that lie as ``layout`` says."""

    layout: Layout
    words: Tensor

    @classmethod
    def of(cls, codes: Tensor, layout: Layout) -> Stream:
        """From codes uint8 [heads, tokens, values of a vector], tokens as they lie."""
        return cls(layout, kernels.pack(codes, layout))

    def codes(self) -> Tensor:
        """Codes uint8 [heads, tokens, values of a vector], tokens as they lie."""
        return kernels.unpack(self.words, self.layout)


@dataclass(frozen=True, eq=False)
class Packed:
    """One side of ``tokens`` tokens of one row.

    streams   their codes; most coders have one stream
    by_token  metadata tensors of every token, tokens on the second axis: [heads, tokens, ...], as they lie
    shared    metadata tensors that the tokens share; they cannot be taken apart
    """

    tokens: int
    streams: tuple[Stream, ...]
    by_token: tuple[Tensor, ...] = ()
    shared: tuple[Tensor, ...] = ()

    @property
    def code_nbytes(self) -> int:
        """Bytes of the codes."""
        return sum(stream.words.nbytes for stream in self.streams)

    @property
    def metadata_nbytes(self) -> int:
        """Bytes of the metadata."""
        return sum(part.nbytes for part in (*self.by_token, *self.shared))

    @property
    def nbytes(self) -> int:
        """Bytes of codes and metadata, without the layouts, which keys and values may share."""
        return self.code_nbytes + self.metadata_nbytes

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Layout of every stream."""
        return tuple(stream.layout for stream in self.streams)

    @property
    def divisible(self) -> bool:
        """Can tokens be taken off, and others be joined?"""
        return not self.shared


def joined(first: Packed, second: Packed, join: Callable[[Layout, Layout], Layout]) -> Packed:
    """Both, one after the other, no code changed; ``join`` gives the layout of the tokens of two.

    Raises ValueError if either has metadata that its tokens share.
    """
    if not (first.divisible and second.divisible):
        raise ValueError("tokens that share metadata are stored by themselves")
    streams = []
    for one, other in zip(first.streams, second.streams, strict=True):
        layout = join(one.layout, other.layout)
        if one.layout.ends_block:
            streams.append(Stream(layout, torch.cat([one.words, other.words])))
        else:
            codes = [stream.layout.unsort(stream.codes()) for stream in (one, other)]
            streams.append(Stream.of(layout.sort(torch.cat(codes, dim=1)), layout))
    ends = [packed.layouts[0] for packed in (first, second)]
    by_token = tuple(
        streams[0].layout.sort(
            torch.cat([end.unsort(part) for end, part in zip(ends, pair, strict=True)], dim=1)
        )
        for pair in zip(first.by_token, second.by_token, strict=True)
    )
    return Packed(first.tokens + second.tokens, tuple(streams), by_token)


def shortened(packed: Packed, tokens: int, shorten: Callable[[Layout, int], Layout]) -> Packed:
    """The first ``tokens`` tokens with the codes that they have; ``shorten`` gives their layout.

    Tokens that share metadata stay stored, and are no longer read.
    """
    if not packed.divisible:
        return replace(packed, tokens=tokens)
    streams, before = [], packed.layouts[0]
    for stream in packed.streams:
        layout = shorten(stream.layout, tokens)
        codes = stream.layout.unsort(stream.codes())[:, :tokens]
        streams.append(Stream.of(layout.sort(codes).contiguous(), layout))
    kept = (before.unsort(part)[:, :tokens] for part in packed.by_token)
    return Packed(tokens, tuple(streams), tuple(streams[0].layout.sort(part).contiguous() for part in kept))
