"""Symmetric quantization: one float16 step per token and head, levels evenly around zero."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from semkv_bench.errors import UsageError
from semkv_bench.kernels.numerics import check_rows, finite_cast, to_float16
from semkv_bench.quantizers import Coder, Encoded, NonFiniteError, Quantizer
from semkv_bench.quantizers.base import token_levels

SMALLEST = 2.0**-24  # the smallest float16 above 0


@dataclass(frozen=True)
class Symmetric(Quantizer):
    """step = 2 * clip * max|x| / (L - 1); what lies beyond clip * max|x| is clamped."""

    name: ClassVar[str] = "symmetric"
    clip: float = 1.0

    def check(self, head_dim):
        if not 0 < self.clip <= 1:
            raise UsageError(f"quantizer.clip={self.clip} must be above 0 and at most 1")

    def metadata_bits(self, head_dim):
        return 16  # one float16 step per vector

    def coder(self, head_dim, seed=0, device="cpu"):
        self.check(head_dim)
        return SymmetricCoder(self.clip)


class SymmetricCoder(Coder):
    def __init__(self, clip):
        self.clip = clip

    def encode(self, x, levels):
        levels = token_levels(levels, x)  # int64 [tokens]
        check_rows(x, levels[None])
        if not x.isfinite().all():
            raise NonFiniteError("NaN or infinity cannot be quantized")
        top = (levels - 1)[:, None]  # codes are 0..top
        largest = x.float().abs().amax(-1, keepdim=True)  # [heads, tokens, 1]
        step = to_float16(2 * self.clip * largest / top)
        # Where the step rounds to 0, every code gives 0.
        codes = torch.round(x.float() / step.float().clamp_min(SMALLEST) + top / 2)
        return Encoded(codes.clamp_min(0).minimum(top).to(torch.uint8), step, levels)

    def decode(self, encoded, dtype):
        middle = (encoded.levels - 1)[:, None] / 2
        return finite_cast((encoded.codes.float() - middle) * encoded.metadata.float(), dtype)
