"""Steps that know the model: the rotary embedding undone, and what is fitted to each channel by a calibration."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self, TypeVar

from semkv_bench.checks import number, whole
from semkv_bench.errors import SemkvError
from semkv_bench.kernels.numerics import to_float16
from semkv_bench.lazy import torch
from semkv_bench.quantizers.parts import Place, State
from semkv_bench.quantizers.transforms import Kept, Step

if TYPE_CHECKING:
    from torch import Tensor

    from semkv_bench.models.rotary import Rotary


__all__ = ["Centre", "Permute", "Predict", "Thresholds", "Unrope"]

_Some = TypeVar("_Some", bound=Step)


@dataclass(frozen=True)
class Unrope(Step):
    """Keys as they are before the rotary embedding, turned again when they are read.

    By the inverse of the model's own tables, in float64. It must be the first step of the keys.
    """

    positional: ClassVar[bool] = True
    _rotary: ClassVar[Rotary | None] = None
    _start: ClassVar[int] = 0

    @property
    def unpackable(self) -> str | None:
        """See ``Step``."""
        return "keys before the rotary embedding are simulated"

    def bound(self, place: Place, state: State) -> Self:
        """See ``Part``."""
        return _changed(self, _rotary=place.rotary)

    def placed(self, start: int) -> Self:
        """See ``Step``."""
        return _changed(self, _start=start)

    def apply(self, y: Tensor, prompt: Tensor | None = None) -> tuple[Tensor, Kept]:
        """See ``Step``."""
        return self._turned(y, back=True), ()

    def undo(self, values: Tensor, kept: Kept) -> Tensor:
        """See ``Step``."""
        return self._turned(values, back=False)

    def _turned(self, y: Tensor, back: bool) -> Tensor:
        if self._rotary is None:
            raise SemkvError(
                "the rotary embedding of the keys is not known; bind the method to a layer first"
            )
        # Units lie one after the other: [heads, tokens of all units, channels].
        line = y.transpose(0, 1).flatten(1, 2).double()
        positions = torch.arange(self._start, self._start + line.shape[1], device=y.device)
        turn = self._rotary.undo if back else self._rotary.apply
        return turn(line, positions).float().unflatten(1, (y.shape[0], -1)).transpose(0, 1)


def _changed(step: _Some, **values: object) -> _Some:
    """A copy of a frozen step with what it is told of its place."""
    made = copy.copy(step)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


@dataclass(frozen=True)
class Thresholds(Step):
    """Channels scaled so that all but the ``share`` of extreme values, half of it at an end, lie in -1..1 (KVQuant).

    The ends are quantiles of the calibration, in float16, and belong to the model: nothing is stored with a cache.
    """

    calibrated: ClassVar[bool] = True
    share: float = 0.01

    def __post_init__(self) -> None:
        number("thresholds.share", self.share, 0, 1, ends=False)

    def fit(self, y: Tensor, weights: Tensor | None) -> dict[str, Tensor]:
        """See ``Part``."""
        ordered = y[0].sort(dim=1).values  # [heads, tokens, channels]
        last = ordered.shape[1] - 1
        cut = round(self.share / 2 * last)
        return {"low": to_float16(ordered[:, cut]), "high": to_float16(ordered[:, last - cut])}

    def apply(self, y: Tensor, prompt: Tensor | None = None) -> tuple[Tensor, Kept]:
        """See ``Step``."""
        middle, half = self._ends
        return (y - middle) / half.masked_fill(half == 0, 1), ()

    def undo(self, values: Tensor, kept: Kept) -> Tensor:
        """See ``Step``."""
        middle, half = self._ends
        return values * half.masked_fill(half == 0, 1) + middle

    @property
    def _ends(self) -> tuple[Tensor, Tensor]:
        """Middle and half width of every channel, [heads, 1, channels]."""
        low, high = (self.fitted(name).float()[:, None] for name in ("low", "high"))
        return (high + low) / 2, (high - low) / 2


@dataclass(frozen=True)
class Centre(Step):
    """The mean of every channel over the calibration taken away, and the rest divided by its largest ** alpha.

    WKVQuant without its training, which learns both by what later layers make of them.
    """

    calibrated: ClassVar[bool] = True
    alpha: float = 0.5

    def fit(self, y: Tensor, weights: Tensor | None) -> dict[str, Tensor]:
        """See ``Part``."""
        mean = y[0].mean(1)
        factor = (y[0] - mean[:, None]).abs().amax(1) ** self.alpha
        return {"mean": to_float16(mean), "factor": to_float16(factor.masked_fill(factor < 1e-4, 1))}

    def apply(self, y: Tensor, prompt: Tensor | None = None) -> tuple[Tensor, Kept]:
        """See ``Step``."""
        return (y - self._at("mean")) / self._at("factor"), ()

    def undo(self, values: Tensor, kept: Kept) -> Tensor:
        """See ``Step``."""
        return values * self._at("factor") + self._at("mean")

    def _at(self, name: str) -> Tensor:
        return self.fitted(name).float()[:, None]


@dataclass(frozen=True)
class Permute(Step):
    """The channels of all heads in ascending order of their mean over the calibration (RotateKV)."""

    calibrated: ClassVar[bool] = True

    def fit(self, y: Tensor, weights: Tensor | None) -> dict[str, Tensor]:
        """See ``Part``."""
        return {"order": y[0].mean(1).flatten().argsort(stable=True)}

    def apply(self, y: Tensor, prompt: Tensor | None = None) -> tuple[Tensor, Kept]:
        """See ``Step``."""
        return self._taken(y, self.fitted("order")), ()

    def undo(self, values: Tensor, kept: Kept) -> Tensor:
        """See ``Step``."""
        return self._taken(values, self.fitted("order").argsort())

    @staticmethod
    def _taken(y: Tensor, order: Tensor) -> Tensor:
        lines = y.transpose(1, 2).flatten(2)[..., order]
        return lines.unflatten(-1, (y.shape[1], -1)).transpose(1, 2)


_RIDGE = 1e-4


@dataclass(frozen=True)
class Predict(Step):
    """What the layer below tells of a token is taken away: the rest is coded (AQUA-KV).

    Keys, before the rotary embedding and of all heads, are predicted from those of the layer below, values from the
    keys of their own layer and the values of the one below, as the cache gives all of these back: linearly, by least
    squares on a calibration that is itself coded at ``fit_levels`` levels. The lowest layer is coded as it is.
    """

    calibrated: ClassVar[bool] = True
    predicts: ClassVar[bool] = True
    _below: ClassVar[Tensor | None] = None
    fit_levels: int = 4

    def __post_init__(self) -> None:
        whole("predict.fit_levels", self.fit_levels, 2)

    @property
    def unpackable(self) -> str | None:
        """See ``Step``."""
        return "predictions from the layer below are simulated"

    def beside(self, below: Sequence[Tensor]) -> Self:
        """See ``Step``."""
        return _changed(self, _below=_lines(below) if below else None)

    def fit(self, y: Tensor, weights: Tensor | None) -> dict[str, Tensor]:
        """See ``Part``: a weight of every value below, and a constant, for every channel; nothing without any below."""
        target = _lines(y[0][None])
        if self._below is None:
            return {"weights": to_float16(target.new_zeros(0, target.shape[1]))}
        known = _with_one(self._below).double()
        square = known.T @ known
        square.diagonal().add_(_RIDGE * square.diagonal().mean())
        return {"weights": to_float16(torch.linalg.solve(square, known.T @ target.double()).float())}

    def apply(self, y: Tensor, prompt: Tensor | None = None) -> tuple[Tensor, Kept]:
        """See ``Step``."""
        return y - self._predicted(y), ()

    def undo(self, values: Tensor, kept: Kept) -> Tensor:
        """See ``Step``."""
        return values + self._predicted(values)

    def _predicted(self, y: Tensor) -> Tensor:
        """[units, heads, tokens, channels] as y."""
        weights = self.fitted("weights").float()
        if not len(weights):
            return torch.zeros_like(y)
        if self._below is None:
            raise SemkvError("what the layer below gives back is not known; tell the coder by beside")
        found = _with_one(self._below) @ weights.to(y.device)
        units, heads, tokens, channels = y.shape
        return found.view(units, tokens, heads, channels).transpose(1, 2)


def _lines(parts: Sequence[Tensor]) -> Tensor:
    """[heads, tokens, channels] each as float32 [tokens, channels of all heads of all of them]."""
    return torch.cat([part.float().transpose(0, 1).flatten(1) for part in parts], dim=1)


def _with_one(lines: Tensor) -> Tensor:
    return torch.cat([lines, lines.new_ones(len(lines), 1)], dim=1)
