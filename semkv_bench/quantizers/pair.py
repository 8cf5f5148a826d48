"""Keys by one quantizer and values by another, in one file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf
from yaml import YAMLError

from semkv_bench.config.compose import build
from semkv_bench.errors import MissingError, UsageError
from semkv_bench.quantizers.base import Quantizer, Sides

__all__ = ["Pair", "read_quantizer"]


@dataclass(frozen=True)
class Pair(Sides):
    """What ``quantizer`` and ``value_quantizer`` say apart: what codes the keys, and what codes the values."""

    keys: Sides
    values: Sides

    def __post_init__(self) -> None:
        for side in ("keys", "values"):
            if not isinstance(getattr(self, side), Sides):
                raise UsageError(f"{side} of a pair must have the `_target_` of a quantizer")

    @property
    def name(self) -> str:
        """Names of both, once where they are the same."""
        return "+".join(dict.fromkeys(side.name for side in (self.keys, self.values)))

    def of_side(self, side: str) -> Quantizer:
        """What codes ``keys`` or ``values``."""
        return self.for_values() if side == "values" else self.keys.of_side(side)

    def for_values(self) -> Quantizer:
        """What codes the values."""
        return self.values.of_side("values")


def read_quantizer(path: str | Path) -> Sides:
    """What the YAML file of a quantizer makes, for example one that ``semkv-bench search`` wrote.

    Raises:
        MissingError: there is no such file.
        UsageError: it makes no quantizer.
    """
    try:
        node = OmegaConf.load(path)
    except OSError as error:
        raise MissingError(f"{path} cannot be read: {error.strerror}") from error
    except YAMLError as error:
        raise UsageError(f"{path} is not YAML") from error
    made = build(node, str(path))
    if not isinstance(made, Sides):
        raise UsageError(
            f"{path} makes no quantizer: its `_target_` must be a class of semkv_bench.quantizers"
        )
    return made
