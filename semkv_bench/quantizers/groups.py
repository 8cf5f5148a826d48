"""Which values share metadata."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from semkv_bench.checks import choice, whole
from semkv_bench.errors import UsageError
from semkv_bench.lazy import scipy, torch
from semkv_bench.quantizers.parts import Part

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["Group"]

_AXES, _HEADS = ("token", "channel"), ("each", "all")
CLASS = "class"


@dataclass(frozen=True)
class Group(Part):
    """Values that are coded with one range.

    axis ``token``: ``channels`` neighbouring channels of one token (None: all of the head), of each head or, with
    ``heads: all``, of the heads' vectors one behind the other. axis ``channel``: ``tokens`` neighbouring tokens of one
    channel; ``class``: all tokens of the piece that have the same number of levels. clusters: the channels of one group
    are alike and not neighbours: k-means of their extremes over a calibration, of ``channels`` channels on average
    (SKVQ).
    """

    axis: str = "token"
    channels: int | None = None
    tokens: int | str | None = None
    heads: str = "each"
    clusters: bool = False

    def __post_init__(self) -> None:
        for name, known in (("axis", _AXES), ("heads", _HEADS)):
            choice(f"group.{name}", getattr(self, name), known)
        for name in ("channels", "tokens"):
            if name != "tokens" or self.tokens != CLASS:
                whole(f"group.{name}", getattr(self, name), 1, or_null=True)
        if (self.tokens is None) == (self.axis == "channel") or (self.axis == "channel" and self.channels):
            raise UsageError(
                "a group has tokens with axis=channel, and may have channels with axis=token, not both"
            )
        if self.clusters and not (self.channels and self.heads == "all"):
            raise UsageError("group.clusters=true needs group.channels and group.heads=all")

    @property
    def calibrated(self) -> bool:
        """See ``Part``."""
        return self.clusters

    def fit(self, y: Tensor, weights: Tensor | None) -> dict[str, Tensor]:
        """See ``Part``: the channels of every cluster, filled up with its first, and where each channel stands."""
        if not self.clusters:
            return {}
        ends = torch.stack([y[0].amin(1), y[0].amax(1)], -1).flatten(0, 1).double()
        label = _clusters(ends, self._count(len(ends)))
        members = [(label == number).nonzero().flatten() for number in label.unique()]
        size = max(map(len, members))
        index = torch.stack([torch.cat([one, one[:1].expand(size - len(one))]) for one in members])
        place = torch.empty(len(ends), dtype=torch.int64)
        for number, one in enumerate(members):
            place[one] = number * size + torch.arange(len(one))
        return {"index": index, "place": place}

    def _count(self, width: int) -> int:
        return max(1, round(width / self.channels))

    def check(self, head_dim: int, heads: int | None = None) -> None:
        """Raise UsageError if the vectors do not fall into whole groups; heads None: not known yet."""
        joined = self.heads == "all"
        if self.channels is None or self.clusters or (joined and heads is None):
            return
        width = head_dim * heads if joined else head_dim
        if width % self.channels:
            whose = f"the {width} channels of all heads" if joined else f"head_dim {head_dim}"
            legal = [n for n in range(2, width + 1) if width % n == 0]
            raise UsageError(
                f"group.channels={self.channels} does not divide {whose}; legal are {', '.join(map(str, legal))}"
            )

    def members(self, head_dim: int, heads: int, tokens: int | None) -> float:
        """Values in one group; infinite where all tokens share and their number is not known."""
        if self.axis == "channel":
            return self.tokens if isinstance(self.tokens, int) else float("inf") if tokens is None else tokens
        width = head_dim * heads if self.heads == "all" else head_dim
        return width / self._count(width) if self.clusters else self.channels or width

    def split(self, y: Tensor) -> Tensor:
        """y [units, heads, tokens, channels] as [..., groups, members]."""
        if self.axis == "channel":
            lines = y.transpose(2, 3)
            return lines.unflatten(-1, (-1, self.tokens if isinstance(self.tokens, int) else y.shape[2]))
        lines = y.transpose(1, 2).flatten(2) if self.heads == "all" else y
        if self.clusters:
            return lines[..., self.fitted("index")]
        return lines.unflatten(-1, (-1, self.channels or lines.shape[-1]))

    def join(self, grouped: Tensor, heads: int) -> Tensor:
        """Inverse of ``split``."""
        lines = grouped.flatten(-2)
        if self.axis == "channel":
            return lines.transpose(2, 3)
        if self.clusters:
            lines = lines[..., self.fitted("place")]
        return lines.unflatten(-1, (heads, -1)).transpose(1, 2) if self.heads == "all" else lines


_STARTS = 10


def _clusters(points: Tensor, count: int) -> Tensor:
    """The cluster of each of points [n, 2], int64 [n]: the best of several seeded k-means."""
    best = None
    for seed in range(_STARTS):
        with warnings.catch_warnings():
            # A cluster that nothing is nearest to stays empty, and is left out.
            warnings.simplefilter("ignore", UserWarning)
            centres, label = scipy.cluster.vq.kmeans2(
                points.numpy(), count, minit="++", rng=np.random.default_rng(seed)
            )
        missed = float(np.square(points.numpy() - centres[label]).sum())
        if best is None or missed < best[0]:
            best = missed, label
    return torch.from_numpy(best[1].astype(np.int64))
