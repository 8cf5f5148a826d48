"""Compile every Triton kernel for GPUs that need not be there, once for each kind of code it becomes.

Writes a table of registers, spilled bytes and shared memory as the assemblers report them. Arguments
are captured from the real launches on CPU tensors, so what is compiled is what would run; what would flush
subnormals or not round to nearest is an error (``kernel_numerics``). From a base
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
from pathlib import Path
from unittest import mock

os.environ.pop("TRITON_INTERPRET", None)  # an interpreted kernel cannot be compiled
# How Triton 3.9 compiles by default; the kernels give the same bits with and without fused multiply-adds.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton
from kernel_cases import StaticCase, cases, static_cases
from kernel_numerics import numeric_faults
from static_figures import figures
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.jit import JITFunction, KernelParam

from semkv_bench.kernels import affine_triton

TARGETS = {
    "cuda:80": GPUTarget("cuda", 80, 32),
    "cuda:90": GPUTarget("cuda", 90, 32),
    "cuda:100": GPUTarget("cuda", 100, 32),
    "hip:gfx942": GPUTarget("hip", "gfx942", 64),
}
BASE_TARGETS = ("cuda:80", "cuda:100")  # the base cases alone; the others get every case
STATIC = Path(__file__).resolve().parents[1] / "results" / "kernels" / "static.json"


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
        elif parameter.is_constexpr or value is None or (_specialized(parameter, value) and value == 1):
            kind = "constexpr"
            constants[(index,)] = value
        elif isinstance(value, float):
            kind = "fp32"
        else:
            kind = "i32" if -(2**31) <= value < 2**31 else "i64"
            aligned = _specialized(parameter, value) and value % 16 == 0
        signature[parameter.name] = kind
        if aligned:
            attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)


def _specialized(parameter: KernelParam, value: object) -> bool:
    return type(value) is int and not parameter.do_not_specialize


_TYPE_NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
}


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
    if faults := numeric_faults(launch.kernel.__name__, compiled.asm):
        raise RuntimeError("; ".join(faults))
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
    files = sorted(
        [
            *folder.glob("*_triton.py"),
            folder / "launch.py",
            folder / "packed_rows.py",
            folder / "aligned_rows.py",
            folder / "attention_jobs.py",
        ]
    )
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
        for target in [name for name in case.targets if name in options.targets]:
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
