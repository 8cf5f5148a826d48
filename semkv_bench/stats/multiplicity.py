"""Many settings tested at once: how alpha is shared among them, so that any false claim stays below alpha.

Holm's method serves where no test is more wanted than another. Verdicts on a grid are of another kind: the
cliff needs the points that hold from the top down and those that are degraded from the bottom up, and a point
counts only if all before it do. So alpha starts where it is needed and is handed on, the graphical procedure of
Bretz, Maurer, Brannath and Posch (2009), a closed test that keeps the family's error rate under any dependence:

* Every grid (the uniform settings of one quantizer) is one group, all mixed and pruned settings are another;
  groups start with equal shares of alpha.
* In a grid, most of the share (``TOP_FIRST`` of it for equivalence, ``BOTTOM_FIRST`` for degradation) waits at
  the first point. A point that is shown hands its alpha to the next one, the last one to the first again: so a
  whole grid costs no more examples than one setting. The rest is spread over the other points, so that one
  undecided point does not silence those after it for good (the fallback procedure of Wiens, 2003). For
  degradation it is more: drops are large, and settings named by hand need not be ordered by their bits.
* The mixed and pruned settings share alike and hand on alike, which is Holm's method among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from statsmodels.stats.multitest import multipletests

from semkv_bench.stats.pairing import SettingInfo

__all__ = ["BOTTOM_FIRST", "TOP_FIRST", "Group", "Shares", "adjusted", "holm", "shares", "weight_reached"]

TOP_FIRST, BOTTOM_FIRST = 0.99, 0.9


@dataclass(frozen=True)
class Group:
    """Settings that share a part of alpha and hand it on among themselves alone.

    ``members`` are indices, a grid's in the order in which they are tested. ``first`` is the part of ``share``
    that waits at the first of them; None: all share alike (Holm).
    """

    members: np.ndarray
    share: float
    first: float | None = None

    @property
    def weights(self) -> np.ndarray:
        """The part of alpha that each member starts with."""
        number = len(self.members)
        if self.first is None or number == 1:
            return np.full(number, self.share / number)
        rest = self.share * (1 - self.first) / (number - 1)
        return np.array([self.share * self.first, *[rest] * (number - 1)])

    @property
    def handed(self) -> np.ndarray:
        """What goes from each member of a grid to each other one."""
        number = len(self.members)
        return np.roll(np.eye(number), 1, axis=1) if number > 1 else np.zeros((1, 1))


@dataclass(frozen=True)
class Shares:
    """How settings 0..S-1 share alpha; every one of them is in one group."""

    groups: tuple[Group, ...]

    @cached_property
    def weights(self) -> np.ndarray:
        """The part of alpha that each setting starts with, shape [S]."""
        out = np.zeros(sum(len(group.members) for group in self.groups))
        for group in self.groups:
            out[group.members] = group.weights
        return out


def holm(p: np.ndarray) -> np.ndarray:
    """Holm-adjusted p-values (step-down, family-wise)."""
    p = np.asarray(p, dtype=float)
    return multipletests(p, method="holm")[1] if p.size else p


def shares(settings: Sequence[SettingInfo], *, bottom_up: bool = False) -> Shares:
    """How ``settings`` (none of kind full) share alpha; ``bottom_up`` for claims of degradation."""
    grids: dict[str, list[int]] = {}
    loose = []
    for i, info in enumerate(settings):
        if info.kind == "uniform":
            grids.setdefault(info.quantizer or "", []).append(i)
        else:
            loose.append(i)
    share = 1 / max(len(grids) + bool(loose), 1)
    groups = []
    for members in grids.values():
        chain = sorted(members, key=lambda i: _from_the_top(settings[i]), reverse=bottom_up)
        groups.append(Group(np.array(chain), share, BOTTOM_FIRST if bottom_up else TOP_FIRST))
    if loose:
        groups.append(Group(np.array(loose), share))
    return Shares(tuple(groups))


def _from_the_top(info: SettingInfo) -> tuple:
    return (-(info.code_bits or 0.0), -(info.effective_bits or 0.0), info.name)


def adjusted(p: np.ndarray, plan: Shares) -> np.ndarray:
    """Adjusted p-values, shape [S]: the smallest overall alpha at which each setting is shown."""
    p = np.asarray(p, dtype=float)
    out = np.ones_like(p)
    for group in plan.groups:
        own = p[group.members]
        found = holm(own / group.share) if group.first is None else _along_the_grid(own, group)
        out[group.members] = found
    return out


def _along_the_grid(p: np.ndarray, group: Group) -> np.ndarray:
    out, reached = np.ones_like(p), 0.0
    weights, handed, left = group.weights, group.handed, np.ones(p.size, bool)
    while left.any():
        asked = np.where(left, p / np.where(left, weights, 1.0), np.inf)
        next_one = int(np.argmin(asked))
        reached = max(reached, min(float(asked[next_one]), 1.0))
        out[next_one] = reached
        weights, handed = _hand_on(weights, handed, next_one)
        left[next_one] = False
    return out


def weight_reached(p: np.ndarray, index: int, plan: Shares, alpha: float) -> float:
    """The part of ``alpha`` at which setting ``index`` is tested when all others have handed on what they can."""
    group = next(group for group in plan.groups if index in group.members)
    own = p[group.members]
    left = group.members != index
    if group.first is None:
        others = np.sort(own[left])
        passed = others < alpha * group.share / (len(own) - np.arange(len(others)))
        return group.share / (len(own) - int(np.argmin([*passed, False])))
    weights, handed = group.weights, group.handed
    while (passing := left & (own < alpha * weights)).any():
        first = int(np.argmax(passing))
        weights, handed = _hand_on(weights, handed, first)
        left[first] = False
    return float(weights[group.members == index][0])


def _hand_on(weights: np.ndarray, handed: np.ndarray, gone: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights and paths once ``gone`` is shown: what it had goes to its successors, and so do paths through it."""
    weights = weights + weights[gone] * handed[gone]
    back = handed[:, gone] * handed[gone]  # what would come back to where it started
    through = handed + handed[:, gone, None] * handed[None, gone]
    room = (1 - back)[:, None]
    handed = np.where(room > 1e-12, through / np.where(room > 1e-12, room, 1.0), 0.0)
    np.fill_diagonal(handed, 0.0)
    handed[gone], handed[:, gone], weights[gone] = 0.0, 0.0, 0.0
    return weights, handed
