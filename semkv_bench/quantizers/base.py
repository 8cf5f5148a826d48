"""What a KV-cache quantizer is: its storage arithmetic, and a coder bound to one head size."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from semkv_bench.grid.cost import SideShape, Tokens
from semkv_bench.grid.levels import Storage, code_bits, packing_plan
from semkv_bench.kernels import NonFiniteError

__all__ = ["Coder", "Encoded", "NonFiniteError", "Quantizer"]


@dataclass(frozen=True)
class Encoded:
    """Codes and metadata of [heads, tokens, head_dim] values under one setting.

    codes    uint8 [heads, tokens, head_dim], each below its token's number of codes
    metadata float16 [heads, tokens, M]; 16 * M is the quantizer's ``metadata_bits``
    levels   int64 [tokens]
    outliers bool [heads, head_dim], channels coded with more levels, if the quantizer tells channels apart
    """

    codes: Tensor
    metadata: Tensor
    levels: Tensor
    outliers: Tensor | None = None


class Quantizer(ABC):
    """One way to code the vectors of a KV cache; subclasses are frozen dataclasses built by Hydra."""

    name: ClassVar[str]
    seeded: ClassVar[bool] = False  # does the result depend on the seed?

    @abstractmethod
    def check(self, head_dim: int) -> None:
        """Raise UsageError, naming what is legal, if vectors of ``head_dim`` values cannot be coded."""

    @abstractmethod
    def metadata_bits(self, head_dim: int) -> float:
        """Bits of metadata stored with each vector of ``head_dim`` values."""

    @abstractmethod
    def coder(self, head_dim: int, seed: int = 0, device: torch.device | str = "cpu") -> "Coder":
        """The coder for one head size, its tables on ``device``."""

    def storage(self, levels: int, head_dim: int) -> Storage:
        """Cost per value of vectors stored at ``levels``; UsageError as in ``check``."""
        self.check(head_dim)
        packed = packing_plan(levels).packed_bits
        return Storage(code_bits(levels), packed, packed + self.metadata_bits(head_dim) / head_dim)

    def coded_bits(self, parts: Sequence[tuple[int, int]], shape: SideShape) -> float:
        """Bits of tokens that were coded together, all heads of one side of one layer: codes and all metadata.

        parts: (levels, tokens) of the stretch. What is kept once a stretch, or once a group of tokens, belongs here.
        """
        return math.fsum(
            tokens * shape.values * self.storage(levels, shape.head_dim).effective_bits
            for levels, tokens in parts
        )

    def sequence_bits(self, shape: SideShape) -> float:
        """Bits that one side of one layer keeps once a sequence."""
        return 0.0

    def stored(self, tokens: int) -> Tokens:
        """How a prompt of ``tokens`` tokens is held: in one stretch, unless some of it stays in 16 bits."""
        return Tokens.of([tokens])

    def for_values(self) -> "Quantizer":
        """The value cache's quantizer when this one codes the keys: itself, unless it is for keys only."""
        return self


class Coder(ABC):
    """A quantizer bound to one head size, seed and device."""

    @abstractmethod
    def quantize_dequantize(self, x: Tensor, levels: Tensor, out: Tensor | None = None) -> Tensor:
        """What each setting's cache would give back for x.

        x      [heads, tokens, head_dim], float16, bfloat16 or float32
        levels int64 [S, tokens] or [S, 1], one row per setting, each 2..256
        out    [S, heads, tokens, head_dim] of x's type, perhaps strided, last dimension contiguous

        Fills and returns ``out``. One pass of row statistics serves all settings.
        Raises NonFiniteError on NaN or infinity.
        """

    @abstractmethod
    def encode(self, x: Tensor, levels: Tensor | int) -> Encoded:
        """Codes and metadata of x [heads, tokens, head_dim] at levels int64 [tokens], or one for all."""

    @abstractmethod
    def decode(self, encoded: Encoded, dtype: torch.dtype) -> Tensor:
        """Values [heads, tokens, head_dim]; equals ``quantize_dequantize`` of the same input and type."""


def token_levels(levels: Tensor | int, x: Tensor) -> Tensor:
    """Levels as int64 [tokens] on x's device."""
    if isinstance(levels, int):
        return torch.full((x.shape[1],), levels, dtype=torch.int64, device=x.device)
    return levels.to(x.device)
