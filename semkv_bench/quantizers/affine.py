"""Affine (asymmetric uniform) quantization per token and head, over head_dim or groups of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from semkv_bench import kernels
from semkv_bench.errors import UsageError
from semkv_bench.quantizers.base import AlignedPrice, Coder, Encoded, Quantizer, token_levels

if TYPE_CHECKING:  # what storage costs can be told without torch
    import torch
    from torch import Tensor

    from semkv_bench.kernels import PackedVectors
    from semkv_bench.quantizers.packing import Packed

__all__ = ["Affine"]


@dataclass(frozen=True)
class Affine(Quantizer):
    """zero = min, scale = (max - min)/(L - 1), both float16, per vector or per ``group_size`` values of it.

    At head_dim 128 the metadata costs 2 * 16 / 128 = 0.25 bits per value, at group_size 32 one bit.
    """

    name: ClassVar[str] = "affine"
    group_size: int | None = field(default=None, metadata={"short": "g"})

    def check(self, head_dim: int) -> None:
        """Raise UsageError if ``group_size`` does not divide ``head_dim``."""
        size = self.group_size
        if size is None or (size > 0 and head_dim % size == 0):
            return
        legal = [n for n in range(2, head_dim + 1) if head_dim % n == 0]
        raise UsageError(
            f"group_size={size} does not divide head_dim {head_dim}; "
            f"legal sizes are {', '.join(map(str, legal))}, or null for the whole vector"
        )

    @property
    def aligned(self) -> AlignedPrice:
        """See ``Quantizer``."""
        return AlignedPrice(self)

    def metadata_bits(self, head_dim: int) -> float:
        """Two float16 for each group."""
        return 32 * (head_dim // (self.group_size or head_dim))

    def coder(self, head_dim: int, seed: int = 0, device: torch.device | str = "cpu") -> AffineCoder:
        """A coder; affine coding has no tables, so ``seed`` and ``device`` change nothing."""
        self.check(head_dim)
        return AffineCoder(self.group_size or head_dim)


@dataclass(frozen=True)
class AffineCoder(Coder):
    """Metadata holds the scales of all groups, then their zeros."""

    group_size: int

    def code_row(self, x: Tensor, levels: Tensor, out: Tensor) -> None:
        """See ``Coder``."""
        kernels.affine_quantize_dequantize(x, levels, self.group_size, out)

    def encode(self, x: Tensor, levels: Tensor | int) -> Encoded:
        """See ``Coder``."""
        import torch

        per_token = token_levels(levels, x)
        codes, scale, zero = kernels.affine_quantize(x, per_token[None], self.group_size)
        return Encoded(codes[0], torch.cat([scale[0], zero], dim=-1), per_token)

    def decode(self, encoded: Encoded, dtype: torch.dtype) -> Tensor:
        """See ``Coder``."""
        scale, zero = encoded.metadata.chunk(2, dim=-1)
        return kernels.affine_dequantize(encoded.codes, scale, zero, dtype)

    def kernel_vectors(self, packed: Packed) -> PackedVectors:
        """See ``Coder``."""
        (stream,), (metadata,) = packed.streams, packed.by_token
        scale, zero = metadata.chunk(2, dim=-1)
        return kernels.PackedVectors(stream.layout, stream.words, scale, zero)
