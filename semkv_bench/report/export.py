"""Records as one table for other tools: Parquet and CSV."""

import io
import json
from collections.abc import Sequence
from typing import Any

import pandas as pd

from semkv_bench.checks import choice
from semkv_bench.errors import UsageError

__all__ = ["EXPORTS", "exported", "formats_of"]

EXPORTS = ("parquet", "csv")


def formats_of(value: Any) -> tuple[str, ...]:
    """The formats that ``export`` names; none for null. Raises UsageError for another one."""
    named = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(named, Sequence):
        raise UsageError(f"export={value} must be one of {', '.join(EXPORTS)}, or a list of them")
    for name in named:
        choice("export", name, EXPORTS)
    return tuple(dict.fromkeys(named))


def exported(frame: pd.DataFrame, formats: Sequence[str]) -> dict[str, bytes]:
    """``records.parquet`` and ``records.csv`` by name; what is no number or text is written as JSON in its cell."""
    flat = frame.apply(_flat)
    found = {}
    for name in formats:
        buffer = io.BytesIO()
        flat.to_parquet(buffer, index=False) if name == "parquet" else flat.to_csv(buffer, index=False)
        found[f"records.{name}"] = buffer.getvalue()
    return found


def _flat(column: pd.Series) -> pd.Series:
    """The column with one type: JSON where it holds lists, mappings or several types."""
    held = [value for value in column if not _missing(value)]
    kinds = {type(value) for value in held}
    if not kinds & {dict, list, tuple} and (len(kinds) <= 1 or kinds <= {int, float}):
        return column
    return column.map(lambda value: None if _missing(value) else json.dumps(value, ensure_ascii=False))


def _missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and value != value)
