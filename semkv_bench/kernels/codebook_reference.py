"""Codebook coding of rotated vectors in torch: the meaning of the Triton kernel of the same name.

norm = ||y||, summed in float64 and rounded to float16 before coding, so that the order of the sum
does not show; code = number of thresholds that y/norm reaches; y' = centroid * norm. All float32.

A vector whose norm rounds to 0 comes back as zeros; a norm beyond 65504 saturates, codes clamp at the
outer centroids. Nothing finite becomes infinite or NaN.
"""

import torch
from torch import Tensor

from semkv_bench.kernels.codebook_tables import CELLS, CodebookTables
from semkv_bench.kernels.numerics import NonFiniteError, check_rows, to_float16

__all__ = ["codebook_dequantize", "codebook_quantize", "codebook_quantize_dequantize"]


def codebook_quantize(y: Tensor, levels: Tensor, tables: CodebookTables) -> tuple[Tensor, Tensor]:
    """Codes and norms of rotated vectors y float32 [heads, tokens, head_dim].

    levels is int64 [S, tokens] or [S, 1], at most ``tables.top``. Returns codes uint8
    [S, heads, tokens, head_dim] and norm float16 [heads, tokens], which all settings share.
    Raises NonFiniteError.
    """
    check_rows(y, levels, tables.top)
    norm = _norm(y)
    cell = _cell(y, norm, tables)
    codes = torch.empty(len(levels), *y.shape, dtype=torch.uint8, device=y.device)
    for setting, row in enumerate(levels):
        codes[setting] = _lookup(tables.cell_code, row, cell)
    return codes, norm.squeeze(-1)


def codebook_dequantize(codes: Tensor, norm: Tensor, levels: Tensor, tables: CodebookTables) -> Tensor:
    """Rotated float32 values [heads, tokens, head_dim] from codes of that shape.

    norm is float16 [heads, tokens], levels int64 [tokens].
    """
    centroids = tables.centroids[levels[:, None], codes.long()]
    return centroids * norm.float().unsqueeze(-1)


def codebook_quantize_dequantize(
    y: Tensor, levels: Tensor, tables: CodebookTables, out: Tensor | None = None
) -> Tensor:
    """What is left of rotated vectors y after coding, still rotated: float32 [S, heads, tokens, head_dim].

    Arguments and errors as in ``codebook_quantize``; ``out`` may be strided, its last dimension contiguous.
    """
    check_rows(y, levels, tables.top)
    norm = _norm(y)
    cell = _cell(y, norm, tables)
    if out is None:
        out = torch.empty(len(levels), *y.shape, device=y.device)
    for setting, row in enumerate(levels):
        torch.mul(_lookup(tables.cell_value, row, cell), norm.float(), out=out[setting])
    return out


def _norm(y: Tensor) -> Tensor:
    exact = torch.linalg.vector_norm(y, dim=-1, keepdim=True, dtype=torch.float64)
    if not bool(torch.isfinite(exact).all()):
        raise NonFiniteError("NaN or infinity in the tensor to be quantized")
    return to_float16(exact.float())


def _cell(y: Tensor, norm: Tensor, tables: CodebookTables) -> Tensor:
    scale = norm.float()
    unit = y / scale.masked_fill(scale == 0, torch.inf)
    # Floor before the shift: adding first would round small negative values up into the next cell.
    cells = unit.mul_(tables.cells_per_unit).floor_().clamp_(-CELLS // 2, CELLS // 2 - 1)
    return cells.add_(CELLS // 2).long()


def _lookup(table: Tensor, levels: Tensor, cell: Tensor) -> Tensor:
    if len(levels) == 1:
        row, index = table[levels[0]], cell
    else:
        row, index = table.view(-1), levels[:, None] * CELLS + cell
    # The fastest of torch's ways to say row[index] on a CPU, by a factor of four.
    return row.index_select(0, index.reshape(-1)).view(index.shape)
