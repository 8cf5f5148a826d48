"""TurboQuant, the variant that minimises the mean squared error (arXiv 2504.19874, algorithm 1)."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, ClassVar

from semkv_bench import kernels
from semkv_bench.errors import UsageError
from semkv_bench.kernels import CodebookTables, PackedVectors
from semkv_bench.kernels.numerics import check_rows, finite_cast, to_float16
from semkv_bench.kernels.token_chunks import for_token_chunks
from semkv_bench.lazy import torch
from semkv_bench.quantizers.base import AlignedPrice, Coder, Encoded, Quantizer, follows, token_levels
from semkv_bench.quantizers.codebook import lloyd_max
from semkv_bench.quantizers.packing import LayoutOf, Packed, Stream
from semkv_bench.quantizers.rotation import check_rotation, random_rotation

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["TurboQuant", "TurboQuantCoder"]

_SMALLEST = 3  # below three dimensions the density of a coordinate has no single optimal codebook
_USUAL_TOP = 16


@dataclass(frozen=True)
class TurboQuant(Quantizer):
    """A float16 norm, and Lloyd-Max codes of the randomly rotated unit vector's coordinates.

    As in the paper the decoded vector is scaled by the stored norm and not renormalised, so it is
    shorter than the original by the codebook's error; ``norm_correction`` gives it the stored norm, at no cost.
    ``rotation`` is ``qr`` (uniform over all
    rotations), ``hadamard`` (head_dim a power of two) or ``auto``; one rotation serves all tokens,
    heads and layers of a seed. At head_dim 128 the norm costs 16 / 128 = 0.125 bits per value.
    """

    name: ClassVar[str] = "turboquant"
    seeded: ClassVar[bool] = True
    rotation: str = "qr"
    norm_correction: bool = False

    def check(self, head_dim: int) -> None:
        """Raise UsageError if the rotation does not exist for ``head_dim``."""
        if head_dim < _SMALLEST:
            raise UsageError(f"TurboQuant needs a head_dim of at least {_SMALLEST}, not {head_dim}")
        check_rotation(self.rotation, head_dim)

    @property
    def aligned(self) -> AlignedPrice | None:
        """See ``Quantizer``; the kernels know the plain method."""
        return AlignedPrice(self) if type(self) is TurboQuant and not self.norm_correction else None

    def metadata_bits(self, head_dim: int) -> float:
        """One float16 norm."""
        return 16

    def coder(self, head_dim: int, seed: int = 0, device: torch.device | str = "cpu") -> TurboQuantCoder:
        """A coder with the rotation of ``seed``."""
        self.check(head_dim)
        return TurboQuantCoder(random_rotation(self.rotation, head_dim, seed), device, self.norm_correction)


class TurboQuantCoder(Coder):
    """Metadata is the norm.

    The rotation is computed in float64 and rounded once to float32: how a machine orders the sum then
    practically never moves a coordinate over a threshold, and codes agree between CPU and GPU.
    """

    turns: ClassVar[bool] = True

    def __init__(
        self, rotation: Tensor, device: torch.device | str = "cpu", norm_correction: bool = False
    ) -> None:
        self.device = torch.device(device)
        self.norm_correction = norm_correction
        self.head_dim = len(rotation)
        self._rotation = rotation.to(self.device)
        self._rotation32 = self._rotation.float()

    def rotate(self, x: Tensor) -> Tensor:
        """Rotated float32 of x [..., head_dim]."""
        return (x.double() @ self._rotation.T).float()

    def rotate_back(self, y: Tensor) -> Tensor:
        """Inverse of ``rotate`` in float32."""
        return (y.reshape(-1, self.head_dim) @ self._rotation32).view(y.shape)

    def rotated_values(self, y: Tensor, levels: Tensor, top: int) -> Tensor:
        """What coding leaves of rotated y [heads, tokens, head_dim], still rotated.

        levels is int64 [S, tokens] or [S, 1], ``top`` at most; the result has S in front.
        """
        found = kernels.codebook_quantize_dequantize(y, levels, self.tables(top))
        if not self.norm_correction:
            return found
        exact = torch.linalg.vector_norm(y, dim=-1, keepdim=True, dtype=torch.float64)
        return _at_norm(found, to_float16(exact.float()).float())

    def tables(self, top: int) -> CodebookTables:
        """Codebooks of up to at least ``top`` levels."""
        return codebook_tables(self.head_dim, max(_USUAL_TOP, 1 << (top - 1).bit_length()), self.device)

    def code_row(self, x: Tensor, levels: Tensor, out: Tensor) -> None:
        """See ``Coder``."""
        check_rows(x, levels)
        # A token's coding depends on its own levels only, so settings share what they have in common.
        wanted, distinct = counts_of(levels)
        every = sorted({count for counts in wanted for count in counts})

        def code(here: slice) -> None:
            rotated = self.rotated_values(self.rotate(x[:, here]), distinct[:, None], every[-1])
            values = finite_cast(self.rotate_back(rotated), out.dtype)
            by_count = dict(zip(every, values, strict=True))
            levels_here = levels if levels.shape[1] == 1 else levels[:, here]
            for setting, counts in enumerate(wanted):
                _choose(by_count, counts, levels_here[setting], out[setting, :, here])

        for_token_chunks(code, x)

    def encode(self, x: Tensor, levels: Tensor | int) -> Encoded:
        """See ``Coder``."""
        per_token = token_levels(levels, x)
        return self._encoded(x, per_token, int(per_token.max()) if len(per_token) else 2)

    def pack(self, x: Tensor, levels: Tensor, layout_of: LayoutOf) -> Packed:
        """See ``Coder``; the layout knows the level counts, so that none is read back from a GPU."""
        if not follows(type(self), "pack", "encode"):
            return super().pack(x, levels, layout_of)
        layout = layout_of(levels, *x.shape[::2])
        encoded = self._encoded(x, levels, max(layout.class_levels))
        return Packed(x.shape[1], (Stream.of(encoded.codes, layout),), (encoded.metadata,))

    def _encoded(self, x: Tensor, levels: Tensor, top: int) -> Encoded:
        codes, norm = kernels.codebook_quantize(self.rotate(x), levels[None], self.tables(top))
        return Encoded(codes[0], norm.unsqueeze(-1), levels)

    def decode(self, encoded: Encoded, dtype: torch.dtype) -> Tensor:
        """See ``Coder``."""
        tables = self.tables(int(encoded.levels.max()) if len(encoded.levels) else 2)
        rotated = kernels.codebook_dequantize(
            encoded.codes, encoded.metadata.squeeze(-1), encoded.levels, tables
        )
        if self.norm_correction:
            rotated = _at_norm(rotated, encoded.metadata.float())
        return finite_cast(self.rotate_back(rotated), dtype)

    @property
    def known_to_kernels(self) -> bool:
        """See ``Coder``; the kernels do not correct norms."""
        return super().known_to_kernels and not self.norm_correction

    def kernel_vectors(self, packed: Packed) -> PackedVectors:
        """See ``Coder``."""
        (stream,), (norm,) = packed.streams, packed.by_token
        tables = self.tables(max(stream.layout.class_levels))
        return PackedVectors(stream.layout, stream.words, norm, tables=tables)

    def to_coded(self, x: Tensor) -> Tensor:
        """See ``Coder``."""
        return self.rotate(x)

    def from_coded(self, y: Tensor) -> Tensor:
        """See ``Coder``."""
        return self.rotate_back(y)


def _at_norm(values: Tensor, norm: Tensor) -> Tensor:
    """values [..., head_dim] scaled to ``norm`` [..., 1]; zero vectors stay."""
    have = torch.linalg.vector_norm(values, dim=-1, keepdim=True, dtype=torch.float64).float()
    return values * (norm / have.masked_fill(have == 0, torch.inf))


@lru_cache(maxsize=32)
def codebook_tables(head_dim: int, top: int, device: torch.device) -> CodebookTables:
    """Codebooks of 2..top levels for ``head_dim`` on ``device``."""
    books = (lloyd_max(levels, head_dim) for levels in range(2, top + 1))
    pairs = [(torch.from_numpy(book.centroids), torch.from_numpy(book.thresholds)) for book in books]
    return CodebookTables.build(pairs, head_dim, device)


@cache
def _known_counts() -> MutableMapping[Tensor, tuple[list[list[int]], Tensor]]:
    from torch.utils.weak import WeakTensorKeyDictionary

    return WeakTensorKeyDictionary()


def counts_of(levels: Tensor) -> tuple[list[list[int]], Tensor]:
    """Level counts in use, ascending: of each row of levels int64 [S, n], and of all, int64 on its device.

    Read once for as long as the tensor lives, since all layers and both sides of a fill are given the same.
    """
    known = _known_counts()
    if levels not in known:
        wanted = [sorted(set(row)) for row in levels.tolist()]
        every = sorted({count for counts in wanted for count in counts})
        known[levels] = (wanted, torch.tensor(every).to(levels.device))
    return known[levels]


def _choose(by_count: dict[int, Tensor], counts: list[int], levels: Tensor, out: Tensor) -> None:
    """Fill out [heads, tokens, head_dim] from the values that each level count gives."""
    first, *others = counts
    out.copy_(by_count[first])
    for count in others:
        torch.where((levels == count)[:, None], by_count[count], out, out=out)
