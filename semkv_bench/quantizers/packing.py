"""How a cache stores what was coded together: streams of packed codes, and metadata as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from semkv_bench import kernels
from semkv_bench.kernels import PackedLayout
from semkv_bench.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["LayoutOf", "Packed", "Stream", "joined", "shortened"]

LayoutOf = Callable[["Tensor", int, int], PackedLayout]
"""From the number of codes of every token, int64 [tokens], heads, and codes of a vector to their layout."""


@dataclass(frozen=True, eq=False)
class Stream:
    """Packed codes: words int32 that lie as ``layout`` says."""

    layout: PackedLayout
    words: Tensor

    @classmethod
    def of(cls, codes: Tensor, layout: PackedLayout) -> Stream:
        """From codes uint8 [heads, tokens, values of a vector]."""
        return cls(layout, kernels.pack(codes, layout))

    def codes(self) -> Tensor:
        """Codes uint8 [heads, tokens, values of a vector]."""
        return kernels.unpack(self.words, self.layout)


@dataclass(frozen=True, eq=False)
class Packed:
    """One side of ``tokens`` tokens of one row.

    streams   their codes; most coders have one stream
    by_token  metadata tensors of every token, tokens on the second axis: [heads, tokens, ...]
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
    def layouts(self) -> tuple[PackedLayout, ...]:
        """Layout of every stream."""
        return tuple(stream.layout for stream in self.streams)

    @property
    def divisible(self) -> bool:
        """Can tokens be taken off, and others be joined?"""
        return not self.shared


def joined(
    first: Packed, second: Packed, join: Callable[[PackedLayout, PackedLayout], PackedLayout]
) -> Packed:
    """Both, one after the other, no code changed; ``join`` gives the layout of the tokens of two.

    Raises ValueError if either has metadata that its tokens share.
    """
    if not (first.divisible and second.divisible):
        raise ValueError("tokens that share metadata are stored by themselves")
    streams = []
    for one, other in zip(first.streams, second.streams, strict=True):
        layout = join(one.layout, other.layout)
        if one.layout.tokens % one.layout.block == 0:
            # Blocks lie one after the other and know nothing of each other.
            streams.append(Stream(layout, torch.cat([one.words, other.words])))
        else:
            streams.append(Stream.of(torch.cat([one.codes(), other.codes()], dim=1), layout))
    pairs = zip(first.by_token, second.by_token, strict=True)
    by_token = tuple(torch.cat(pair, dim=1) for pair in pairs)
    return Packed(first.tokens + second.tokens, tuple(streams), by_token)


def shortened(packed: Packed, tokens: int, shorten: Callable[[PackedLayout, int], PackedLayout]) -> Packed:
    """The first ``tokens`` tokens with the codes that they have; ``shorten`` gives their layout.

    Tokens that share metadata stay stored, and are no longer read.
    """
    if not packed.divisible:
        return replace(packed, tokens=tokens)
    streams = tuple(
        Stream.of(stream.codes()[:, :tokens].contiguous(), shorten(stream.layout, tokens))
        for stream in packed.streams
    )
    return Packed(tokens, streams, tuple(part[:, :tokens].contiguous() for part in packed.by_token))
