"""The columns of records, each read from whatever the file had for it, or complained about by its first bad row."""

from collections.abc import Callable, Hashable
from pathlib import Path

import numpy as np
import pandas as pd

from semkv_bench.errors import UsageError
from semkv_bench.records.names import DESCRIBED, describe, kind_of
from semkv_bench.records.schema import KINDS, PLACE, REFERENCE
from semkv_bench.records.values import as_flag, as_integer, as_number, as_text, is_null, short

__all__ = [
    "Complaint",
    "RunComplaint",
    "Where",
    "descriptions",
    "flags",
    "kinds",
    "numbers",
    "texts",
    "whole_numbers",
]

Where = Callable[[Hashable], str]


class Complaint:
    """Raises a UsageError about the first row that ``bad`` marks, with ``advice`` on what to do."""

    def __init__(self, source: str, where: Where) -> None:
        self.source, self.where = source, where

    def __call__(self, bad: pd.Series, say: Callable[[Hashable], str], advice: str = "") -> None:
        if bad.any():
            first = bad.index[bad.to_numpy()][0]
            advice = self.advice(advice)
            raise UsageError(f"{self.place(first)}: {say(first)}{advice and f'; {advice}'}")

    def place(self, row: Hashable) -> str:
        """Where ``row`` stands."""
        return f"{self.source}, {self.where(row)}"

    def advice(self, given: str) -> str:
        """What to do about it."""
        return given


class RunComplaint(Complaint):
    """The same about records of a run folder, which the sweep can make again."""

    def __init__(self, frame: pd.DataFrame) -> None:
        files, lines = (frame[name] for name in PLACE)
        super().__init__(str(Path(files.iloc[0]).parent), lambda i: f"{files[i]}, line {lines[i]}")

    def place(self, row: Hashable) -> str:
        """See ``Complaint``."""
        return self.where(row)

    def advice(self, given: str) -> str:
        """See ``Complaint``."""
        return "remove the lines of its example and run the sweep again"


def texts(frame: pd.DataFrame, name: str, fail: Complaint | None) -> pd.Series:
    """Column ``name`` as text or None; with ``fail``, nothing may be empty."""
    if name not in frame:
        return pd.Series([None] * len(frame), index=frame.index, dtype=object)

    def text(value: object) -> str | None:
        found = as_text(value)
        return None if fail is None and is_null(found) else found

    if isinstance(frame[name].dtype, pd.StringDtype):
        # Few different values, many rows.
        codes, values = pd.factorize(frame[name])
        texts = np.array([*map(text, values), None], dtype=object)[codes]
    else:
        texts = [text(value) for value in frame[name]]
    column = pd.Series(texts, index=frame.index, dtype=object)
    if fail is not None:
        fail(column.isna(), lambda i: f"{name} is empty")
    return column


def numbers(frame: pd.DataFrame, name: str, fail: Complaint) -> pd.Series:
    """Column ``name`` as float, NaN where nothing is given; what is no number is a complaint."""
    if name not in frame:
        return pd.Series(np.nan, index=frame.index, dtype=float)
    raw = frame[name]
    if raw.dtype == np.float64:
        fail(np.isinf(raw), lambda i: f"{name} {short(raw[i])} is not finite")
        return raw
    parsed = pd.Series([as_number(value) for value in raw], index=frame.index, dtype=object)
    wrong = parsed.map(lambda value: value is None).astype(bool)
    fail(wrong, lambda i: _not_a_number(name, raw[i]))
    numbers = parsed.astype(float)
    fail(np.isinf(numbers), lambda i: f"{name} {short(raw[i])} is not finite")
    return numbers


def _not_a_number(name: str, value: object) -> str:
    point = isinstance(value, str) and as_number(value.replace(",", ".")) is not None
    return f"{name} {short(value)} is not a number" + ("; write it with a decimal point" if point else "")


