"""Triton kernels beside their torch references, same signature, same layout."""

from semkv_bench.kernels.affine_reference import (
    affine_dequantize,
    affine_quantize,
    affine_quantize_dequantize,
)
from semkv_bench.kernels.numerics import NonFiniteError

__all__ = ["NonFiniteError", "affine_dequantize", "affine_quantize", "affine_quantize_dequantize"]
