"""Triton kernels beside their torch references, same signature, same layout."""

from typing import TYPE_CHECKING

from semkv_bench.lazy import on_demand

if TYPE_CHECKING:
    from semkv_bench.kernels.affine_reference import affine_dequantize
    from semkv_bench.kernels.aligned import AlignedLayout
    from semkv_bench.kernels.attention_reference import merge_attention
    from semkv_bench.kernels.codebook_reference import codebook_dequantize
    from semkv_bench.kernels.codebook_tables import CodebookTables
    from semkv_bench.kernels.dispatch import (
        KERNELS_VARIABLE,
        affine_quantize,
        affine_quantize_dequantize,
        attention_work,
        backend,
        codebook_quantize,
        codebook_quantize_dequantize,
        pack,
        packed_attention,
        unpack,
        unpack_dequantize,
    )
    from semkv_bench.kernels.numerics import NonFiniteError
    from semkv_bench.kernels.packed import PackedLayout, PackedVectors, total_nbytes

__all__ = [
    "KERNELS_VARIABLE",
    "AlignedLayout",
    "CodebookTables",
    "NonFiniteError",
    "PackedLayout",
    "PackedVectors",
    "affine_dequantize",
    "affine_quantize",
    "affine_quantize_dequantize",
    "attention_work",
    "backend",
    "codebook_dequantize",
    "codebook_quantize",
    "codebook_quantize_dequantize",
    "merge_attention",
    "pack",
    "packed_attention",
    "total_nbytes",
    "unpack",
    "unpack_dequantize",
]

__getattr__ = on_demand(__name__)
