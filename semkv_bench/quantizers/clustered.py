"""Codes whose points a calibration of the model found by k-means: of single values (KVQuant), of neighbours (CQ)."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from semkv_bench.checks import choice
from semkv_bench.errors import UsageError
from semkv_bench.grid.levels import code_bits
from semkv_bench.kernels.numerics import to_float16
from semkv_bench.lazy import torch
from semkv_bench.quantizers.codes import Code

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["Coupled", "NonUniform", "best_points"]

_BINS = 1024
_WEIGHTS = ("none", "fisher")


@dataclass(frozen=True)
class NonUniform(Code):
    """Any number of levels where a layer's values are: the k-means of one line, found exactly (KVQuant's nuq).

    The levels lie in -1..1. scaled: ``before``: a step before has put the values there; ``group``: by minimum and
    maximum of each group, kept in float16. weights: what k-means weighs a value by: ``fisher``, the square of the
    loss's gradient by it, which a calibration then measures; ``none``. q_norm: levels are read at values that give the
    calibration's mean and deviation back.
    """

    calibrated: ClassVar[bool] = True
    scaled: str = "before"
    weights: str = "fisher"
    q_norm: bool = False

    def __post_init__(self) -> None:
        choice("code.weights", self.weights, _WEIGHTS)
        choice("code.scaled", self.scaled, ("before", "group"))

    @property
    def metadata_bits(self) -> float:
        """See ``Code``."""
        return 32 if self.scaled == "group" else 0

    def fit(self, y: Tensor, weights: Tensor | None) -> dict[str, Tensor]:
        """See ``Part``: how much weight, which mean and how many values lie in each of the bins of -1..1."""
        values, *_ = self._inside(y)
        counted = (torch.ones_like(y) if weights is None else (weights > 0)).float().flatten().double()
        weighed = counted if weights is None or self.weights == "none" else weights.flatten().double()
        values = values.flatten().double()
        places = ((values + 1) / 2 * _BINS).long().clamp(0, _BINS - 1)
        sums = [
            torch.zeros(_BINS, dtype=torch.float64).index_add_(0, places, part.cpu())
            for part in (weighed.cpu(), (weighed * values).cpu(), counted.cpu(), (counted * values).cpu())
        ]
        # Weights count by their shares.
        total = float(sums[0].sum()) or 1.0
        return {"bins": torch.stack([sums[0] / total, sums[1] / total, *sums[2:]])}

    def quantize_dequantize(self, grouped: Tensor, levels: int) -> Tensor:
        """See ``Code``."""
        values, middle, half = self._inside(grouped)
        points, read = self._points(levels)
        nearest = torch.bucketize(values, ((points[1:] + points[:-1]) / 2).to(values))
        return read.to(values)[nearest] * half + middle

    def _inside(self, grouped: Tensor) -> tuple[Tensor, Tensor | float, Tensor | float]:
        """Values in -1..1, and what they were moved and scaled by."""
        if self.scaled == "before":
            return grouped.clamp(-1, 1), 0.0, 1.0
        low, high = (
            to_float16(end).float()
            for end in (grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True))
        )
        middle, half = (high + low) / 2, (high - low) / 2
        inside = ((grouped - middle) / half.masked_fill(half == 0, math.inf)).clamp(-1, 1)
        return inside, middle, half

    def _points(self, levels: int) -> tuple[Tensor, Tensor]:
        """Where values are told apart, and where they are read, float64 [levels]."""
        known = self.__dict__.setdefault("_known", {})
        if levels not in known:
            weight, moment, count, summed = self.fitted("bins").cpu().double()
            points = best_points(weight, moment, levels)
            known[levels] = points, self._read(points, count, summed) if self.q_norm else points
        return known[levels]

    @staticmethod
    def _read(points: Tensor, count: Tensor, summed: Tensor) -> Tensor:
        """The points moved so that the coded values of the calibration have its mean and deviation."""
        means = summed / count.clamp(min=1)
        coded = points[torch.bucketize(means, (points[1:] + points[:-1]) / 2)]
        (mean, spread), (coded_mean, coded_spread) = (_moments(x, count) for x in (means, coded))
        scale = spread / coded_spread if coded_spread > 0 else 1.0
        return points * scale + (mean - coded_mean * scale)


def _moments(values: Tensor, count: Tensor) -> tuple[float, float]:
    total = float(count.sum()) or 1.0
    mean = float((values * count).sum()) / total
    return mean, math.sqrt(float(((values - mean).square() * count).sum()) / total)


def best_points(weight: Tensor, moment: Tensor, levels: int) -> Tensor:
    """The ``levels`` points of least weighted squared error, float64, ascending.

    weight, moment: weight and weighted sum of the values in each bin of -1..1, in order. Exact for values that lie at
    their bin's mean, by dynamic programming over where one point's bins end.
    """
    bins = len(weight)
    centres = torch.linspace(-1, 1, 2 * bins + 1, dtype=torch.float64)[1::2]
    means = torch.where(weight > 0, moment / weight.clamp(min=1e-300), centres)
    sums = [
        torch.cat([torch.zeros(1, dtype=torch.float64), part.cumsum(0)])
        for part in (weight, moment, weight * means.square())
    ]
    # Of bins first..last-1: [first, last].
    mass, first_moment, second = (part[None, :] - part[:, None] for part in sums)
    missed = (second - first_moment.square() / mass.clamp(min=1e-300)).clamp(min=0)
    missed = torch.where(mass > 0, missed, 0.0)
    missed = missed.masked_fill(torch.ones_like(missed, dtype=torch.bool).tril(-1), math.inf)
    least, ends = missed[0], []
    for _ in range(levels - 1):
        least, begin = (least[:, None] + missed).min(0)
        ends.append(begin)
    cuts = [bins]
    for begin in reversed(ends):
        cuts.append(int(begin[cuts[-1]]))
    cuts = [0, *reversed(cuts)]
    points = []
    for start, stop in itertools.pairwise(cuts):
        held = float(sums[0][stop] - sums[0][start])
        middle = float(centres[min(start, bins - 1) : max(stop, start + 1)].mean())
        points.append(float(sums[1][stop] - sums[1][start]) / held if held > 0 else middle)
    return torch.tensor(points, dtype=torch.float64).sort().values


_SAMPLES, _ROUNDS = 4096, 12


@dataclass(frozen=True)
class Coupled(Code):
    """``dim`` neighbouring channels of one head by the nearest of points of their own, from k-means (CQ).

    With L levels there are L**dim points for each ``dim`` channels of every head; up to ``most`` levels are fitted.
    Nothing is stored with a token but the codes. weights: as of ``NonUniform``; a point's are those of its values.
    """

    calibrated: ClassVar[bool] = True
    metadata_bits: ClassVar[float] = 0
    dim: int = 4
    most: int = 4
    weights: str = "fisher"

    def __post_init__(self) -> None:
        choice("code.weights", self.weights, _WEIGHTS)

    def check_members(self, members: float) -> None:
        """See ``Code``."""
        if members % self.dim:
            raise UsageError(f"code.dim={self.dim} does not divide the {members:g} channels of a group")

    def check_levels(self, levels: int) -> None:
        """See ``Code``."""
        if levels > self.most:
            raise UsageError(
                f"codes of {self.dim} channels have at most {self.most} levels, not {levels}: "
                f"grid.levels=[{','.join(map(str, range(self.most, 1, -1)))}]"
            )

    def bits(self, levels: int) -> tuple[float, float]:
        """See ``Code``: the points of a vector are told by a whole number of bits."""
        return code_bits(levels), math.ceil(self.dim * math.log2(levels) - 1e-9) / self.dim

    def fit(self, y: Tensor, weights: Tensor | None) -> dict[str, Tensor]:
        """See ``Part``: the points for every number of levels."""
        vectors = self._vectors(y)
        weighed = (
            torch.ones_like(vectors) if weights is None or self.weights == "none" else self._vectors(weights)
        )
        step = max(1, vectors.shape[1] // _SAMPLES)
        vectors, weighed = vectors[:, ::step], weighed[:, ::step].sum(-1)
        return {
            f"points{levels}": to_float16(_k_means(vectors, weighed, levels**self.dim))
            for levels in range(2, self.most + 1)
        }

    def quantize_dequantize(self, grouped: Tensor, levels: int) -> Tensor:
        """See ``Code``."""
        vectors = self._vectors(grouped)
        points = self.fitted(f"points{levels}").to(vectors)
        found = torch.empty_like(vectors)
        for part, out in zip(vectors.split(512, 1), found.split(512, 1), strict=True):
            nearest = torch.cdist(part, points).argmin(-1)
            out.copy_(points.gather(1, nearest[..., None].expand(-1, -1, self.dim)))
        units, heads, tokens = grouped.shape[:3]
        found = found.view(heads, -1, units, tokens, self.dim)
        return found.permute(2, 0, 3, 1, 4).reshape(grouped.shape)

    def _vectors(self, grouped: Tensor) -> Tensor:
        """[units, heads, tokens, groups, channels] as [heads * vectors of a head, units * tokens, dim]."""
        parts = grouped.flatten(3).unflatten(3, (-1, self.dim))
        return parts.permute(1, 3, 0, 2, 4).flatten(2, 3).flatten(0, 1)


def _k_means(vectors: Tensor, weights: Tensor, points: int) -> Tensor:
    """Points [lines, points, dim] of vectors [lines, tokens, dim] of weight [lines, tokens]; a seeded start."""
    generator = torch.Generator().manual_seed(points)
    tokens = vectors.shape[1]
    first = torch.randperm(tokens, generator=generator)[:points]
    if len(first) < points:
        first = torch.cat([first, torch.randint(tokens, (points - len(first),), generator=generator)])
    book = vectors[:, first].clone()
    weights = weights / weights.mean(1, keepdim=True).clamp(min=1e-30) + 1e-6
    for _ in range(_ROUNDS):
        sums, held = torch.zeros_like(book), torch.zeros_like(book[..., :1])
        for part, weight in zip(vectors.split(1024, 1), weights.split(1024, 1), strict=True):
            nearest = torch.cdist(part, book).argmin(-1, keepdim=True)
            held.scatter_add_(1, nearest, weight[..., None])
            sums.scatter_add_(1, nearest.expand(-1, -1, part.shape[-1]), part * weight[..., None])
        book = torch.where(held > 0, sums / held.clamp(min=1e-30), book)
    return book
