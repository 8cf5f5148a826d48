"""Compile every Triton kernel in every configuration for GPUs that need not be there.

Writes a table of registers, spilled bytes and shared memory as the assemblers report them. Arguments
are captured from the real launches on CPU tensors, so what is compiled is what would run.
"""

import argparse
import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

os.environ.pop("TRITON_INTERPRET", None)  # an interpreted kernel cannot be compiled
# How Triton 3.9 compiles by default; the kernels give the same bits with and without fused multiply-adds.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from semkv_bench.kernels import affine_triton, attention_triton, codebook_triton, packing_triton
from semkv_bench.kernels.packed import PackedLayout, PackedVectors
from semkv_bench.quantizers.turboquant import codebook_tables

TARGETS = {
    "cuda:80": GPUTarget("cuda", 80, 32),
    "cuda:90": GPUTarget("cuda", 90, 32),
    "cuda:100": GPUTarget("cuda", 100, 32),
    "hip:gfx942": GPUTarget("hip", "gfx942", 64),
}
HEAD_DIMS = (64, 80, 96, 128, 256)
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
MIXES = {
    "uniform": (5,),
    "two-level": (5, 6),
    "wide": (4, 11),
    "all": tuple(range(2, 17)),
    "two limbs": (5, 242),
}
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Launch:
    """A kernel and the arguments of one launch."""

    kernel: JITFunction
    arguments: dict

    @property
    def options(self) -> dict:
        """Compiler options given at the launch, such as the number of warps."""
        return {name: value for name, value in self.arguments.items() if name not in self.kernel.arg_names}


def capture(call: Callable[[], object], backend: str) -> list[Launch]:
    """The launches that ``call`` makes on a GPU of this kind, none of which runs."""
    seen = []

    def record(kernel: JITFunction, *args, grid, warmup, **kwargs):
        seen.append(Launch(kernel, {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}))

    hip = "0" if backend == "hip" else None
    with mock.patch.object(JITFunction, "run", record), mock.patch.object(torch.version, "hip", hip):
        call()
    return seen


def source_of(launch: Launch) -> ASTSource:
    """What Triton would compile for these arguments: types, constants and known divisibility."""
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        aligned = False
        if isinstance(value, torch.Tensor):
            kind, aligned = "*" + _TYPE_NAMES[value.dtype], value.data_ptr() % 16 == 0
        elif parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            kind = "constexpr"
            constants[(index,)] = value
        elif isinstance(value, float):
            kind = "fp32"
        else:
            kind, aligned = ("i32" if -(2**31) <= value < 2**31 else "i64"), value % 16 == 0
        signature[parameter.name] = kind
        if aligned:
            attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)


_CODING = (affine_triton.affine_kernel, codebook_triton.codebook_kernel)
_TYPE_NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
}


