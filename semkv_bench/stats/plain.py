"""Frozen dataclasses as JSON data, and back."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any

__all__ = ["plain", "read"]


def plain(value: Any) -> Any:
    """``value`` as JSON data: dataclasses as objects, NaN and infinity as null."""
    if is_dataclass(value):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


@cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def read(kind: Any, value: Any, where: str) -> Any:
    """``value`` of JSON as ``kind``: a dataclass, a tuple, a dictionary, a union or a plain type.

    Raises ValueError that says what at ``where`` is missing or of another type.
    """
    if is_dataclass(kind):
        return _read_fields(kind, value, where)
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _read_union(parts, value, where)
    if origin is tuple:
        return _read_tuple(parts, value, where)
    if origin is dict:
        _require(isinstance(value, Mapping), where, "an object")
        return {str(key): read(parts[1], item, f"{where}.{key}") for key, item in value.items()}
    if kind is float:
        _require(isinstance(value, (int, float)) and not isinstance(value, bool), where, "a number")
        return float(value)
    if kind is int:
        _require(isinstance(value, int) and not isinstance(value, bool), where, "a whole number")
        return value
    words = {str: "text", bool: "true or false"}
    _require(isinstance(value, kind), where, words[kind])
    return value


def _read_fields(kind: type, value: Any, where: str) -> Any:
    _require(isinstance(value, Mapping), where, "an object")
    given: dict[str, Any] = {}
    for each in fields(kind):
        if each.name in value:
            given[each.name] = read(_hints(kind)[each.name], value[each.name], f"{where}.{each.name}")
        elif each.default is MISSING:
            raise ValueError(f"{where} has no {each.name}")
    return kind(**given)


def _read_union(parts: tuple, value: Any, where: str) -> Any:
    if value is None and type(None) in parts:
        return None
    able = [part for part in parts if part is not type(None)]
    listed = [part for part in able if typing.get_origin(part) is tuple]
    if len(able) > 1:
        able = listed if isinstance(value, list) else [part for part in able if part not in listed]
    return read(able[0], value, where)


def _read_tuple(parts: tuple, value: Any, where: str) -> tuple:
    _require(isinstance(value, (list, tuple)), where, "a list")
    if parts[-1] is Ellipsis:
        return tuple(read(parts[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    _require(len(value) == len(parts), where, f"a list of {len(parts)}")
    return tuple(read(part, item, where) for part, item in zip(parts, value, strict=True))


def _require(met: bool, where: str, what: str) -> None:
    if not met:
        raise ValueError(f"{where} is not {what}")
