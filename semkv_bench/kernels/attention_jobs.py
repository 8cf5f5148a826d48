"""What a launch of packed attention works on: jobs, each some tokens of one pair of level counts of one row."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from semkv_bench.errors import SemkvError
from semkv_bench.kernels.aligned import Segment
from semkv_bench.kernels.attention_reference import Piece
from semkv_bench.kernels.packed import PackedVectors

__all__ = [
    "AFFINE",
    "CODEBOOK",
    "E4M3",
    "E5M2",
    "FIELDS",
    "GROUPED",
    "MX",
    "NV",
    "SYMMETRIC",
    "Work",
    "attention_work",
    "tile_rows",
]

AFFINE, GROUPED, CODEBOOK, E4M3, E5M2, MX, NV, SYMMETRIC = range(8)
"""How codes become values: a scale and a zero of the token; of each group of its channels; a table and a norm; bits of
small floats and a scale of the token; and, with a scale of each block of channels, bits of e2m1 by an e8m0, or by an
e4m3, and codes of either sign by a float16."""

FIELDS = 13  # of a job
_PROGRAMS = 768  # worth having, if the cache is long enough


@dataclass(frozen=True, eq=False)
class Work:
    """What a launch wants to know of coded pieces; it holds while the pieces are the same.

    jobs: int64 [rows, parts, FIELDS] on the pieces' device; kinds: pairs of level counts, by number.
    held: tensors whose addresses are in jobs. sides: kind and groups of keys and of values. parts: of a row. heads: of
    the cache.
    """

    jobs: Tensor | None
    kinds: tuple[tuple[int, int], ...]
    held: tuple[Tensor, ...]
    sides: tuple[tuple[int, int], tuple[int, int]]
    parts: int
    heads: int


def attention_work(rows: Sequence[Sequence[Piece]]) -> Work:
    """See ``attention_reference.attention_work``; nothing is read back from a GPU."""
    pieces = [piece for row in rows for piece in row]
    if pieces:
        check_subnormals(pieces[0][0].words.device)
    if not pieces:
        return Work(None, (), (), ((AFFINE, 1), (AFFINE, 1)), 0, 1)
    sides = tuple((_kind(vectors), vectors.groups) for vectors in pieces[0])
    pairs = {pair for keys, values in pieces for pair in _pairs(keys, values)}
    kinds = tuple(sorted({(key.levels, value.levels) for key, value in pairs}))
    rows_of_tile = tile_rows(pieces[0][0].layout.head_dim, sides)
    tiles = sum(
        -(-key.tokens // (3 * rows_of_tile)) for keys, values in pieces for key, _ in _pairs(keys, values)
    )
    per_job = 3 * rows_of_tile * max(1, tiles * pieces[0][0].layout.heads // _PROGRAMS)
    held: list[Tensor] = []
    jobs = [[job for piece in row for job in _jobs(*piece, kinds, per_job, held)] for row in rows]
    parts = max(map(len, jobs))
    nothing = [-1] + [0] * (FIELDS - 1)
    table = [row + [nothing] * (parts - len(row)) for row in jobs]
    device = pieces[0][0].words.device
    return Work(
        torch.tensor(table, dtype=torch.int64).to(device, non_blocking=True),
        kinds,
        tuple(held),
        sides,
        parts,
        pieces[0][0].layout.heads,
    )


def check_subnormals(device: torch.device) -> None:
    """Raise SemkvError for a GPU whose matrix units take subnormal float16, as codes are, for zero."""
    if device.type == "cuda" and torch.version.hip:
        name = torch.cuda.get_device_properties(device).gcnArchName
        if name.startswith("gfx90a"):
            raise SemkvError(
                f"attention over codes needs matrix units that keep subnormal numbers, which those of {name} do not: "
                "use attention='dequantize'"
            )


def _pairs(keys: PackedVectors, values: PackedVectors) -> list[tuple[Segment, Segment]]:
    return list(zip(keys.layout.segments, values.layout.segments, strict=True))


def _kind(vectors: PackedVectors) -> int:
    if vectors.element == "e2m1":
        return MX if vectors.scale.dtype == torch.uint8 else NV
    if vectors.element is not None:
        return {"e4m3": E4M3, "e5m2": E5M2, "symmetric": SYMMETRIC}[vectors.element]
    if not vectors.is_affine:
        return CODEBOOK
    return AFFINE if vectors.groups == 1 else GROUPED


def _jobs(
    keys: PackedVectors,
    values: PackedVectors,
    kinds: Sequence[tuple[int, int]],
    per_job: int,
    held: list[Tensor],
) -> list[list[int]]:
    """Jobs of one piece, segment by segment, at most ``per_job`` tokens each."""
    jobs = []
    metadata = [_metadata(side) for side in (keys, values)]
    held += [
        *metadata,
        keys.words,
        values.words,
        *(side.offset for side in (keys, values) if side.tables is not None),
    ]
    for segments in _pairs(keys, values):
        at, beside, tables = [], [], []
        for side, segment, data in zip((keys, values), segments, metadata, strict=True):
            layout = side.layout
            words = side.words.data_ptr() + 4 * segment.unit * layout.pairs
            at += [words, layout.units * layout.pairs]
            # The kernel counts scales by block by bytes, other metadata by 16 bits.
            token, by_block = data.itemsize * data.shape[2], _kind(side) >= MX
            beside += [
                data.data_ptr() + segment.first * token,
                data.shape[1] * token // (1 if by_block else 2),
            ]
            row = 4 * segment.levels * side.top
            if by_block:
                tables.append(struct.unpack("i", struct.pack("f", side.whole))[0])
            else:
                tables.append(0 if side.tables is None else side.offset.data_ptr() + row)
        kind = kinds.index(tuple(segment.levels for segment in segments))
        tokens = segments[0].tokens
        jobs += [
            [kind, *at, *beside, first, min(first + per_job, tokens), *tables]
            for first in range(0, tokens, per_job)
        ]
    return jobs


def _metadata(vectors: PackedVectors) -> Tensor:
    """float16 [heads, tokens, n], contiguous: a token's scales and zeros, or its norm; others have scales alone."""
    scale, zero = vectors.scale, vectors.zero
    if _kind(vectors) >= MX:
        scale = scale.contiguous()
        # The kernel reads a token's scales as words.
        return scale if scale.data_ptr() % 16 == 0 else scale.clone()
    if zero is None:
        return scale.contiguous()
    heads, tokens, groups = scale.shape
    strides = (tokens * 2 * groups, 2 * groups, 1)
    if scale.stride() == zero.stride() == strides and zero.data_ptr() == scale.data_ptr() + 2 * groups:
        return scale.as_strided((heads, tokens, 2 * groups), strides)  # as they are stored
    return torch.cat([scale, zero], dim=-1)


def tile_rows(head_dim: int, sides: Sequence[tuple[int, int]]) -> int:
    """Rows of a tile, each of three tokens: as many as the registers hold."""
    simple = all(kind not in (GROUPED, CODEBOOK) for kind, _ in sides)
    return 64 if simple and head_dim <= 128 else 32 if head_dim <= 128 else 16
