"""How one side of a method codes: unit by unit, through its steps, groups and code."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from semkv_bench.errors import SemkvError, UsageError
from semkv_bench.kernels import PackedVectors
from semkv_bench.kernels.numerics import check_rows, finite_cast, note_finite
from semkv_bench.lazy import torch
from semkv_bench.quantizers.base import Coder, Encoded
from semkv_bench.quantizers.groups import CLASS
from semkv_bench.quantizers.packing import LayoutOf, Packed, Stream
from semkv_bench.quantizers.parts import Place
from semkv_bench.quantizers.transforms import Kept

if TYPE_CHECKING:
    from torch import Tensor

    from semkv_bench.quantizers.side import Side


__all__ = ["SideCoder"]


class SideCoder(Coder):
    """Codes pieces of one side as its parts say.

    A piece of tokens falls into units that are coded alone, each [heads, tokens, channels].
    """

    simulated: ClassVar[bool] = True

    def __init__(self, side: Side) -> None:
        self.side = side
        self._prompt: Tensor | None = None
        self._code = side.code
        self._steps = side.transform
        self._pivots: Tensor | None = None
        self._attention: Tensor | None = None

    @property
    def predicts(self) -> bool:
        """See ``Coder``."""
        return self.side.predicts

    def scored(self, scores: Tensor) -> SideCoder:
        """See ``Coder``: attention for a budget, or pivots, which score above 0."""
        made = copy.copy(self)
        if self.side.budget is not None:
            made._attention = scores
        else:
            made._pivots = scores > 0
        return made

    def beside(self, below: Sequence[Tensor]) -> SideCoder:
        """See ``Coder``."""
        made = copy.copy(self)
        made._steps = tuple(step.beside(below) for step in self._steps)
        return made

    def at(self, place: Place) -> SideCoder:
        """See ``Coder``."""
        if not (self.side.calibrated or self.side.positional):
            return self
        return SideCoder(self.side.at(place))

    def placed(self, start: int) -> SideCoder:
        """See ``Coder``."""
        if not self.side.positional:
            return self
        made = copy.copy(self)
        made._steps = tuple(step.placed(start) for step in self._steps)
        return made

    def prepare(self, prompt: Tensor) -> None:
        """See ``Coder``."""
        self._prompt = prompt.float()
        if self._prompt.numel():
            self._code = self.side.code.of_prompt(self._prompt)

    def code_row(self, x: Tensor, levels: Tensor, out: Tensor) -> None:
        """See ``Coder``."""
        check_rows(x, levels)
        if not x.shape[1]:
            return
        y, kept = self._changed(x)
        for count, target in zip(levels, out, strict=True):
            values = self._undone(self._at(y, count.expand(x.shape[1])), kept)
            target.copy_(finite_cast(values, target.dtype))
            if self._pivots is not None:
                target[:, self._pivots] = x[:, self._pivots].to(target.dtype)

    def _changed(self, x: Tensor) -> tuple[Tensor, list[Kept]]:
        """x [heads, tokens, channels] in units [units, heads, tokens, channels], all steps done; what undoes them."""
        note_finite((~torch.isfinite(x).all()).int()[None], now=x.device.type == "cpu")
        tokens = x.shape[1]
        size = self.side.granularity.tokens or tokens
        size = tokens if size == 1 else size
        if tokens % size:
            raise ValueError(f"{tokens} tokens are not whole groups of {size}")
        y = x.float().unflatten(1, (-1, size)).transpose(0, 1)
        kept = []
        for step in self._steps:
            y, stored = step.apply(y, self._prompt)
            kept.append(stored)
        return y, kept

    def _undone(self, y: Tensor, kept: Sequence[Kept]) -> Tensor:
        """Values [heads, tokens, channels] of units."""
        for step, stored in zip(reversed(self._steps), reversed(kept), strict=True):
            y = step.undo(y, stored)
        return y.transpose(0, 1).flatten(1, 2)

    def _at(self, y: Tensor, levels: Tensor) -> Tensor:
        """Values of y [units, heads, tokens, channels] at levels int64 [tokens of all units]."""
        counts = levels.unique().tolist()
        for count in counts:
            self.side.check_levels(count)
        if len(counts) == 1:
            return self._coded(y, counts[0])
        self._check_mixed()
        levels = levels.view(y.shape[0], 1, y.shape[2], 1)
        found = torch.empty_like(y)
        for count in counts:
            here = (levels == count).flatten()
            if self.side.group.tokens == CLASS:
                found[:, :, here] = self._coded(y[:, :, here], count)
            else:
                found = torch.where(levels == count, self._coded(y, count), found)
        return found

    def _check_mixed(self) -> None:
        if not self.side.granularity.mixed:
            raise UsageError(f"{self.side.name}: tokens of one channel group must have one level count")

    def _coded(self, y: Tensor, levels: int) -> Tensor:
        """Values of y at one level count."""
        side, source, mask = self.side, y, None
        if side.outliers is not None:
            source, mask = side.outliers.take(y)
        if side._key_pivots is not None:
            mask = side.pivots.mask(y)
            source = torch.where(mask, _first_other(y, mask), y)
        if side.budget is not None:
            levels = side.budget.levels(source, levels, self._attention)[..., None]
        found = self._grouped(source, levels)
        if side.channels is not None:
            better = self._grouped(source, max(levels, side.channels.levels))
            found = torch.where(side.channels.mask(y), better, found)
        if mask is not None:
            found = torch.where(mask, y, found)
        if side.residual is not None:
            rank = side.residual.of(y.shape[2], side.keep.block)
            found = found + side.residual.term(y - found, rank)
            found = found if mask is None else torch.where(mask, y, found)
        return found

    def _grouped(self, y: Tensor, levels: int | Tensor) -> Tensor:
        group = self.side.group
        return group.join(self._code.quantize_dequantize(group.split(y), levels), y.shape[1])

    def pack(self, x: Tensor, levels: Tensor, layout_of: LayoutOf) -> Packed:
        """See ``Coder``; metadata are those of the groups, then of the steps: of every token, where none are shared."""
        y, kept = self._changed(x)
        layout = layout_of(levels, *x.shape[::2])
        counts = layout.class_levels  # on the host
        if len(counts) > 1:
            self._check_mixed()
        codes, stored = self._encoded(y, counts[0])
        grouped = self.side.group.split(levels.view(y.shape[0], 1, -1, 1).expand(y.shape))[..., :1]
        for count in counts[1:]:
            others = self._encoded(y, count)
            codes = torch.where(grouped == count, others[0], codes)
            stored = tuple(
                torch.where(grouped == count, *pair) for pair in zip(others[1], stored, strict=True)
            )
        codes = self.side.group.join(codes, y.shape[1]).transpose(0, 1).flatten(1, 2)
        metadata = [*stored, *(part for step in kept for part in step)]
        stream = Stream.of(codes.to(torch.uint8).contiguous(), layout)
        if not self._token_by_token:
            return Packed(x.shape[1], (stream,), shared=tuple(part.contiguous() for part in metadata))
        # One unit: [1, heads, tokens, ...].
        return Packed(x.shape[1], (stream,), tuple(part[0].contiguous() for part in metadata))

    def _encoded(self, y: Tensor, levels: int) -> tuple[Tensor, Kept]:
        return self.side.code.encode(self.side.group.split(y), levels)

    @property
    def _token_by_token(self) -> bool:
        """Does no token share what is stored with it, with other tokens or over heads?"""
        group = self.side.group
        return group.axis == "token" and group.heads == "each" and self.side.granularity.tokens == 1

    def unpack(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        """See ``Coder``."""
        (stream,), group = packed.streams, self.side.group
        whole = stream.layout.tokens
        size = self.side.granularity.tokens or whole
        size = whole if size == 1 else size
        units = stream.codes().float().unflatten(1, (-1, size)).transpose(0, 1)
        metadata = list(packed.shared) or [part[None] for part in packed.by_token]
        kept = [metadata[start:stop] for start, stop in self._places(len(metadata))]
        levels = stream.layout.levels().view(units.shape[0], 1, -1, 1).expand(units.shape)
        values = self.side.code.decode(group.split(units), tuple(kept[0]), group.split(levels)[..., :1])
        return finite_cast(self._undone(group.join(values, units.shape[1]), kept[1:]), dtype)

    @property
    def known_to_kernels(self) -> bool:
        """See ``Coder``."""
        return type(self) is SideCoder and self.side.aligned is not None

    def kernel_vectors(self, packed: Packed) -> PackedVectors:
        """See ``Coder``."""
        (stream,), (scale,) = packed.streams, packed.by_token
        code = self.side.code
        scale, element = code.attended_scale(scale.flatten(2)), code.attended_element
        return PackedVectors(stream.layout, stream.words, scale, element=element, whole=code.attended_whole)

    def _places(self, count: int) -> list[tuple[int, int]]:
        """Where the code's metadata lie among ``count`` tensors, then those of every step."""
        sizes = [step.keeps for step in self.side.transform]
        ends = list(itertools.accumulate([count - sum(sizes), *sizes], initial=0))
        return list(itertools.pairwise(ends))

    def encode(self, x: Tensor, levels: Tensor | int) -> Encoded:
        """Raises SemkvError: what is stored hangs on groups of tokens; see ``pack``."""
        raise SemkvError(f"{self.side.name} has no codes token by token; see pack and unpack")

    def decode(self, encoded: Encoded, dtype: torch.dtype) -> Tensor:
        """See ``encode``."""
        raise SemkvError(f"{self.side.name} has no codes token by token; see pack and unpack")


def _first_other(y: Tensor, mask: Tensor) -> Tensor:
    """For every channel the value of the unit's first token that is not marked: it widens no range."""
    first = (~mask).int().argmax(2, keepdim=True).expand(-1, -1, 1, y.shape[-1])
    return y.gather(2, first)
