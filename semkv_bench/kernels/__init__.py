"""Triton kernels beside their torch references, same signature, same layout."""

from semkv_bench.kernels.affine_reference import (
    affine_dequantize,
    affine_quantize,
    affine_quantize_dequantize,
)
from semkv_bench.kernels.codebook_reference import (
    codebook_dequantize,
    codebook_quantize,
    codebook_quantize_dequantize,
)
from semkv_bench.kernels.codebook_tables import CodebookTables
from semkv_bench.kernels.numerics import NonFiniteError

__all__ = [
    "CodebookTables",
    "NonFiniteError",
    "affine_dequantize",
    "affine_quantize",
    "affine_quantize_dequantize",
    "codebook_dequantize",
    "codebook_quantize",
    "codebook_quantize_dequantize",
]
