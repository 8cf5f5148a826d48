"""The ways in which ``check_kernels`` launches every kernel: one for each kind of code, and those that it counts."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from static_figures import Work

from semkv_bench.grid.levels import aligned_plan
from semkv_bench.kernels import affine_triton, attention_triton, codebook_triton, packing_triton
from semkv_bench.kernels.aligned import AlignedLayout
from semkv_bench.kernels.packed import PackedLayout, PackedVectors
from semkv_bench.quantizers.turboquant import codebook_tables

__all__ = ["HEAD_DIM", "Case", "StaticCase", "cases", "static_cases"]

TARGETS = ("cuda:80", "cuda:90", "cuda:100", "hip:gfx942")
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
# Channels of a block, its element, and what its scales are stored as.
BLOCKS = {
    "mxfp4": (32, "e2m1", torch.uint8),
    "nvfp4": (16, "e2m1", torch.float8_e4m3fn),
    "q4_0": (32, "symmetric", torch.float16),
}
CPU = torch.device("cpu")


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
    targets: tuple[str, ...] = TARGETS


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
    # At 131,072 tokens of 8 heads a program takes seven tiles of three tokens a row; of a mix, of each level count.
    tiles, rows = 7, 64
    for name, levels, kinds in (
        ("affine 6/5", (6, 5), ("affine", "affine")),
        ("affine 5", (5,), ("affine", "affine")),
        ("affine 4", (4,), ("affine", "affine")),
        ("codebook 4", (4,), ("codebook", "codebook")),
        ("e4m3", (256,), ("e4m3", "e4m3")),
        ("e5m2", (256,), ("e5m2", "e5m2")),
        *((kind, (16,), (kind, kind)) for kind in BLOCKS),
    ):
        rows = 32 if "codebook" in kinds else 64
        bits = sum(aligned_plan(count).packed_bits for count in levels) / len(levels)
        metadata = 2 if "codebook" in kinds else 4
        if kinds[0] in BLOCKS:
            channels, _, stored = BLOCKS[kinds[0]]
            metadata = HEAD_DIM // channels * stored.itemsize
        work = Work(2 * 3 * rows * tiles * len(levels) * HEAD_DIM, bits / 8 + metadata / HEAD_DIM, (tiles,))
        targets = TARGETS if len(levels) > 1 or kinds[0] in ("e4m3", *BLOCKS) else ("cuda:90",)
        yield StaticCase(f"attention {name}", _attend(levels, kinds=kinds), work, targets)
    # The same launch with tokens in 16 bits beside it: what it takes of a multiprocessor. Its loops over sinks and over
    # open tokens, 32 at a time, are counted as often as those over tiles.
    coded, plain = 2 * 3 * 64 * tiles * 2, 2 * 2 * 32 * tiles
    nbytes = (coded * 2.5 / 8 + plain * 2) / (coded + plain)
    work = Work((coded + plain) * HEAD_DIM, nbytes, (tiles,))
    yield StaticCase("attention affine 6/5 and 16 bits", _attend((6, 5), plain=True), work)


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
    """Attention by levels, width, coding, queries a head, and with or without tokens in 16 bits."""
    two, one = (6, 5), (5,)
    for label, call in (
        ("affine two-level and 16 bits", _attend(two, plain=True)),
        ("affine uniform, 64 queries", _attend(one, group=64)),
        ("codebook keys, grouped values", _attend(one, kinds=("codebook", "grouped"))),
        ("affine uniform head_dim=80", _attend(one, head_dim=80)),
        ("e4m3 keys, e5m2 values", _attend((256,), kinds=("e4m3", "e5m2"))),
        ("mxfp4 keys, affine values", _attend((16,), kinds=("mxfp4", "affine"))),
        ("q4_0 keys, nvfp4 values", _attend((16,), kinds=("q4_0", "nvfp4"))),
        ("mxfp4 head_dim=96", _attend((16,), kinds=("mxfp4", "mxfp4"), head_dim=96)),
    ):
        yield Case(f"attention {label}", call, base=label == "affine two-level and 16 bits")


def _attend(
    key_levels: tuple[int, ...],
    value_levels: tuple[int, ...] | None = None,
    kinds: tuple[str, str] = ("affine", "affine"),
    head_dim: int = HEAD_DIM,
    group: int = 4,
    plain: bool = False,
) -> Callable[[], object]:
    """Attention of one row over 2,048 tokens of two heads, levels in turn, and perhaps over 64 in bfloat16."""
    counts = [torch.tensor(each or (2,)) for each in (key_levels, value_levels or key_levels)]
    keys, values = (each[torch.arange(2048) % len(each)] for each in counts)
    order = keys * 257 + values
    sides = [
        _vectors(AlignedLayout.build(levels, 2, head_dim, order), kind)
        for levels, kind in zip((keys, values), kinds, strict=True)
    ]
    work = attention_triton.attention_work([[tuple(sides)] if key_levels else []])
    query = torch.zeros(1, 2 * group, head_dim, dtype=torch.bfloat16)
    open_ = [tuple(torch.zeros(2, 1, 2, 64, head_dim, dtype=torch.bfloat16))] if plain else []
    return partial(attention_triton.packed_attention, query, query, work, open_, 0.1)


def _widths_and_mixes() -> list[tuple[int, str]]:
    others = [(HEAD_DIM, mix) for mix in MIXES if mix != BASE_MIX]
    return [(HEAD_DIM, BASE_MIX), *others, *((head_dim, BASE_MIX) for head_dim in OTHER_HEAD_DIMS)]


def _layout(mix: str, head_dim: int) -> PackedLayout:
    choices = torch.tensor(MIXES[mix])
    return PackedLayout.build(choices[torch.arange(1000) % len(choices)], 2, head_dim)


def _words(layout: PackedLayout | AlignedLayout) -> torch.Tensor:
    return torch.zeros(layout.words, dtype=torch.int32)


def _vectors(layout: PackedLayout | AlignedLayout, kind: str) -> PackedVectors:
    groups = layout.head_dim // 16 if kind == "grouped" else 1
    metadata = torch.zeros(layout.heads, layout.tokens, 2 * groups, dtype=torch.float16)
    scale, zero = metadata.chunk(2, dim=-1)
    if kind in ("e4m3", "e5m2"):
        return PackedVectors(layout, _words(layout), scale.float(), element=kind)
    if kind in BLOCKS:
        channels, element, stored = BLOCKS[kind]
        scale = torch.zeros(layout.heads, layout.tokens, layout.head_dim // channels, dtype=stored)
        return PackedVectors(layout, _words(layout), scale, element=element)
    if kind == "codebook":
        tables = codebook_tables(layout.head_dim, 16 if max(layout.class_levels) <= 16 else 256, CPU)
        return PackedVectors(layout, _words(layout), scale.contiguous(), tables=tables)
    return PackedVectors(layout, _words(layout), scale, zero)
