"""Compile every Triton kernel for GPUs that need not be there, once for each kind of code it becomes.

Writes a table of registers, spilled bytes and shared memory as the assemblers report them. Arguments
are captured from the real launches on CPU tensors, so what is compiled is what would run. From a base
case of each kernel one thing at a time is varied that changes its code: the type, the width of a vector,
the grouping, how many classes of levels there are and how wide their groups are read. Level counts that
come to the same code are one case.
"""

import argparse
import ast
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

os.environ.pop("TRITON_INTERPRET", None)  # an interpreted kernel cannot be compiled
# How Triton 3.9 compiles by default; the kernels give the same bits with and without fused multiply-adds.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton
from static_figures import Work, figures
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource, CompiledKernel
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
BASE_TARGETS = ("cuda:80", "cuda:100")  # the base cases alone; the others get every case
STATIC = Path(__file__).resolve().parents[1] / "results" / "kernels" / "static.json"
HEAD_DIM = 128
OTHER_HEAD_DIMS = (64, 80, 96, 256)
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# A mix of levels sets the bits of a token's class (0, 1, 2, 4) and the arithmetic (28, 56, 104 bits).
BASE_MIX = "two-level"
MIXES = {
    "two-level": (5, 6),
    "uniform": (5,),
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


@dataclass(frozen=True)
class Case:
    """One way to launch a kernel; ``base`` cases are compiled for every target."""

    name: str
    call: Callable[[], object]
    base: bool = False


@dataclass(frozen=True)
class StaticCase:
    """A launch of which the static report tells figures, and what one of its programs does."""

    name: str
    call: Callable[[], object]
    work: Work


def static_cases() -> Iterator[StaticCase]:
    """The kernels as an 8B model on 16-bit states would launch them: head_dim 128, twelve settings, four queries a
    head, a quarter of the tokens at six levels and the rest at five."""
    yield from _static_coding()
    yield from _static_packing()
    yield from _static_attention()


def _static_coding() -> Iterator[StaticCase]:
    levels, settings = torch.tensor([[5, 6]]).repeat(12, 500), 12
    x = torch.zeros(2, 1000, HEAD_DIM, dtype=torch.bfloat16)
    y, tables = x.float(), codebook_tables(HEAD_DIM, 16, CPU)
    # Settings share what is read of a value; a code is a byte, a decoded value of the states' type.
    for name, call, read, written, trips in (
        ("affine codes", partial(affine_triton.affine_quantize, x, levels, HEAD_DIM), 2, 1, ()),
        ("affine values", partial(affine_triton.affine_quantize_dequantize, x, levels, HEAD_DIM), 2, 2, ()),
        ("codebook codes", partial(codebook_triton.codebook_quantize, y, levels, tables), 4, 1, (5,)),
        ("codebook values", partial(codebook_triton.codebook_quantize_dequantize, y, levels, tables), 4, 4, (5,)),
    ):  # fmt: skip
        work = Work(2048 * settings, read / settings + written, (settings, *trips))
        yield StaticCase(name, call, work)


def _static_packing() -> Iterator[StaticCase]:
    layout = _mixed_layout()
    bits = 32 * layout.words / (layout.heads * layout.tokens * HEAD_DIM)
    codes = torch.zeros(layout.heads, layout.tokens, HEAD_DIM, dtype=torch.uint8)
    classes = len(layout.class_levels)
    # A word overlaps six groups at most; a program writes 256 words.
    pack = Work(round(256 * 32 / bits), 1 + bits / 8, (6, classes))
    yield StaticCase("pack", partial(packing_triton.pack, codes, layout), pack)
    unpack = Work(2048, bits / 8 + 1, (classes,))
    yield StaticCase("unpack codes", partial(packing_triton.unpack, _words(layout), layout), unpack)
    for kind in ("affine", "codebook"):
        packed = _vectors(layout, kind)
        values = Work(2048, bits / 8 + 2 + 32 / 8 / HEAD_DIM, (classes,))
        call = partial(packing_triton.unpack_dequantize, packed, torch.bfloat16)
        yield StaticCase(f"unpack {kind} values", call, values)


def _static_attention() -> Iterator[StaticCase]:
    layout, query = _mixed_layout(), torch.zeros(8, HEAD_DIM, dtype=torch.bfloat16)
    bits = 32 * layout.words / (layout.heads * layout.tokens * HEAD_DIM)
    # 131,072 tokens are 16 blocks a program, which walks each 16 tokens at a time, classes one by one.
    blocks, tiles = 16, 4
    work = Work(2 * blocks * 64 * HEAD_DIM, bits / 8 + 32 / 8 / HEAD_DIM, (blocks, tiles, 2))
    for kind in ("affine", "codebook"):
        packed = _vectors(layout, kind)
        call = partial(attention_triton.packed_attention, query, packed, packed, 0.1)
        yield StaticCase(f"attention {kind}", call, work)


def _mixed_layout() -> PackedLayout:
    levels = torch.where(torch.arange(1024) % 4 == 0, 6, 5)
    return PackedLayout.build(levels, 2, HEAD_DIM)


def cases() -> Iterator[Case]:
    """Every case, a kernel's base case first."""
    yield from affine_cases()
    yield from codebook_cases()
    yield from packing_cases()
    yield from attention_cases()


def affine_cases() -> Iterator[Case]:
    """Codes and values by type, width and grouping."""
    levels = torch.randint(2, 17, (3, 1000))
    shapes = [(HEAD_DIM, HEAD_DIM, "bfloat16"), (HEAD_DIM, 16, "bfloat16")]
    shapes += [(HEAD_DIM, HEAD_DIM, name) for name in DTYPES if name != "bfloat16"]
    shapes += [(head_dim, head_dim, "bfloat16") for head_dim in OTHER_HEAD_DIMS]
    for index, (head_dim, group, name) in enumerate(shapes):
        x = torch.zeros(2, 1000, head_dim, dtype=DTYPES[name])
        label = f"head_dim={head_dim} group={group} {name}"
        codes = partial(affine_triton.affine_quantize, x, levels, group)
        values = partial(affine_triton.affine_quantize_dequantize, x, levels, group)
        yield Case(f"affine codes {label}", codes, base=not index)
        yield Case(f"affine values {label}", values, base=not index)
    one = torch.zeros(1, 1, 64)
    yield Case("affine codes one token", partial(affine_triton.affine_quantize, one, levels[:1, :1], 64))


def codebook_cases() -> Iterator[Case]:
    """Codes and values by width; the size of the codebooks is read at run time."""
    levels = torch.randint(2, 17, (3, 1000))
    for head_dim in (HEAD_DIM, *OTHER_HEAD_DIMS):
        y, tables = torch.zeros(2, 1000, head_dim), codebook_tables(head_dim, 16, CPU)
        codes = partial(codebook_triton.codebook_quantize, y, levels, tables)
        values = partial(codebook_triton.codebook_quantize_dequantize, y, levels, tables)
        yield Case(f"codebook codes head_dim={head_dim}", codes, base=head_dim == HEAD_DIM)
        yield Case(f"codebook values head_dim={head_dim}", values, base=head_dim == HEAD_DIM)


def packing_cases() -> Iterator[Case]:
    """Packing and unpacking by mix and width; values also by coding and type."""
    for head_dim, mix in _widths_and_mixes():
        base = (head_dim, mix) == (HEAD_DIM, BASE_MIX)
        label, layout = f"head_dim={head_dim} {mix}", _layout(mix, head_dim)
        codes = torch.zeros(2, 1000, head_dim, dtype=torch.uint8)
        yield Case(f"pack {label}", partial(packing_triton.pack, codes, layout), base)
        yield Case(f"unpack {label}", partial(packing_triton.unpack, _words(layout), layout), base)
        for kind in ("affine", "grouped", "codebook") if base else ("affine",):
            yield _values_case(layout, kind, label, "bfloat16", base)
    for name in ("float16", "float32"):
        layout = _layout(BASE_MIX, HEAD_DIM)
        yield _values_case(layout, "affine", f"head_dim={HEAD_DIM} {BASE_MIX}", name, base=False)


def _values_case(layout: PackedLayout, kind: str, label: str, dtype: str, base: bool) -> Case:
    call = partial(packing_triton.unpack_dequantize, _vectors(layout, kind), DTYPES[dtype])
    return Case(f"unpack {kind} {label} {dtype}", call, base)


def attention_cases() -> Iterator[Case]:
    """Attention by mix, width, pair of codings and queries a head."""
    for head_dim, mix in _widths_and_mixes():
        base = (head_dim, mix) == (HEAD_DIM, BASE_MIX)
        layout = _layout(mix, head_dim)
        affine, other = _vectors(layout, "affine"), _vectors(_layout("uniform", head_dim), "affine")
        pairs = {"affine": (affine, affine, 4)}
        if base:
            codebook, grouped = _vectors(layout, "codebook"), _vectors(layout, "grouped")
            pairs["affine, 1 query"] = (affine, affine, 1)
            pairs["affine, 8 queries"] = (affine, affine, 8)
            pairs["codebook"] = (codebook, codebook, 4)
            pairs["codebook keys, grouped values"] = (codebook, grouped, 4)
            pairs["two layouts"] = (affine, other, 4)
        for kind, (keys, values, group) in pairs.items():
            query = torch.zeros(2 * group, head_dim, dtype=torch.bfloat16)
            call = partial(attention_triton.packed_attention, query, keys, values, 0.1)
            yield Case(f"attention {kind} head_dim={head_dim} {mix}", call, base)


def _widths_and_mixes() -> list[tuple[int, str]]:
    others = [(HEAD_DIM, mix) for mix in MIXES if mix != BASE_MIX]
    return [(HEAD_DIM, BASE_MIX), *others, *((head_dim, BASE_MIX) for head_dim in OTHER_HEAD_DIMS)]


def compilations(targets: Iterable[str]) -> Iterator[tuple[str, str, Launch]]:
    """Name, target and launch of all that is compiled: each code once for a target."""
    seen = set()
    for case in cases():
        for target in targets:
            if target in BASE_TARGETS and not case.base:
                continue
            (launch,) = capture(case.call, TARGETS[target].backend)
            code = (target, launch.kernel.__name__, source_of(launch).hash(), str(launch.options))
            if code not in seen:
                seen.add(code)
                yield case.name, target, launch


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
    return _usage(launch, _compiled(launch, target), target)


def static_row(case: StaticCase, target: str) -> dict:
    """What the static report says of one case on one target."""
    (launch,) = capture(case.call, TARGETS[target].backend)
    compiled = _compiled(launch, TARGETS[target])
    usage = _usage(launch, compiled, TARGETS[target])
    return {"kernel": case.name, "target": target, **figures(compiled, usage, target, case.work)}


def _compiled(launch: Launch, target: GPUTarget) -> CompiledKernel:
    return triton.compile(source_of(launch), target=target, options=launch.options)


def _usage(launch: Launch, compiled: CompiledKernel, target: GPUTarget) -> dict[str, int]:
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
    """Digest of the kernels' code, its comments and docstrings left out: a committed table belongs to it."""
    folder = Path(affine_triton.__file__).parent
    files = sorted([*folder.glob("*_triton.py"), folder / "launch.py", folder / "packed_rows.py"])
    code = "".join(_code_of(path.read_text()) for path in files)
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def _code_of(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.dump(tree)


def write_table(rows: list[dict], path: Path) -> None:
    """One line a row, after the digest of the source and Triton's version."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    head = json.dumps({"source": source_digest(), "triton": triton.__version__})[:-1]
    path.write_text(f'{head}, "rows": [\n  {lines}\n]}}\n')


def write_static(options: argparse.Namespace) -> int:
    """Print the static report's rows and write it, unless cases were left out and no file was named."""
    rows = []
    for case in static_cases():
        if options.only and case.name not in options.only:
            continue
        for target in options.targets:
            rows.append(static_row(case, target))
            print(rows[-1], flush=True)
    if options.out or not options.only:
        write_table(rows, options.out or STATIC)
    return 0 if rows else 1


def main() -> int:
    """Compile, print a line for each case, write the table; 1 if one does not compile."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these cases alone")
    parser.add_argument("--out", type=Path, help="where to write the table, JSON")
    parser.add_argument("--static", action="store_true", help=f"write the static report, {STATIC}, instead")
    options = parser.parse_args()
    if options.static:
        return write_static(options)

    rows, failures, started = [], 0, time.monotonic()
    for name, target, launch in compilations(options.targets):
        if options.only and name not in options.only:
            continue
        try:
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
        write_table(rows, options.out)
    return 1 if failures or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
