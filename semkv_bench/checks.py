"""Single values of a configuration: whole numbers, numbers, choices; a UsageError says the key and what it takes."""

import math
from collections.abc import Collection, Sequence
from typing import Any

from semkv_bench.errors import UsageError

__all__ = ["choice", "is_number", "is_whole", "number", "whole", "wholes"]


def is_whole(value: Any) -> bool:
    """Is it a whole number, and no truth value?"""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Is it a finite number, and no truth value?"""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def whole(key: str, value: Any, least: int, most: int | None = None, *, or_null: bool = False) -> None:
    """Raise UsageError unless ``value`` is a whole number from ``least`` to ``most``, or None where that is allowed."""
    if or_null and value is None:
        return
    if not is_whole(value) or value < least or (most is not None and value > most):
        span = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise UsageError(f"{key}={value} must be a whole number {span}{', or null' if or_null else ''}")


def wholes(key: str, value: Any, least: int) -> tuple[int, ...]:
    """``value``, a whole number of at least ``least`` or a list of different ones, as a tuple; else UsageError."""
    listed = isinstance(value, Sequence) and not isinstance(value, str)
    found = tuple(value) if listed else (value,)
    if not found or len(set(map(str, found))) < len(found):
        raise UsageError(f"{key}={value} must be a whole number, or a list of different ones")
    for each in found:
        whole(key, each, least)
    return found


def number(key: str, value: Any, low: float, high: float, *, ends: bool = True) -> None:
    """Raise UsageError unless ``value`` is a number from ``low`` to ``high``, or with ``ends`` false between them."""
    inside = is_number(value) and (low <= value <= high if ends else low < value < high)
    if not inside:
        span = f"from {low:g} to {high:g}" if ends else f"between {low:g} and {high:g} (ends excluded)"
        raise UsageError(f"{key}={value} must be a number {span}")


def choice(key: str, value: Any, choices: Collection[str]) -> None:
    """Raise UsageError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise UsageError(f"{key}={value} is not known; choose from {', '.join(choices)}")