def configurations(quick: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """Name and call of every configuration; ``quick`` keeps a few of each kernel."""
    head_dims = (80,) if quick else HEAD_DIMS
    dtypes = {"bfloat16": torch.bfloat16} if quick else DTYPES
    levels = torch.randint(2, 17, (3, 1000))
    for head_dim, (name, dtype) in itertools.product(head_dims, dtypes.items()):
        x = torch.zeros(2, 1000, head_dim, dtype=dtype)
        for group in (head_dim,) if quick else (head_dim, 16):
            label = f"head_dim={head_dim} group={group} {name}"
            yield f"affine codes {label}", lambda x=x, g=group: affine_triton.affine_quantize(x, levels, g)
            yield (
                f"affine values {label}",
                lambda x=x, g=group: affine_triton.affine_quantize_dequantize(x, levels, g),
            )
    one = torch.zeros(1, 1, 64)
    yield "affine codes one token", lambda: affine_triton.affine_quantize(one, levels[:1, :1], 64)
    for head_dim in head_dims:
        tables = codebook_tables(head_dim, 16, CPU)
        y = torch.zeros(2, 1000, head_dim)
        yield (
            f"codebook codes head_dim={head_dim}",
            lambda y=y, t=tables: codebook_triton.codebook_quantize(y, levels, t),
        )
        yield (
            f"codebook values head_dim={head_dim}",
            lambda y=y, t=tables: codebook_triton.codebook_quantize_dequantize(y, levels, t),
        )
    yield from packed_configurations(head_dims, ("two-level",) if quick else tuple(MIXES))


def packed_configurations(
    head_dims: tuple[int, ...], mixes: tuple[str, ...]
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Packing, unpacking and attention for every mix of levels and pair of codings."""
    for head_dim, mix in itertools.product(head_dims, mixes):
        label = f"head_dim={head_dim} {mix}"
        layout = _layout(mix, head_dim)
        codes = torch.zeros(2, 1000, head_dim, dtype=torch.uint8)
        yield f"pack {label}", lambda c=codes, t=layout: packing_triton.pack(c, t)
        yield f"unpack {label}", lambda t=layout: packing_triton.unpack(_words(t), t)
        coded = {kind: _vectors(layout, kind) for kind in ("affine", "grouped", "codebook")}
        for kind, vectors in coded.items():
            yield (
                f"unpack {kind} {label}",
                lambda v=vectors: packing_triton.unpack_dequantize(v, torch.bfloat16),
            )
        other = _vectors(_layout("uniform", head_dim), "affine")
        pairs = {
            "affine": (coded["affine"], coded["affine"], 4),
            "affine, 1 query": (coded["affine"], coded["affine"], 1),
            "affine, 8 queries": (coded["affine"], coded["affine"], 8),
            "codebook": (coded["codebook"], coded["codebook"], 4),
            "codebook keys, grouped values": (coded["codebook"], coded["grouped"], 4),
            "two layouts": (coded["affine"], other, 4),
        }
        for kind, (keys, values, group) in pairs.items():
            query = torch.zeros(2 * group, head_dim, dtype=torch.bfloat16)
            yield (
                f"attention {kind} {label}",
                lambda q=query, k=keys, v=values: attention_triton.packed_attention(q, k, v, 0.1),
            )


def _layout(mix: str, head_dim: int) -> PackedLayout:
    choices = torch.tensor(MIXES[mix])
    return PackedLayout.build(choices[torch.arange(1000) % len(choices)], 2, head_dim)


def _words(layout: PackedLayout) -> torch.Tensor:
    return torch.zeros(layout.words, dtype=torch.int32)


def _vectors(layout: PackedLayout, kind: str) -> PackedVectors:
    groups = layout.head_dim // 16 if kind == "grouped" else 1
    scale = torch.zeros(layout.heads, layout.tokens, groups, dtype=torch.float16)
    if kind == "codebook":
        tables = codebook_tables(layout.head_dim, 16 if max(layout.class_levels) <= 16 else 256, CPU)
        return PackedVectors(layout, _words(layout), scale, tables=tables)
    return PackedVectors(layout, _words(layout), scale, zero=scale)


def compile_for(launch: Launch, target: GPUTarget) -> dict[str, int]:
    """Registers, spilled bytes and shared memory of one compilation."""
    compiled = triton.compile(source_of(launch), target=target, options=launch.options)
    if target.backend == "hip":
        usage = _amd_usage(compiled.asm["amdgcn"])
    else:
        usage = _nvidia_usage(compiled.asm["ptx"], target.arch)
        # Codes equal the reference's only with divisions that round correctly.
        if launch.kernel in _CODING and re.search(r"\bdiv\.(approx|full)", compiled.asm["ptx"]):
            raise RuntimeError("a division is not IEEE")
    return {**usage, "shared": compiled.metadata.shared}


def _nvidia_usage(ptx: str, arch: int) -> dict[str, int]:
    assembler = get_ptxas(arch).path
    gpu = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)[1]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [assembler, "-v", f"--gpu-name={gpu}", path, "-o", Path(folder) / "kernel.cubin"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)
        report = done.stderr
    registers = int(re.search(r"Used (\d+) registers", report)[1])
    stores, loads = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report).groups()
    return {"registers": registers, "spilled": int(stores) + int(loads)}


def _amd_usage(assembly: str) -> dict[str, int]:
    def number(field: str) -> int:
        return int(re.search(rf"\.{field}:\s+(\d+)", assembly)[1])

    return {
        "registers": number("vgpr_count"),
        # Scalar registers spill into lanes of vector registers, not into memory.
        "spilled": 4 * number("vgpr_spill_count"),
    }


def source_digest() -> str:
    """Digest of the kernels' source: a committed table belongs to it."""
    folder = Path(affine_triton.__file__).parent
    files = sorted([*folder.glob("*_triton.py"), folder / "launch.py", folder / "packed_rows.py"])
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def main() -> int:
    """Compile, print a line for each configuration, write the table; 1 if one does not compile."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--quick", action="store_true", help="a few configurations of each kernel")
    parser.add_argument("--out", type=Path, help="where to write the table, JSON")
    options = parser.parse_args()

    rows, failures, started = [], 0, time.monotonic()
    for name, call in configurations(options.quick):
        for target in options.targets:
            try:
                (launch,) = capture(call, TARGETS[target].backend)
                usage = compile_for(launch, TARGETS[target])
            except Exception as error:
                failures += 1
                print(f"FAILED  {target:10} {name}: {error}", file=sys.stderr)
                continue
            rows.append({"kernel": name, "target": target, **usage})
            print(f"{target:10} {name:70} {usage}", flush=True)
    spilling = sum(row["spilled"] > 0 for row in rows)
    print(f"{len(rows)} compiled, {failures} failed, {spilling} spill, {time.monotonic() - started:.0f} s")
    if options.out and not failures:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        table = {"source": source_digest(), "triton": triton.__version__, "rows": rows}
        lines = ",\n  ".join(json.dumps(row) for row in rows)
        head = json.dumps({key: table[key] for key in ("source", "triton")})[:-1]
        options.out.write_text(f'{head}, "rows": [\n  {lines}\n]}}\n')
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
