"""Which rows a raced run plans: a setting that left at a look has none of the examples that come after it."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pandas as pd

from semkv_bench.records.schema import EXAMPLE

__all__ = ["LAST_LOOK", "done_examples", "left_settings", "planned_at", "planned_rows"]

LAST_LOOK = "last_look"  # column: number of the last look that the row's setting is planned for


def left_settings(looks: Sequence[Mapping[str, Any]], before: int | None = None) -> dict[str, int]:
    """Number of the look at which each setting left, by name, of the looks taken; of those ahead of look ``before``."""
    return {
        name: look["look"]
        for look in looks
        if before is None or look["look"] < before
        for name in look.get("leave", ())
    }


def planned_at(look: int | None, settings: Collection[str], left: Mapping[str, int]) -> tuple[str, ...]:
    """Those of ``settings`` that the examples of a look are run under."""
    return tuple(name for name in settings if look is None or left.get(name, look) >= look)


def planned_rows(frame: pd.DataFrame, left: Mapping[str, int], number: int) -> pd.DataFrame:
    """The rows of ``frame`` that are planned up to look ``number``, with ``LAST_LOOK``.

    A process that went ahead of a look may have recorded more of a setting that left at it; they do not count, since
    which of them there are is chance.
    """
    last = frame["setting"].map(left).fillna(number).clip(upper=number).astype(int)
    return frame.assign(**{LAST_LOOK: last})[frame["look"] <= last].reset_index(drop=True)


def done_examples(frame: pd.DataFrame, settings: Collection[str], left: Mapping[str, int]) -> pd.DataFrame:
    """Example and look of every example in ``frame`` that is recorded under all settings planned for it."""
    looks = sorted(frame["look"].unique())
    rows = planned_rows(frame, left, max(looks)) if left else frame
    needed = {look: len(planned_at(look, settings, left)) for look in looks}
    held = rows.groupby([*EXAMPLE, "look"])["setting"].nunique().rename("held").reset_index()
    return held[held["held"] >= held["look"].map(needed)].reset_index(drop=True)
