"""Which implementation of a kernel runs: Triton on a GPU, the torch reference elsewhere.

``SEMKV_KERNELS=reference`` or ``triton`` overrides the choice. Both give the same result.
"""

import os
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from semkv_bench.errors import MissingError, UsageError
from semkv_bench.kernels import aligned, packing_reference
from semkv_bench.kernels.aligned import AlignedLayout
from semkv_bench.kernels.attention_reference import Piece
from semkv_bench.kernels.codebook_tables import CodebookTables
from semkv_bench.kernels.packed import PackedLayout, PackedVectors

__all__ = [
    "KERNELS_VARIABLE",
    "affine_quantize",
    "affine_quantize_dequantize",
    "attention_work",
    "backend",
    "codebook_quantize",
    "codebook_quantize_dequantize",
    "pack",
    "packed_attention",
    "unpack",
    "unpack_dequantize",
]

KERNELS_VARIABLE = "SEMKV_KERNELS"


def backend(device: torch.device | str) -> str:
    """``triton`` or ``reference``: what runs on tensors of this device.

    Raises UsageError or MissingError if the override asks for what cannot be.
    """
    on_gpu = torch.device(device).type == "cuda"  # ROCm calls itself cuda, too
    wanted = os.environ.get(KERNELS_VARIABLE, "")
    if wanted not in ("", "reference", "triton"):
        raise UsageError(
            f"{KERNELS_VARIABLE}={wanted} is not known; use reference or triton, or leave it unset"
        )
    if wanted == "triton":
        if not _has_triton():
            raise MissingError(f"{KERNELS_VARIABLE}=triton, but triton is not installed: pip install triton")
        if not on_gpu and os.environ.get("TRITON_INTERPRET") != "1":
            raise UsageError(
                f"{KERNELS_VARIABLE}=triton needs a GPU (or TRITON_INTERPRET=1, which is slow); unset it on a CPU"
            )
        return "triton"
    return "triton" if on_gpu and wanted != "reference" and _has_triton() else "reference"


def affine_quantize(x: Tensor, levels: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """See ``affine_reference.affine_quantize``."""
    return _module("affine", x).affine_quantize(x, levels, group_size)


def affine_quantize_dequantize(
    x: Tensor, levels: Tensor, group_size: int, out: Tensor | None = None
) -> Tensor:
    """See ``affine_reference.affine_quantize_dequantize``."""
    return _module("affine", x).affine_quantize_dequantize(x, levels, group_size, out)


def codebook_quantize(y: Tensor, levels: Tensor, tables: CodebookTables) -> tuple[Tensor, Tensor]:
    """See ``codebook_reference.codebook_quantize``."""
    return _module("codebook", y).codebook_quantize(y, levels, tables)


def codebook_quantize_dequantize(
    y: Tensor, levels: Tensor, tables: CodebookTables, out: Tensor | None = None
) -> Tensor:
    """See ``codebook_reference.codebook_quantize_dequantize``."""
    return _module("codebook", y).codebook_quantize_dequantize(y, levels, tables, out)


def pack(codes: Tensor, layout: PackedLayout | AlignedLayout) -> Tensor:
    """See ``packing_reference.pack`` and ``aligned.pack``."""
    if isinstance(layout, AlignedLayout):
        return aligned.pack(codes, layout)
    return _module("packing", codes).pack(codes, layout)


def unpack(words: Tensor, layout: PackedLayout | AlignedLayout) -> Tensor:
    """See ``packing_reference.unpack`` and ``aligned.unpack``."""
    if isinstance(layout, AlignedLayout):
        return aligned.unpack(words, layout)
    return _module("packing", words).unpack(words, layout)


def unpack_dequantize(
    packed: PackedVectors, dtype: torch.dtype = torch.float32, out: Tensor | None = None
) -> Tensor:
    """See ``packing_reference.unpack_dequantize``."""
    if isinstance(packed.layout, AlignedLayout):
        return packing_reference.unpack_dequantize(packed, dtype, out)
    if packed.element is not None:
        codes, kind = unpack(packed.words, packed.layout), dtype if out is None else out.dtype
        values = packing_reference.element_dequantize(codes, packed, kind)
        return values if out is None else out.copy_(values)
    return _module("packing", packed.words).unpack_dequantize(packed, dtype, out)


def attention_work(rows: Sequence[Sequence[Piece]], device: torch.device) -> Any:
    """See ``attention_reference.attention_work``; for ``packed_attention`` on tensors of this device."""
    return _module("attention", device).attention_work(rows)


def packed_attention(
    query: Tensor, turned: Tensor, work: Any, plain: Sequence[tuple[Tensor, Tensor]], softmax_scale: float
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """See ``attention_reference.packed_attention``."""
    return _module("attention", query).packed_attention(query, turned, work, plain, softmax_scale)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _module(family: str, of: Tensor | torch.device) -> ModuleType:
    device = of.device if isinstance(of, torch.Tensor) else of
    return import_module(f"semkv_bench.kernels.{family}_{backend(device)}")
