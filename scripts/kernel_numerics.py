"""What a kernel's assembly must not do with floating-point numbers: flush subnormals, round any way but to nearest.

Codes and packed words equal the reference's bit for bit only with IEEE arithmetic. Attention may be approximate where
it says so (exponential, logarithm and the last division), but not in conversions and products: codes are subnormal.
"""

import re
from collections.abc import Iterator

__all__ = ["numeric_faults"]

_INSTRUCTION = re.compile(r"^\s*(?:@!?%p\d+\s+)?([a-z][a-z0-9_]*(?:\.[a-z0-9_]+)+)", re.MULTILINE)
_DIRECTED = ("rz", "rm", "rp")
_APPROXIMATE = ("approx", "full")
# Weights of less than 2**-126 are zeros; a logarithm's polynomial has no terms so small.
_PTX_ATTENTION = {
    "ex2.approx.ftz.f32",
    "lg2.approx.ftz.f32",
    "fma.rn.ftz.f32",
    "div.full.f32",
    "div.approx.f32",
}

_MODES = {
    "float_round_mode_32": "0",
    "float_round_mode_16_64": "0",
    "float_denorm_mode_32": "3",
    "float_denorm_mode_16_64": "3",
}
_AMD_ALWAYS = (
    (r"\bv_cvt_\w*rtz\w*", "rounds to zero"),
    (r"\bs_setreg\w*\s.*HW_REG_MODE.*", "changes the mode"),
    (r"\bs_(?:denorm|round)_mode\b.*", "changes the mode"),
    (r"\bv_(?:mad|mac|madak|madmk)_(?:legacy_)?f(?:16|32)\w*", "flushes subnormals"),
)
_AMD_CODING = (r"\bv_(?:exp|log|sqrt|rsq)_f(?:16|32)\w*", "is approximate")


def numeric_faults(kernel: str, assembly: dict[str, str]) -> list[str]:
    """What is wrong with the numbers of ``kernel``, by its PTX or its assembly for AMD; nothing, as it should be.

    >>> numeric_faults("pack_kernel", {"ptx": "  cvt.rz.f16.f32 %rs1, %f1;"})
    ['cvt.rz.f16.f32 rounds to zero']
    """
    attends = kernel.startswith("attention")
    if "amdgcn" in assembly:
        return sorted(set(_amd_faults(assembly["amdgcn"], attends)))
    return sorted(set(_ptx_faults(assembly["ptx"], attends)))


def _ptx_faults(ptx: str, attends: bool) -> Iterator[str]:
    for name in set(_INSTRUCTION.findall(ptx)):
        parts = name.split(".")
        if attends and name in _PTX_ATTENTION:
            continue
        if "ftz" in parts:
            yield f"{name} flushes subnormals"
        if set(_DIRECTED) & set(parts):
            yield f"{name} rounds {'to zero' if 'rz' in parts else 'up or down'}"
        if set(_APPROXIMATE) & set(parts):
            yield f"{name} is approximate"


def _amd_faults(assembly: str, attends: bool) -> Iterator[str]:
    for mode, wanted in _MODES.items():
        held = re.findall(rf"\.amdhsa_{mode}\s+(\d+)", assembly)
        if set(held) != {wanted}:
            yield f"{mode} is {', '.join(held) or 'not told'} and not {wanted}"
    for pattern, why in (*_AMD_ALWAYS, *(() if attends else (_AMD_CODING,))):
        for line in set(re.findall(pattern, assembly)):
            yield f"{line.split(';')[0].strip()} {why}"
    # Every division begins with an approximate reciprocal, and an IEEE one ends with a correction.
    if not attends:
        counts = [len(re.findall(rf"\b{name}_f32", assembly)) for name in ("v_div_scale", "v_div_fixup")]
        if counts[0] != 2 * counts[1]:
            yield f"a division is not IEEE: {counts[0]} v_div_scale_f32, {counts[1]} v_div_fixup_f32"
