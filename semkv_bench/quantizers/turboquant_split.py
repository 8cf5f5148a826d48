"""TurboQuant with more levels on outlier channels, the paper's channel axis (arXiv 2504.19874, 4.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from semkv_bench.errors import UsageError
from semkv_bench.grid.cost import SideShape
from semkv_bench.grid.levels import Storage, mix
from semkv_bench.lazy import torch
from semkv_bench.quantizers.base import Coder, Encoded, Quantizer, token_levels
from semkv_bench.quantizers.granularity import TOGETHER, Granularity
from semkv_bench.quantizers.packing import LayoutOf, Packed
from semkv_bench.quantizers.turboquant import TurboQuant, TurboQuantCoder

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["TurboQuantSplit"]


@dataclass(frozen=True)
class TurboQuantSplit(Quantizer):
    """Two instances of TurboQuant: outlier channels with twice the levels (one bit more) of the others.

    A share of a quarter at L=4 and head_dim 128 is 32 channels at 3 bits and 96 at 2: 2.25 bits, plus
    two norms. Outliers are the channels of greatest energy over the tokens coded together, per head;
    which they are takes one bit per channel and head for all these tokens: part of what a cache costs, not of
    the price of a value.
    """

    name: ClassVar[str] = "turboquant_split"
    seeded: ClassVar[bool] = True
    granularity: ClassVar[Granularity] = TOGETHER
    outlier_share: float = 0.25
    rotation: str = "qr"

    def check(self, head_dim: int) -> None:
        """Raise UsageError if either part is too small, or has no such rotation."""
        outliers = self.outliers(head_dim)
        if not 3 <= outliers <= head_dim - 3:
            raise UsageError(
                f"outlier_share={self.outlier_share} makes {outliers} of {head_dim} channels outliers; "
                f"legal are 3 to {head_dim - 3} channels"
            )
        for part in (outliers, head_dim - outliers):
            TurboQuant(self.rotation).check(part)

    def outliers(self, head_dim: int) -> int:
        """Number of outlier channels."""
        return round(self.outlier_share * head_dim)

    def metadata_bits(self, head_dim: int) -> float:
        """One float16 norm for either part."""
        return 32

    def storage(self, levels: int, head_dim: int, heads: int = 1) -> Storage:
        """Mean over the channels of both parts; ``levels`` is that of the ordinary channels."""
        self.check(head_dim)
        part, outliers = TurboQuant(self.rotation), self.outliers(head_dim)
        ordinary = head_dim - outliers
        return mix(
            [(outliers, part.storage(2 * levels, outliers)), (ordinary, part.storage(levels, ordinary))]
        )

    def coded_bits(self, parts: Sequence[tuple[int, int]], shape: SideShape) -> float:
        """See ``Quantizer``; with one bit per channel and head for the map of the outliers."""
        return super().coded_bits(parts, shape) + shape.values

    def stored_codes(self, levels: int) -> int:
        """See ``Quantizer``: those of the outlier channels."""
        return 2 * levels

    def coder(self, head_dim: int, seed: int = 0, device: torch.device | str = "cpu") -> TurboQuantSplitCoder:
        """A coder with one rotation of ``seed`` for either part."""
        self.check(head_dim)
        part, outliers = TurboQuant(self.rotation), self.outliers(head_dim)
        return TurboQuantSplitCoder(
            part.coder(outliers, seed, device), part.coder(head_dim - outliers, seed, device)
        )


@dataclass(frozen=True)
class TurboQuantSplitCoder(Coder):
    """Metadata is the norm of the outlier channels, then that of the others."""

    outlier: TurboQuantCoder
    ordinary: TurboQuantCoder

    def code_row(self, x: Tensor, levels: Tensor, out: Tensor) -> None:
        """See ``Coder``; ``levels`` are those of the ordinary channels."""
        for coder, channels, factor in self._parts(self._outliers(x)):
            index = channels[:, None].expand(-1, x.shape[1], -1)
            values = coder.quantize_dequantize(x.gather(-1, index), levels * factor)
            out.scatter_(-1, index.expand(len(levels), -1, -1, -1), values)

    def encode(self, x: Tensor, levels: Tensor | int) -> Encoded:
        """See ``Coder``; codes stand where their channels do."""
        per_token, outliers = token_levels(levels, x), self._outliers(x)
        codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
        norms = []
        for coder, channels, factor in self._parts(outliers):
            index = channels[:, None].expand(-1, x.shape[1], -1)
            encoded = coder.encode(x.gather(-1, index), per_token * factor)
            codes.scatter_(-1, index, encoded.codes)
            norms.append(encoded.metadata)
        return Encoded(codes, torch.cat(norms, dim=-1), per_token, outliers)

    def decode(self, encoded: Encoded, dtype: torch.dtype) -> Tensor:
        """See ``Coder``."""
        out = torch.empty(encoded.codes.shape, dtype=dtype, device=encoded.codes.device)
        norms = encoded.metadata.split(1, dim=-1)
        for (coder, channels, factor), norm in zip(self._parts(encoded.outliers), norms, strict=True):
            index = channels[:, None].expand(-1, out.shape[1], -1)
            part = Encoded(encoded.codes.gather(-1, index), norm, encoded.levels * factor)
            out.scatter_(-1, index, coder.decode(part, dtype))
        return out

    def pack(self, x: Tensor, levels: Tensor, layout_of: LayoutOf) -> Packed:
        """See ``Coder``: the streams of both parts, and the map of the outliers, a bit a channel and head."""
        outliers, packed = self._outliers(x), []
        for coder, channels, factor in self._parts(outliers):
            part = x.gather(-1, channels[:, None].expand(-1, x.shape[1], -1))
            packed.append(coder.pack(part, levels * factor, layout_of))
        streams, norms = (sum((getattr(p, name) for p in packed), ()) for name in ("streams", "by_token"))
        return Packed(x.shape[1], streams, norms, (_bits(outliers),))

    def unpack(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        """See ``Coder``."""
        first = packed.streams[0].layout
        heads, tokens = first.heads, first.tokens
        head_dim = sum(stream.layout.head_dim for stream in packed.streams)
        outliers = _from_bits(packed.shared[0], heads * head_dim).view(heads, head_dim)
        out = torch.empty(heads, tokens, head_dim, dtype=dtype, device=outliers.device)
        stored = zip(self._parts(outliers), packed.streams, packed.by_token, strict=True)
        for (coder, channels, _), stream, norm in stored:
            values = coder.unpack(Packed(tokens, (stream,), (norm,)), dtype)
            out.scatter_(-1, channels[:, None].expand(-1, tokens, -1), values)
        return out

    def _outliers(self, x: Tensor) -> Tensor:
        """True at the outlier channels, bool [heads, head_dim]; ties go to the lower channel."""
        energy = x.float().square().sum(dim=1)
        order = energy.argsort(dim=-1, descending=True, stable=True)[:, : self.outlier.head_dim]
        return torch.zeros_like(energy, dtype=torch.bool).scatter_(-1, order, True)

    def _parts(self, outliers: Tensor) -> list[tuple[TurboQuantCoder, Tensor, int]]:
        """Coder, channels [heads, n] ascending, and factor on the levels, of both parts."""
        order = outliers.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
        first, second = order.split([self.outlier.head_dim, self.ordinary.head_dim], dim=-1)
        return [(self.outlier, first, 2), (self.ordinary, second, 1)]


def _bits(mask: Tensor) -> Tensor:
    """A bool tensor as uint8, eight to a byte, the first in the lowest bit."""
    flat = torch.nn.functional.pad(mask.flatten().long(), (0, -mask.numel() % 8)).view(-1, 8)
    return (flat << torch.arange(8, device=mask.device)).sum(-1).to(torch.uint8)


def _from_bits(packed: Tensor, count: int) -> Tensor:
    """The first ``count`` of them, bool."""
    return ((packed[:, None] >> torch.arange(8, device=packed.device)) & 1).flatten()[:count].bool()
