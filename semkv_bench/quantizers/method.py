"""Methods from parts: transform x group x code x keep x residual, a side each for keys and values.

A method is one YAML file whose ``_target_`` is ``semkv_bench.quantizers.Method``. Its sides name their parts: steps
of ``transform`` and the ``code`` by ``_target_``, the others (``group``, ``keep``, ``outliers``, ``channels``,
``pivots``, ``residual``, ``layers``, ``mix``, ``budget``) by their fields alone. To add a part, write a frozen
dataclass after the contract at the top of transforms.py, codes.py or exact.py; to add a method of parts that exist,
write the YAML file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from semkv_bench.quantizers.base import Sides
from semkv_bench.quantizers.side import Side, check_fields, replaced

__all__ = ["Method"]


@dataclass(frozen=True)
class Method(Sides):
    """A published method: how its keys and its values are stored."""

    name: str
    keys: Side = field(default_factory=Side)
    values: Side = field(default_factory=Side)
    calibration: str | None = None

    def __post_init__(self) -> None:
        for side in ("keys", "values"):
            given, own = (
                getattr(self, side),
                {"name": self.name, "side": side, "calibration": self.calibration},
            )
            if isinstance(given, Mapping):
                check_fields(side, Side, given)
                made = Side(**{**given, **own})
            else:
                made = replaced(given, **own)
            object.__setattr__(self, side, made)

    def of_side(self, side: str) -> Side:
        """What codes ``keys`` or ``values``."""
        return getattr(self, side)

    def for_values(self) -> Side:
        """What codes the values where this method codes the keys."""
        return self.values
