"""What of a method differs from the method as its file has it."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any

from omegaconf import OmegaConf

from semkv_bench.config.choices import choice_file
from semkv_bench.config.compose import build
from semkv_bench.quantizers.base import Sides

__all__ = ["changed_from_file"]


def changed_from_file(side: Any) -> dict[str, Any]:
    """Fields of a method's side that are not as the method's file has them; none where there is no such file."""
    method = _preset(side.name)
    usual = None if method is None else method.of_side(side.side)
    return _differences(side, usual) if type(usual) is type(side) else {}


@lru_cache(maxsize=64)
def _preset(name: str) -> Sides | None:
    try:
        node = OmegaConf.load(choice_file("quantizer", name))
    except StopIteration:
        return None
    made = build(node, "quantizer")
    return made if isinstance(made, Sides) else None


def _differences(mine: Any, usual: Any, prefix: str = "") -> dict[str, Any]:
    """Fields of two parts that differ; those of ``keep`` and ``layers`` under their own names."""
    found: dict[str, Any] = {}
    for entry in fields(mine):
        if entry.name == "calibration":
            # The charter has it, by its content.
            continue
        value, before = getattr(mine, entry.name), getattr(usual, entry.name)
        if value == before:
            continue
        name = f"{prefix}{entry.name}"
        if is_dataclass(value) and type(value) is type(before):
            inner = "" if entry.name in ("keep", "layers") and not prefix else f"{name}."
            found |= _differences(value, before, inner)
        elif isinstance(value, tuple):
            found[name] = "+".join(map(_part, value)) or "none"
        else:
            found[name] = _part(value) if is_dataclass(value) else value
    return found


def _part(part: Any) -> str:
    """A part and its fields in few words."""
    chosen = [f"{e.name}={getattr(part, e.name)}" for e in fields(part) if getattr(part, e.name) != e.default]
    return type(part).__name__.lower() + (f"({' '.join(chosen)})" if chosen else "")
