"""Single values of a table as people write them: text, numbers, whole numbers, flags, or nothing."""

from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np
import pandas as pd

__all__ = ["as_flag", "as_integer", "as_number", "as_text", "is_null", "short"]

_NULLS = frozenset({"", "nan", "null", "none", "na", "n/a"})
_TRUE, _FALSE = frozenset({"true", "1", "yes", "1.0"}), frozenset({"false", "0", "no", "0.0"})
_INT64 = np.iinfo(np.int64)
# Beyond, neighbouring whole numbers are the same float.
_EXACT_IN_FLOAT = 2**53


def short(value: Any) -> str:
    """``value`` for a message."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def is_null(value: Any) -> bool:
    """Does ``value`` say that there is none?"""
    if value is None or value is pd.NA or value is pd.NaT:
        return True
    if isinstance(value, str):
        return value.strip().lower() in _NULLS
    return isinstance(value, (float, np.floating)) and np.isnan(value)


def as_text(value: Any) -> str | None:
    """``value`` as text, a whole float without its point; None where nothing is left."""
    if isinstance(value, str):
        return value.strip() or None
    if is_null(value):
        return None
    if isinstance(value, (float, np.floating)) and float(value).is_integer():
        return str(int(value))
    return str(value)


def as_number(value: Any) -> float | None:
    """The number in ``value``; NaN for null, None where it is something else."""
    if isinstance(value, (bool, np.bool_)):
        return float(value)
    if is_null(value):
        return float("nan")
    if isinstance(value, (int, float, np.integer, np.floating, Decimal, str)):
        try:
            return float(value)
        except (ValueError, OverflowError):
            return None
    return None


def as_integer(value: Any) -> int | None:
    """The whole number in ``value``, never rounded; 0 for null, None where it is none that 64 bits hold."""
    whole = None
    if isinstance(value, (bool, int, np.bool_, np.integer)):
        whole = int(value)
    elif is_null(value):
        whole = 0
    elif isinstance(value, (float, np.floating)):
        whole = int(value) if abs(value) <= _EXACT_IN_FLOAT and value == int(value) else None
    elif isinstance(value, (str, Decimal)):
        whole = _written_integer(str(value).strip())
    return whole if whole is not None and _INT64.min <= whole <= _INT64.max else None


def _written_integer(text: str) -> int | None:
    try:
        number = Decimal(text)
    except InvalidOperation:
        return None
    # Asked first, since 1e999999 is a very long integer.
    small = number.is_finite() and number.adjusted() < 20
    return int(number) if small and number == number.to_integral_value() else None


def as_flag(value: Any) -> float | None:
    """0.0 or 1.0; NaN for null, None where it is something else."""
    if is_null(value):
        return float("nan")
    word = str(value).strip().lower()
    return 1.0 if word in _TRUE else 0.0 if word in _FALSE else None
