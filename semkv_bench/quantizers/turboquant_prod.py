"""TurboQuant for inner products: a 1-bit sketch of the residual (arXiv 2504.19874, algorithm 2)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from semkv_bench import kernels
from semkv_bench.errors import UsageError
from semkv_bench.grid.levels import Storage, code_bits, packing_plan
from semkv_bench.kernels.numerics import finite_cast, to_float16
from semkv_bench.lazy import torch
from semkv_bench.quantizers.base import Encoded, Quantizer, token_levels
from semkv_bench.quantizers.packing import LayoutOf, Packed, Stream
from semkv_bench.quantizers.rotation import gaussian_matrix, random_rotation
from semkv_bench.quantizers.turboquant import TurboQuant, TurboQuantCoder

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["TurboQuantProd"]


@dataclass(frozen=True)
class TurboQuantProd(TurboQuant):
    """TurboQuant codes plus the signs of a random projection of what they miss (QJL), and its norm.

    Inner products with the decoded vector are unbiased, at one more bit per value and a second float16.
    That suits keys, which only ever meet queries in inner products; values get plain TurboQuant.
    L levels mean L for the codes: code bits are log2(L) + 1, so L=4 costs what 8 levels would.
    """

    name: ClassVar[str] = "turboquant_prod"

    def metadata_bits(self, head_dim: int) -> float:
        """Norm of the vector and of the residual, float16 each."""
        return 32

    def storage(self, levels: int, head_dim: int, heads: int = 1) -> Storage:
        """Cost per value: codes, one sign bit, two norms."""
        self.check(head_dim)
        packed = packing_plan(levels).packed_bits + 1
        return Storage(code_bits(levels) + 1, packed, packed + self.metadata_bits(head_dim) / head_dim)

    def for_values(self) -> Quantizer:
        """Plain TurboQuant with the same rotation."""
        return TurboQuant(self.rotation, self.norm_correction, keep=self.keep, layers=self.layers)

    def coder(self, head_dim: int, seed: int = 0, device: torch.device | str = "cpu") -> TurboQuantProdCoder:
        """A coder with the rotation and projection of ``seed``."""
        self.check(head_dim)
        if self.norm_correction:
            raise UsageError(
                "quantizer.norm_correction belongs to turboquant; turboquant_prod adds a residual instead"
            )
        rotation = random_rotation(self.rotation, head_dim, seed)
        return TurboQuantProdCoder(rotation, gaussian_matrix(head_dim, seed), device)


class TurboQuantProdCoder(TurboQuantCoder):
    """Metadata is the norm and the residual's norm; a stored code is 2 * code + sign.

    The projection acts on the rotated residual, which changes nothing: a Gaussian matrix times a
    rotation is again such a matrix.
    """

    def __init__(self, rotation: Tensor, projection: Tensor, device: torch.device | str = "cpu") -> None:
        super().__init__(rotation, device)
        self._projection = projection.to(self.device)
        self._projection32 = self._projection.float()
        self._gain = math.sqrt(math.pi / 2) / self.head_dim

    def rotated_values(self, y: Tensor, levels: Tensor, top: int) -> Tensor:
        """See ``TurboQuantCoder``."""
        coarse = super().rotated_values(y, levels, top)
        positive, norm = self._sketch(y - coarse)
        return self._refine(coarse, positive, norm)

    def encode(self, x: Tensor, levels: Tensor | int) -> Encoded:
        """See ``Coder``."""
        y, per_token = self.rotate(x), token_levels(levels, x)
        tables = self.tables(int(per_token.max()) if len(per_token) else 2)
        codes, norm = kernels.codebook_quantize(y, per_token[None], tables)
        coarse = kernels.codebook_dequantize(codes[0], norm, per_token, tables)
        positive, residual_norm = self._sketch(y - coarse)
        metadata = torch.cat([norm.unsqueeze(-1), residual_norm], dim=-1)
        return Encoded(codes[0] * 2 + positive.to(torch.uint8), metadata, per_token)

    def decode(self, encoded: Encoded, dtype: torch.dtype) -> Tensor:
        """See ``Coder``."""
        norm, residual_norm = encoded.metadata.split(1, dim=-1)
        tables = self.tables(int(encoded.levels.max()) if len(encoded.levels) else 2)
        coarse = kernels.codebook_dequantize(encoded.codes // 2, norm.squeeze(-1), encoded.levels, tables)
        refined = self._refine(coarse, encoded.codes % 2 == 1, residual_norm)
        return finite_cast(self.rotate_back(refined), dtype)

    def pack(self, x: Tensor, levels: Tensor, layout_of: LayoutOf) -> Packed:
        """See ``Coder``; codes and signs are a stream each."""
        encoded = self.encode(x, levels)
        parts = ((encoded.codes // 2, levels), (encoded.codes % 2, torch.full_like(levels, 2)))
        streams = (Stream.of(codes, layout_of(counts, *x.shape[::2])) for codes, counts in parts)
        return Packed(x.shape[1], tuple(streams), (encoded.metadata,))

    def unpack(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        """See ``Coder``."""
        (coarse, signs), (metadata,) = packed.streams, packed.by_token
        codes = coarse.codes() * 2 + signs.codes()
        return self.decode(Encoded(codes, metadata, coarse.layout.levels()), dtype)

    def _sketch(self, residual: Tensor) -> tuple[Tensor, Tensor]:
        # In float64, for the same reason as the rotation: no sign should hang on the order of a sum.
        exact = residual.double()
        norm = torch.linalg.vector_norm(exact, dim=-1, keepdim=True)
        return exact @ self._projection.T >= 0, to_float16(norm.float())

    def _refine(self, coarse: Tensor, positive: Tensor, norm: Tensor) -> Tensor:
        signs = positive.float().mul_(2).sub_(1)
        return torch.addcmul(coarse, signs @ self._projection32, norm.float() * self._gain)
