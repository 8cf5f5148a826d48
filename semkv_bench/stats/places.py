"""Scores by where in the prompt needles stand: alone, and by the length of the prompt."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd

from semkv_bench.stats.lengths import LENGTH, recorded_lengths
from semkv_bench.stats.options import StatsOptions
from semkv_bench.stats.pairing import pair
from semkv_bench.stats.result import PlaceResult, TaskResult

__all__ = ["by_depth", "by_place"]

Rows = Callable[..., dict[str, TaskResult]]
_THIRDS = ("first third", "middle third", "last third")
_PARTS = 5


def by_depth(
    records: pd.DataFrame, options: StatsOptions, rows_of: Rows
) -> dict[str, dict[str, TaskResult]] | None:
    """Scores by where the needles stand, in thirds of the haystack, by the mean of those asked for.

    Of runs in which tokens are deleted or left unread; None where records tell no depth.
    """
    if "depths" not in records or not set(records["kind"]) & {"prune", "read"}:
        return None
    part_of = _parts(records, len(_THIRDS))
    found = {
        name: rows_of(pair(part.reset_index(drop=True), options))
        for number, name in enumerate(_THIRDS)
        if len(part := records[part_of == number])
    }
    return found or None


def by_place(records: pd.DataFrame, options: StatsOptions, rows_of: Rows) -> tuple[PlaceResult, ...]:
    """Scores and paired differences by length of the prompt and fifth of the haystack, each cell by itself.

    rows_of: scores and differences by setting, of paired scores. Nothing for a single length, and
    where records tell no depth.
    """
    lengths = recorded_lengths(records)
    if not lengths or "depths" not in records:
        return ()
    length_of, part_of = pd.to_numeric(records[LENGTH], errors="coerce"), _parts(records, _PARTS)
    found = []
    for length in lengths:
        for number in range(_PARTS):
            part = records[(length_of == length) & (part_of == number)]
            if part["setting"].nunique() < 2:
                continue
            paired = pair(part.reset_index(drop=True), options)
            found.append(
                PlaceResult(
                    length=length,
                    depth=(number / _PARTS, (number + 1) / _PARTS),
                    n_clusters=paired.n_clusters,
                    settings=rows_of(paired),
                )
            )
    return tuple(found)


def _parts(records: pd.DataFrame, parts: int) -> pd.Series:
    """The one of so many equal parts of the haystack that the needles' mean depth lies in; NaN without needles."""
    listed = records["depths"].map(lambda depths: isinstance(depths, (list, tuple)) and len(depths) > 0)
    mean = records["depths"].where(listed).map(np.mean, na_action="ignore").astype(float)
    return (mean * parts).clip(upper=parts - 1) // 1
