"""Codebooks of all level counts as tensors that kernels index by a token's levels.

Thresholds lie on a grid of 1/512 standard deviation. That costs nothing measurable (the excess error
is (grid/step)**2, 6e-5 at 16 levels and below one percent at 256) and makes a code a table lookup:
floor(512 z) names the grid cell, and every cell belongs to one code at each level count. Comparing z
with the thresholds, as the Triton kernel does, gives the same code for every float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from semkv_bench.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["CELLS", "CELLS_PER_SIGMA", "CodebookTables"]

CELLS_PER_SIGMA = 512
_REACH = 6  # standard deviations; the outermost threshold of 256 levels is at 4.4
CELLS = 2 * _REACH * CELLS_PER_SIGMA


@dataclass(frozen=True, eq=False)
class CodebookTables:
    """Row L of every table belongs to L levels; rows and columns beyond are padding.

    cells_per_unit  float32 factor from a coordinate of the unit vector to grid cells, 512 * sqrt(d)
    thresholds      float32 [top + 1, top], in cells (whole numbers), padded with infinity
    centroids       float32 [top + 1, top], in units of the vector's norm
    cell_code       uint8   [top + 1, CELLS]
    cell_value      float32 [top + 1, CELLS], the centroid of the cell's code
    """

    cells_per_unit: float
    thresholds: Tensor
    centroids: Tensor
    cell_code: Tensor
    cell_value: Tensor

    @property
    def top(self) -> int:
        """Highest level count that the tables hold."""
        return len(self.centroids) - 1

    @classmethod
    def build(
        cls, codebooks: Sequence[tuple[Tensor, Tensor]], head_dim: int, device: torch.device | str
    ) -> CodebookTables:
        """From (centroids [L], thresholds [L - 1]) in standard deviations, for L = 2, 3, 4, ... in order."""
        top = len(codebooks) + 1
        thresholds = torch.full((top + 1, top), torch.inf)
        centroids = torch.zeros(top + 1, top)
        cell_code = torch.zeros(top + 1, CELLS, dtype=torch.uint8)
        cell_value = torch.zeros(top + 1, CELLS)
        cells = torch.arange(CELLS) - CELLS // 2
        for levels, (centre, edge) in enumerate(codebooks, start=2):
            edge_cell = (edge * CELLS_PER_SIGMA).round()
            thresholds[levels, : levels - 1] = edge_cell.float()
            centroids[levels, :levels] = (centre / head_dim**0.5).float()
            code = torch.bucketize(cells, edge_cell.long(), right=True)
            cell_code[levels] = code.to(torch.uint8)
            cell_value[levels] = centroids[levels, code]
        scale = float(torch.tensor(CELLS_PER_SIGMA * head_dim**0.5, dtype=torch.float32))
        tables = (table.to(device) for table in (thresholds, centroids, cell_code, cell_value))
        return cls(scale, *tables)
