"""KV-cache quantizers, one a file: encode, decode, storage arithmetic."""

from semkv_bench.quantizers.affine import Affine
from semkv_bench.quantizers.base import Coder, Encoded, NonFiniteError, Quantizer

__all__ = ["Affine", "Coder", "Encoded", "NonFiniteError", "Quantizer"]
