"""What a compiled kernel tells of its speed without a GPU: instructions, occupancy and a bound on time.

The assembly is walked once from top to bottom: an instruction counts as often as the loops around it run, and
both sides of a branch count. So the figures are bounds of what the processors must issue, not measurements:
latency, conflicts and waiting come on top.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton

__all__ = ["CACHE_VALUES", "MACHINES", "Machine", "Work", "figures", "instructions"]

CACHE_VALUES = 131_072 * 8 * 128 * 2
"""Keys and values of 131,072 tokens, 8 heads of 128: one layer of an 8B model, what a bound on time is of."""


@dataclass(frozen=True)
class Work:
    """What one program does: ``values`` when its loops run ``trips`` times by depth; ``nbytes`` a value that memory
    must move at least."""

    values: int
    nbytes: float
    trips: tuple[int, ...] = ()


@dataclass(frozen=True)
class Machine:
    """A target's multiprocessor and the accelerator that has it, by the makers' data sheets.

    registers, shared: of a multiprocessor, in 32-bit registers and bytes; warps: resident at most; lanes of a warp;
    issue: warp instructions a clock of a multiprocessor; count and hertz: multiprocessors and their clock;
    bandwidth: bytes a second.
    """

    accelerator: str
    count: int
    hertz: float
    bandwidth: float
    issue: int = 4
    lanes: int = 32
    registers: int = 65536
    shared: int = 228 * 1024
    reserved: int = 1024
    warps: int = 64
    blocks: int = 32

    def resident(self, registers: int, shared: int, warps: int) -> int:
        """Blocks of so many registers a lane, bytes and warps that a multiprocessor holds."""
        a_warp = -(-registers // 8) * 8 * self.lanes
        by_registers = self.registers // a_warp // warps if registers else self.blocks
        by_shared = self.shared // (shared + self.reserved) if shared + self.reserved else self.blocks
        return min(by_registers, by_shared, self.warps // warps, self.blocks)

    def microseconds(self, per_value: float, nbytes: float, values: int = CACHE_VALUES) -> float:
        """The least time for ``values`` values: of reading and writing, or of issuing, whichever is longer."""
        issued = values * per_value / self.lanes / (self.count * self.issue * self.hertz)
        return 1e6 * max(issued, values * nbytes / self.bandwidth)


MACHINES = {
    "cuda:80": (Machine("A100", 108, 1.41e9, 2.04e12, shared=164 * 1024),),
    "cuda:90": (Machine("H100", 132, 1.755e9, 3.35e12), Machine("H200", 132, 1.755e9, 4.8e12)),
    "cuda:100": (Machine("B200", 148, 1.965e9, 8.0e12),),
    # A wave of 64 takes each of the four 16-lane units four clocks; registers are those of all four together.
    "hip:gfx942": (
        Machine("MI300X", 304, 2.1e9, 5.3e12, 1, 64, 4 * 512 * 64, shared=64 * 1024, reserved=0, warps=32),
    ),
}


def figures(compiled: triton.compiler.CompiledKernel, usage: dict[str, int], target: str, work: Work) -> dict:
    """Occupancy, instructions and bytes a value, and bounds in microseconds by accelerator, of one compilation."""
    warps, machines = compiled.metadata.num_warps, MACHINES[target]
    lines = _amd_lines(compiled.asm["amdgcn"]) if "amdgcn" in compiled.asm else _sass(compiled.asm["cubin"])
    issued = instructions(lines, work.trips) * warps * machines[0].lanes / work.values
    nbytes = work.nbytes
    return {
        **usage,
        "warps": warps,
        "blocks": machines[0].resident(usage["registers"], usage["shared"], warps),
        "instructions": round(issued, 2),
        "bytes": round(nbytes, 4),
        "microseconds": {at.accelerator: round(at.microseconds(issued, nbytes), 1) for at in machines},
    }


def instructions(lines: list[str], trips: tuple[int, ...]) -> int:
    """Instructions that a warp issues: of a listing of labels (``name:``) and instructions, a loop's as often as
    ``trips`` says for its depth, the outermost first; deeper loops run once.

    >>> instructions(["a", "top:", "b", "c", "bra top", "d"], (10,))
    32
    """
    places, listing = {}, []
    for line in lines:
        if line.endswith(":"):
            places[line[:-1]] = len(listing)
        else:
            listing.append(line)
    loops = set()
    for at, line in enumerate(listing):
        target = places.get(line.split()[-1], at)
        # A branch to itself pads the end of a function.
        if target < at:
            loops.add((target, at))
    ends = {}
    for first, last in loops:  # several ways back to one head are one loop
        ends[first] = max(last, ends.get(first, last))
    total = 0
    for at in range(len(listing)):
        depth = sum(first <= at <= last for first, last in ends.items())
        times = 1
        for count in trips[:depth]:
            times *= count
        total += times
    return total


def _sass(cubin: bytes) -> list[str]:
    """Labels and instructions of a program for NVIDIA's GPUs, padding left out."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", path]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = []
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            lines.append(label[1] + ":")
        else:
            found = re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line)
            if found and not found[1].startswith("NOP"):
                lines.append(re.sub(r"`\((\.L_x_\d+)\)", r" \1", found[1]))
    return lines


def _amd_lines(assembly: str) -> list[str]:
    lines = []
    for line in assembly.split(".section\t.rodata")[0].splitlines():
        code = line.split(";")[0].rstrip()
        if label := re.match(r"(\.LBB\w+):", code):
            lines.append(label[1] + ":")
        elif re.match(r"\s+[sv_dbgf][a-z_]*_\w+", code):
            lines.append(code.strip())
    return lines
