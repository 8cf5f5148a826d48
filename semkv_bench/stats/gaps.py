"""Rows without a partner: refused, or counted."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd

from semkv_bench.errors import UsageError
from semkv_bench.records.racing import LAST_LOOK
from semkv_bench.records.schema import REFERENCE, UNIT
from semkv_bench.stats.options import StatsOptions

__all__ = ["gaps"]

_MOST_NAMED = 3


def gaps(frame: pd.DataFrame, options: StatsOptions) -> tuple[dict[str, int], dict[str, int]]:
    """Rows without a partner by setting: those that ``full`` lacks, and those of any setting that this one lacks.

    A setting that left a raced run lacks none of the examples that came after. A task of which ``full`` has no row
    is refused in any case: nothing there can be paired.
    """
    keys = pd.MultiIndex.from_frame(frame[UNIT])
    whole = (frame["setting"] == REFERENCE).to_numpy()
    alone = ~keys.isin(keys[whole])
    first = np.flatnonzero(~keys.duplicated())
    units = keys[first]
    raced = options.race and LAST_LOOK in frame
    look = frame["look"].to_numpy()[first] if raced else None

    def planned(rows: np.ndarray) -> pd.MultiIndex:
        return units[look <= frame[LAST_LOOK].to_numpy()[rows[0]]] if raced else units

    unpaired = {name: int(n) for name, n in frame[alone].groupby("setting").size().items()}
    lacking = {
        name: absent
        for name, rows in frame.groupby("setting").indices.items()
        if name != REFERENCE and len(absent := (wanted := planned(rows))[~wanted.isin(keys[rows])])
    }
    if options.unpaired == "error":
        if unpaired:
            _refuse_unpaired(frame, frame[alone].iloc[0], unpaired)
        if lacking:
            _refuse_missing(lacking, int(whole.sum()))
    if blank := sorted(set(frame["task"]) - set(frame["task"][whole])):
        raise UsageError(
            f"task {blank[0]} has no row under {REFERENCE}, so nothing in it can be paired; score it under "
            f"{REFERENCE} too, or leave its rows out"
        )
    return unpaired, {name: len(absent) for name, absent in lacking.items()}


def _refuse_unpaired(frame: pd.DataFrame, first: pd.Series, unpaired: dict[str, int]) -> None:
    name = first["setting"]
    raise UsageError(
        f"setting {name} has {unpaired[name]} of {int((frame['setting'] == name).sum())} rows without a partner "
        f"under {REFERENCE} (first: {_row_words(first[UNIT])}); score those under {REFERENCE} too, or count them as "
        "lost with stats.unpaired=drop"
    )


def _refuse_missing(lacking: dict[str, pd.MultiIndex], rows: int) -> None:
    """A row left out may be one in which the setting failed: it must not leave in silence."""
    named = [
        f"{name} lacks {len(absent)}" for name, absent in sorted(lacking.items(), key=lambda i: -len(i[1]))
    ]
    settings = ", ".join(named[:_MOST_NAMED]) + (
        f" and {len(named) - _MOST_NAMED} more settings lack some" if len(named) > _MOST_NAMED else ""
    )
    first = min(absent[0] for absent in lacking.values())
    raise UsageError(
        f"of the {rows} rows of {REFERENCE}, setting {settings} (first: {_row_words(first)}); score those too "
        "(an answer that failed has score 0), or count them as lost with stats.unpaired=drop"
    )


def _row_words(row: Iterable) -> str:
    return "task {}, example {}, seed {}, turn {}".format(*row)