def whole_numbers(frame: pd.DataFrame, name: str, fail: Complaint) -> pd.Series:
    """Column ``name`` as int64, all 0 where there is none; what is no whole number is a complaint."""
    if name not in frame:
        return pd.Series(0, index=frame.index, dtype="int64")
    raw = frame[name]
    if raw.dtype == np.int64:
        return raw
    whole = pd.Series([as_integer(value) for value in raw], index=frame.index, dtype=object)
    wrong = whole.map(lambda value: value is None).astype(bool)
    fail(
        wrong,
        lambda i: f"{name} {short(raw[i])} is not a whole number of at most 64 bits (53 where it is a float)",
    )
    return whole.astype("int64")


def flags(frame: pd.DataFrame, fail: Complaint) -> pd.Series:
    """``runaway`` as 0.0, 1.0 or NaN (unknown)."""
    if "runaway" not in frame:
        return pd.Series(np.nan, index=frame.index, dtype=float)
    if frame["runaway"].dtype == bool:
        return frame["runaway"].astype(float)
    flags = pd.Series([as_flag(value) for value in frame["runaway"]], index=frame.index, dtype=object)
    wrong = flags.map(lambda value: value is None).astype(bool)
    fail(wrong, lambda i: f"runaway {short(frame['runaway'][i])} is neither true nor false")
    return flags.astype(float)


def kinds(frame: pd.DataFrame, fail: Complaint) -> pd.Series:
    """``kind`` of every record, as given, else as its setting's name tells."""
    named = {name: "full" if name == REFERENCE else kind_of(str(name)) for name in frame["setting"].unique()}
    kind = frame["kind"].where(frame["kind"].notna(), frame["setting"].map(named).astype(object))
    fail(~kind.isin(KINDS), lambda i: f"kind {kind[i]!r} is none of {', '.join(KINDS)}")
    wrong = (frame["setting"] == REFERENCE) & (kind != "full")
    fail(wrong, lambda i: f"the setting {REFERENCE} has kind {kind[i]!r}; it is the reference, kind full")
    mixed = kind.groupby(frame["setting"]).transform("nunique") > 1
    fail(mixed, lambda i: f"setting {frame['setting'][i]} has more than one kind")
    return kind.astype(object)


def descriptions(frame: pd.DataFrame) -> dict[str, pd.Series]:
    """What every setting is: as its records say, else as its name is spelled."""
    known = [name for name in DESCRIBED if name in frame]
    told: dict[str, dict] = {}
    for row in frame.drop_duplicates("setting")[["setting", "kind", *known]].to_dict("records"):
        given = {name: None if _is_missing(row[name]) else row[name] for name in known}
        if any(value is not None for value in given.values()):
            told[row["setting"]] = dict.fromkeys(DESCRIBED) | _described(given)
        else:
            told[row["setting"]] = describe(row["setting"], row["kind"])
    return {
        name: pd.Series(
            [told[setting][name] for setting in frame["setting"]], index=frame.index, dtype=object
        )
        for name in DESCRIBED
    }


def _is_missing(value: object) -> bool:
    return value is None or (isinstance(value, float) and np.isnan(value)) or value == ""


def _described(given: dict) -> dict:
    """Fields of a record as plain values; where keys and values differ, their levels are no one number."""
    found = dict(given)
    for name in ("levels", "high", "low"):
        value = found.get(name)
        found[name] = None if value is None or isinstance(value, dict) else as_integer(value)
    for name in ("fraction", "keep"):
        found[name] = None if found.get(name) is None else as_number(found[name])
    for name, between in (("metric", "+"), ("options", ", ")):
        found[name] = _flat(found.get(name), between)
    return found


def _flat(value: object, between: str) -> str | None:
    if not isinstance(value, dict):
        return None if value is None else str(value)
    if set(value) <= {"keys", "values"} and between == "+":
        return between.join(str(part) for part in value.values() if part is not None)
    return between.join(
        f"{name}: {_flat(part, ', ')}" if isinstance(part, dict) else f"{name}={part}"
        for name, part in value.items()
    )
