"""What steps, groups and codes of a method have in common: some are fitted to a model, by layer and side."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from semkv_bench.errors import SemkvError

if TYPE_CHECKING:
    from torch import Tensor

    from semkv_bench.models.rotary import Rotary


__all__ = ["Part", "Place", "State"]

State = Mapping[str, "Tensor"]
"""What a calibration keeps of one part, in one side of one layer."""


@dataclass(frozen=True)
class Place:
    """Where a coder works: one side of one layer. rotary: how the layer's keys are turned, for methods that ask."""

    layer: int
    side: str
    rotary: Rotary | None = None


class Part:
    """A part of a method; those that are ``calibrated`` are of no use before they are ``bound``."""

    calibrated: ClassVar[bool] = False

    def fit(self, y: Tensor, weights: Tensor | None) -> dict[str, Tensor]:
        """What to keep of a calibration.

        y: float32 [1, heads, tokens, channels] as the part will see it. weights: importance of every value, [like y].
        """
        return {}

    def bound(self, place: Place, state: State) -> Self:
        """The part at its place, with what ``fit`` gave there."""
        if not self.calibrated:
            return self
        made = copy.copy(self)
        object.__setattr__(made, "_state", dict(state))
        return made

    def fitted(self, name: str) -> Tensor:
        """What ``fit`` gave under ``name``."""
        state = getattr(self, "_state", None)
        if state is None:
            raise SemkvError(f"{type(self).__name__} is fitted to a model; bind it to a calibration first")
        return state[name]
