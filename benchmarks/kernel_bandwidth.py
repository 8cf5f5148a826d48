"""Memory bandwidth of the Triton kernels on this GPU, against a plain copy on the same GPU.

Every figure is the bytes a kernel must read and write, once, over the median time of a launch; a copy
of a large tensor gives the ceiling. The cases are those of the static report; attention over codes is timed
against torch's attention over the same cache in 16 bits. ``python benchmarks/kernel_bandwidth.py --help``.
"""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from semkv_bench import kernels
from semkv_bench.kernels import AlignedLayout, PackedLayout, PackedVectors, total_nbytes
from semkv_bench.models.device import describe
from semkv_bench.quantizers.turboquant import codebook_tables

SETTINGS = 12
LEVELS = [16, 12, 10, 8, 7, 6, 5, 4, 3, 2, 3, 4]
OPEN = 64  # tokens in 16 bits beside the codes
# The cases of results/kernels/static.json: levels in turn, kind of codes, and whether there are tokens in 16 bits.
ATTENTION = {
    "affine 6/5": ((6, 5), "affine", False),
    "affine 5": ((5,), "affine", False),
    "affine 4": ((4,), "affine", False),
    "codebook 4": ((4,), "codebook", False),
    "e4m3": ((256,), "e4m3", False),
    "e5m2": ((256,), "e5m2", False),
    "mxfp4": ((16,), "mxfp4", False),
    "nvfp4": ((16,), "nvfp4", False),
    "q4_0": ((16,), "q4_0", False),
    "affine 6/5 and 16 bits": ((6, 5), "affine", True),
}
# Channels that have a scale together (None: all), their element, and what the scale is stored as.
SCALES = {
    "e4m3": (None, "e4m3", torch.float32),
    "e5m2": (None, "e5m2", torch.float32),
    "mxfp4": (32, "e2m1", torch.uint8),
    "nvfp4": (16, "e2m1", torch.float8_e4m3fn),
    "q4_0": (32, "symmetric", torch.float16),
}


def nbytes(*tensors: Tensor) -> int:
    """Bytes of these tensors together."""
    return sum(tensor.nbytes for tensor in tensors)


def milliseconds(call: Callable[[], object], device: torch.device) -> float:
    """Median time of a call."""
    if device.type == "cuda":
        from triton.testing import do_bench

        return do_bench(call, warmup=50, rep=200, return_mode="median")
    call()  # the interpreter: only to see that everything runs
    return float("nan")


def coding(heads: int, tokens: int, head_dim: int, device: torch.device) -> dict[str, tuple[Callable, int]]:
    """Calls that code vectors under twelve settings, and the bytes each moves."""
    x = torch.randn(heads, tokens, head_dim, dtype=torch.float16, device=device)
    y, out = x.float(), x.new_empty(SETTINGS, heads, tokens, head_dim)
    rotated = y.new_empty(SETTINGS, heads, tokens, head_dim)
    levels = torch.tensor(LEVELS, device=device)[:, None]
    tables = codebook_tables(head_dim, 16, device)
    codes, scale, zero = kernels.affine_quantize(x, levels, head_dim)
    return {
        "affine values": (
            lambda: kernels.affine_quantize_dequantize(x, levels, head_dim, out),
            nbytes(x, out),
        ),
        "affine codes": (lambda: kernels.affine_quantize(x, levels, head_dim), nbytes(x, codes, scale, zero)),
        "codebook values": (
            lambda: kernels.codebook_quantize_dequantize(y, levels, tables, rotated),
            nbytes(y, rotated),
        ),
        "codebook codes": (lambda: kernels.codebook_quantize(y, levels, tables), nbytes(y, codes, zero)),
    }


