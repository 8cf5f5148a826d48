"""From vectors to packed vectors and back, for the quantizers whose codes can be packed."""

from abc import ABC, abstractmethod
from dataclasses import replace

import torch
from torch import Tensor

from semkv_bench import kernels
from semkv_bench.errors import UsageError
from semkv_bench.kernels import PackedLayout, PackedVectors
from semkv_bench.kernels.numerics import finite_cast
from semkv_bench.quantizers import Affine, Keep, Layers, Quantizer, TurboQuant
from semkv_bench.settings.setting import Coded

__all__ = ["PackedCoder", "append", "check_packable", "keep_first", "packed_coder", "together"]


class PackedCoder(ABC):
    """A quantizer's coder whose output goes to packed words; ``top``: most levels that it will be asked for."""

    def __init__(self, coder, top: int):
        self.coder = coder
        self.top = top

    @abstractmethod
    def encode(self, x: Tensor, levels: Tensor, layout: PackedLayout) -> PackedVectors:
        """x [heads, tokens, head_dim] at levels int64 [tokens], packed as ``layout`` says."""

    @abstractmethod
    def decode(self, packed: PackedVectors, dtype: torch.dtype) -> Tensor:
        """Values [heads, tokens, head_dim]; what ``quantize_dequantize`` gives for the same input."""

    @abstractmethod
    def to_coded(self, x: Tensor) -> Tensor:
        """Vectors [..., head_dim] in the basis that codes are in, float32."""

    @abstractmethod
    def from_coded(self, y: Tensor) -> Tensor:
        """Inverse of ``to_coded``."""


class _AffineCoder(PackedCoder):
    def encode(self, x, levels, layout):
        encoded = self.coder.encode(x, levels)
        scale, zero = (part.contiguous() for part in encoded.metadata.chunk(2, dim=-1))
        return PackedVectors(layout, kernels.pack(encoded.codes, layout), scale, zero)

    def decode(self, packed, dtype):
        return kernels.unpack_dequantize(packed, dtype)

    def to_coded(self, x):
        return x.float()

    def from_coded(self, y):
        return y


class _TurboQuantCoder(PackedCoder):
    def encode(self, x, levels, layout):
        encoded = self.coder.encode(x, levels)
        words = kernels.pack(encoded.codes, layout)
        return PackedVectors(layout, words, encoded.metadata, tables=self.coder.tables(self.top))

    def decode(self, packed, dtype):
        rotated = kernels.unpack_dequantize(packed)
        return finite_cast(self.coder.rotate_back(rotated), dtype)

    def to_coded(self, x):
        return self.coder.rotate(x)

    def from_coded(self, y):
        return self.coder.rotate_back(y)


_CODERS: dict[type[Quantizer], type[PackedCoder]] = {Affine: _AffineCoder, TurboQuant: _TurboQuantCoder}


def check_packable(quantizer: Quantizer) -> None:
    """Raise UsageError if codes of ``quantizer`` cannot be packed."""
    if type(quantizer) not in _CODERS:
        known = ", ".join(kind.name for kind in _CODERS)
        raise UsageError(f"SemKVCache cannot pack the codes of {quantizer.name}; use one of {known}")
    if quantizer.keep != Keep() or quantizer.layers != Layers():
        raise UsageError(
            f"SemKVCache has no windows and no skipped layers; use {quantizer.name} without keep and layers"
        )
    if isinstance(quantizer, TurboQuant) and quantizer.norm_correction:
        raise UsageError("SemKVCache cannot correct norms; use quantizer.norm_correction=false")


def packed_coder(coded: Coded, head_dim: int, seed: int, device: torch.device) -> PackedCoder:
    """The packed coder of one side for one head size, seed and device."""
    allocation = coded.allocation
    top = allocation.high if allocation.metric is not None else allocation.count
    return _CODERS[type(coded.quantizer)](coded.quantizer.coder(head_dim, seed, device), top)


def append(first: PackedVectors, second: PackedVectors, layout: PackedLayout) -> PackedVectors:
    """Both, one after the other; ``layout`` is that of all their tokens.

    Blocks lie one after the other and know nothing of each other, so no code is touched.
    Raises ValueError unless ``first`` ends with a whole block.
    """
    if first.layout.tokens % first.layout.block:
        raise ValueError(f"{first.layout.tokens} tokens are not whole blocks of {first.layout.block}")
    zero = None if first.zero is None else torch.cat([first.zero, second.zero], dim=1)
    words, scale = torch.cat([first.words, second.words]), torch.cat([first.scale, second.scale], dim=1)
    return PackedVectors(layout, words, scale, zero, first.tables)


def together(first: PackedVectors, second: PackedVectors, layout: PackedLayout) -> PackedVectors:
    """As ``append``, for a ``first`` that ends within a block: codes are packed anew, none is changed."""
    codes = torch.cat([kernels.unpack(part.words, part.layout) for part in (first, second)], dim=1)
    zero = None if first.zero is None else torch.cat([first.zero, second.zero], dim=1)
    scale = torch.cat([first.scale, second.scale], dim=1)
    return PackedVectors(layout, kernels.pack(codes, layout), scale, zero, first.tables)


def keep_first(packed: PackedVectors, layout: PackedLayout) -> PackedVectors:
    """The first ``layout.tokens`` tokens with the codes that they have."""
    kept = layout.tokens
    codes = kernels.unpack(packed.words, packed.layout)[:, :kept].contiguous()
    zero = None if packed.zero is None else packed.zero[:, :kept].contiguous()
    return replace(
        packed,
        layout=layout,
        words=kernels.pack(codes, layout),
        scale=packed.scale[:, :kept].contiguous(),
        zero=zero,
    )