def packed(heads: int, tokens: int, head_dim: int, device: torch.device) -> dict[str, tuple[Callable, int]]:
    """Calls on a cache of 25 % of tokens at six levels and the rest at five, and the bytes each moves."""
    levels = torch.where(torch.arange(tokens) % 4 == 0, 6, 5).to(device)
    layout = PackedLayout.build(levels, heads, head_dim)
    x = torch.randn(heads, tokens, head_dim, dtype=torch.float16, device=device)
    codes, scale, zero = kernels.affine_quantize(x, levels[None], head_dim)
    vectors = PackedVectors(layout, kernels.pack(codes[0], layout), scale[0], zero)
    tables = codebook_tables(head_dim, 16, device)
    rotated = PackedVectors(layout, vectors.words, scale[0], tables=tables)
    return {
        "pack": (lambda: kernels.pack(codes[0], layout), codes[0].nbytes + vectors.words.nbytes),
        "unpack codes": (
            lambda: kernels.unpack(vectors.words, layout),
            vectors.words.nbytes + layout.nbytes + codes[0].nbytes,
        ),
        "unpack affine values": (
            lambda: kernels.unpack_dequantize(vectors, torch.float16),
            total_nbytes([vectors]) + x.nbytes,
        ),
        "unpack codebook values": (
            lambda: kernels.unpack_dequantize(rotated, torch.float16),
            total_nbytes([rotated]) + x.nbytes,
        ),
    }


def attention(
    heads: int, tokens: int, head_dim: int, device: torch.device
) -> dict[str, tuple[Callable, int]]:
    """Attention of one token over the caches of the static report, and over the same in 16 bits."""
    x = torch.randn(heads, tokens, head_dim, dtype=torch.float16, device=device)
    query = torch.randn(1, 4 * heads, head_dim, dtype=torch.float16, device=device)
    open_ = tuple(torch.randn(2, 1, heads, OPEN, head_dim, dtype=torch.float16, device=device))
    calls = {
        "attention, torch in 16 bits": (
            partial(scaled_dot_product_attention, query[:, :, None], x[None], x[None], enable_gqa=True),
            2 * x.nbytes,
        )
    }
    for name, (mix, kind, beside) in ATTENTION.items():
        levels = torch.tensor(mix, device=device)[torch.arange(tokens, device=device) % len(mix)]
        vectors = coded(AlignedLayout.build(levels, heads, head_dim), kind, device)
        work = kernels.attention_work([[(vectors, vectors)]], device)
        calls[f"attention {name}"] = (
            partial(kernels.packed_attention, query, query, work, [open_] if beside else [], 0.1),
            2 * total_nbytes([vectors]) + beside * nbytes(*open_),
        )
    return calls


def coded(layout: AlignedLayout, kind: str, device: torch.device) -> PackedVectors:
    """Vectors of random bits, all of which are codes, and of like scales."""
    words = torch.randint(-(1 << 31), 1 << 31, (layout.words,), dtype=torch.int32, device=device)
    channels, element, stored = SCALES.get(kind, (None, None, torch.float16))
    groups = layout.head_dim // (channels or layout.head_dim)
    scale = torch.ones(layout.heads, layout.tokens, groups, device=device)
    scale = (scale * 127 if stored == torch.uint8 else scale).to(stored)
    if kind == "affine":
        return PackedVectors(layout, words, *torch.cat([scale, -scale], dim=-1).chunk(2, dim=-1))
    if kind == "codebook":
        return PackedVectors(layout, words, scale, tables=codebook_tables(layout.head_dim, 16, device))
    # Without one of the exponent's bits a float is finite.
    return PackedVectors(
        layout, words & 0x77777777 if stored == torch.float32 else words, scale, element=element
    )


def main() -> int:
    """Measure and write the outcome; 3 if there is nothing to measure on."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/kernel_bandwidth.json"))
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if kernels.backend(device) != "triton":
        print("no GPU here: this benchmark needs one that Triton can use", file=sys.stderr)
        return 3
    source = torch.empty(1 << (30 if device.type == "cuda" else 10), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / milliseconds(lambda: target.copy_(source), device) / 1e6
    rows = []
    for head_dim in options.head_dims:
        shape = (options.heads, options.tokens, head_dim)
        calls = {**coding(*shape, device), **packed(*shape, device), **attention(*shape, device)}
        for name, (call, moved) in calls.items():
            elapsed = milliseconds(call, device)
            speed = moved / elapsed / 1e6
            rows.append(
                {
                    "kernel": name,
                    "head_dim": head_dim,
                    "ms": round(elapsed, 4),
                    "gb_per_s": round(speed, 1),
                    "of_copy": round(speed / copied, 3),
                }
            )
            print(rows[-1], flush=True)
    outcome = {
        "what": "bytes that must move over the median time of a launch; of_copy is relative to a copy",
        "machine": describe(device),
        "shape": {"heads": options.heads, "tokens": options.tokens, "settings": SETTINGS},
        "copy_gb_per_s": round(copied, 1),
        "kernels": rows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(outcome, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
