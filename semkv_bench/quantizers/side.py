"""One side of a method: its parts, what they cost, and how they are fitted and bound to a layer."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from semkv_bench.errors import MissingError, UsageError
from semkv_bench.grid.cost import SideShape
from semkv_bench.grid.levels import Storage, check_levels
from semkv_bench.lazy import torch
from semkv_bench.quantizers import calibration
from semkv_bench.quantizers.base import AlignedPrice, Quantizer
from semkv_bench.quantizers.codes import Code, Uniform
from semkv_bench.quantizers.exact import Budget, Channels, LowRank, Mix, Outliers, Pivots
from semkv_bench.quantizers.granularity import TOGETHER, Granularity
from semkv_bench.quantizers.groups import CLASS, Group
from semkv_bench.quantizers.parts import Part, Place
from semkv_bench.quantizers.presets import changed_from_file
from semkv_bench.quantizers.side_coder import SideCoder
from semkv_bench.quantizers.transforms import Step

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["Side", "check_fields", "replaced"]

_PARTS = {
    "group": Group,
    "outliers": Outliers,
    "channels": Channels,
    "pivots": Pivots,
    "residual": LowRank,
    "mix": Mix,
    "budget": Budget,
}

_BY_TOKEN, _EVEN = Group(), Uniform()
_SHORTEST_BLOCK = 16  # channels with a scale of their own, where attention over codes gains by it


@dataclass(frozen=True)
class Side(Quantizer):
    """How a method stores the keys, or the values. Nothing but affine per token is the default.

    name, side: set by the ``Method``. tile: tokens that steps which work on tiles see at once (None: the block).
    levels: the level count of a format that has one; None: those of the grid. calibration: the file that parts which
    are fitted to a model have their numbers from.
    """

    name: str = "method"
    side: str = "keys"
    transform: tuple[Step, ...] = ()
    group: Group = _BY_TOKEN
    code: Code = _EVEN
    outliers: Outliers | None = None
    channels: Channels | None = None
    pivots: Pivots | None = None
    residual: LowRank | None = None
    mix: Mix | None = None
    budget: Budget | None = None
    tile: int | None = None
    levels: int | None = None
    calibration: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "transform", tuple(self.transform or ()))
        for name, kind in _PARTS.items():
            given = getattr(self, name)
            if isinstance(given, Mapping):
                check_fields(name, kind, given)
                object.__setattr__(self, name, kind(**given))
        if any(step.positional for step in self.transform[1:]):
            raise UsageError(
                f"{self.name}: what undoes the rotary embedding must be the first step of its keys"
            )
        if self.budget is not None and (self.group != _BY_TOKEN or self.mix is not None):
            raise UsageError(
                f"{self.name}: a budget is for groups of one head's vector each, and for no mix beside it"
            )
        if self.levels is not None:
            check_levels([self.levels])
            self.code.check_levels(self.levels)
        super().__post_init__()

    @property
    def fixed_levels(self) -> int | None:
        """See ``Quantizer``."""
        return self._format_levels if self.layers.others is None else self.layers.others

    @property
    def _format_levels(self) -> int | None:
        return self.code.fixed_levels if self.levels is None else self.levels

    @property
    def granularity(self) -> Granularity:
        """See ``Quantizer``."""
        by_class = self.group.tokens == CLASS
        whole = any(not step.per_token and not step.tiled for step in self.transform)
        over_tokens = self.outliers is not None and self.outliers.over == "channel"
        if self.budget is not None:
            return Granularity(None, mixed=False)
        if by_class or whole or over_tokens or self.residual is not None:
            return Granularity(None, mixed=by_class or self.group.axis == "token")
        if any(step.tiled for step in self.transform):
            return Granularity(self.tile or self._block, mixed=self.group.axis == "token")
        if self.channels is not None or self.group.axis == "channel":
            return Granularity(self.group.tokens or self._block, mixed=False)
        return TOGETHER if self._key_pivots is not None else Granularity()

    @property
    def _key_pivots(self) -> Pivots | None:
        return self.pivots if self.pivots is not None and self.pivots.metric is None else None

    @property
    def prompt_metric(self) -> str | None:
        """See ``Quantizer``."""
        if self.budget is not None and self.side == "values":
            return self.budget.metric
        return None if self.pivots is None else self.pivots.metric

    @property
    def pivot_tokens(self) -> int:
        """See ``Quantizer``."""
        return 0 if self.pivots is None or self.pivots.metric is None else self.pivots.entries

    @property
    def _block(self) -> int:
        return self.keep["block"] if isinstance(self.keep, Mapping) else self.keep.block

    def check(self, head_dim: int) -> None:
        """See ``Quantizer``."""
        for step in self.transform:
            step.check(head_dim)
        self.group.check(head_dim)

    def check_heads(self, heads: int, head_dim: int) -> None:
        """See ``Quantizer``."""
        for step in self.transform:
            step.check_heads(heads, head_dim)
        self.group.check(head_dim, heads)
        self.code.check_members(self.group.members(head_dim, heads, None))

    @property
    def _parts(self) -> dict[str, Part]:
        """The parts that may be fitted, by name."""
        steps = {f"transform.{number}": step for number, step in enumerate(self.transform)}
        return {**steps, "group": self.group, "code": self.code}

    @property
    def calibrated(self) -> bool:
        """See ``Quantizer``."""
        return any(part.calibrated for part in self._parts.values())

    @property
    def positional(self) -> bool:
        """See ``Quantizer``."""
        return any(step.positional for step in self.transform)

    @property
    def fit_key(self) -> str:
        """Hash of all options that a calibration hangs on."""
        told = repr((self.transform, self.group, self.code, self.outliers, self.keep.sinks))
        return hashlib.sha256(told.encode()).hexdigest()[:16]

    @property
    def predicts(self) -> bool:
        """Does it code what the layer below does not tell?"""
        return any(step.predicts for step in self.transform)

    def fit(
        self, x: Tensor, weights: Tensor | None = None, below: Sequence[Tensor] = ()
    ) -> dict[str, Tensor]:
        """What a calibration keeps for one layer, by ``PART:NAME``.

        x: [heads, tokens, head_dim], the keys of a positional method before the rotary embedding. weights: squared
        gradients of the loss by x. below: as of ``Coder.beside``.
        """
        place, y = Place(0, self.side), x.float()[None]
        weights = None if weights is None else weights.float()[None]
        found: dict[str, dict[str, Tensor]] = {}
        for number, step in enumerate(self.transform):
            if not step.positional:
                step = step.beside(below)
                found[f"transform.{number}"] = step.fit(y, weights)
                y = step.bound(place, found[f"transform.{number}"]).apply(y)[0]
        found["group"] = self.group.fit(y, weights)
        group = self.group.bound(place, found["group"])
        if self.outliers is not None:
            y, mask = self.outliers.take(y)
            weights = (torch.ones_like(y) if weights is None else weights).masked_fill(mask, 0)
        found["code"] = self.code.fit(group.split(y), None if weights is None else group.split(weights))
        return {f"{part}:{name}": tensor for part, state in found.items() for name, tensor in state.items()}

    def given_back(self, x: Tensor, state: Mapping[str, Tensor], below: Sequence[Tensor]) -> Tensor:
        """What a side that predicts gives back of what it was fitted to; x itself of one that does not."""
        if not self.predicts:
            return x
        plain = replaced(self.bound(Place(0, self.side), state), calibration=None)
        step = next(step for step in plain.transform if step.predicts)
        coder = SideCoder(plain)
        coder._steps = tuple(step for step in plain.transform if not step.positional)
        return coder.beside(below).quantize_dequantize(x, torch.tensor([[step.fit_levels]]))[0]

    def bound(self, place: Place, state: Mapping[str, Tensor] | None = None) -> Side:
        """The side at its place, with what ``fit`` gave there.

        Raises MissingError where it has to be fitted and is not.
        """
        if state is None and self.calibrated:
            raise MissingError(
                f"{self.name} is fitted to a model: semkv-bench calibrate model=... quantizer={self.name}"
            )
        states: dict[str, dict[str, Tensor]] = {}
        for name, tensor in (state or {}).items():
            part, _, what = name.partition(":")
            states.setdefault(part, {})[what] = tensor
        parts = {name: part.bound(place, states.get(name, {})) for name, part in self._parts.items()}
        steps = tuple(parts[f"transform.{number}"] for number in range(len(self.transform)))
        return replaced(self, transform=steps, group=parts["group"], code=parts["code"])

    def check_levels(self, levels: int) -> None:
        """Raise UsageError if there is no such code with ``levels`` levels."""
        if self._format_levels not in (None, levels):
            raise UsageError(
                f"{self.name} is one format: its {self.side} have {self._format_levels} levels, not {levels}; "
                "no grid, layers.levels or allocation changes that"
            )
        self.code.check_levels(levels)
        if self.budget is not None:
            self.budget.check_levels(levels)

    def metadata_bits(self, head_dim: int) -> float:
        """See ``Quantizer``: of one head's vector, where heads are coded alone, in a long sequence."""
        return self._metadata(SideShape(1, head_dim), None) * head_dim

    def _metadata(self, shape: SideShape, tokens: int | None) -> float:
        """Metadata bits per coded value of a stretch of ``tokens`` tokens; None: the limit of many."""
        members = self.group.members(shape.head_dim, shape.heads, tokens)
        tile = self.granularity.tokens or self._block
        bits = self.code.metadata_bits / members
        bits += sum(step.bits(shape.head_dim, shape.heads, tokens, tile) for step in self.transform)
        bits += 0 if self.outliers is None else self.outliers.bits(shape.head_dim, shape.heads)
        if self.channels is not None:
            bits += 1 / tile
        if self.budget is not None:
            bits += self.budget.bits(shape.head_dim)
        if self._key_pivots is not None:
            bits += 16 * self.pivots.per_group / tile
        if self.residual is not None:
            bits += self.residual.bits(tokens or 2**40, shape.head_dim, self._block)
        return bits

    def storage(self, levels: int, head_dim: int, heads: int = 1) -> Storage:
        """See ``Quantizer``."""
        self.check(head_dim)
        self.check_levels(levels)
        code, packed = self._code_bits(levels, head_dim)
        return Storage(code, packed, packed + self._metadata(SideShape(heads, head_dim), None))

    def _code_bits(self, levels: int, head_dim: int) -> tuple[float, float]:
        code, packed = self.code.bits(levels)
        if self.channels is None:
            return code, packed
        share = self.channels.count(head_dim) / head_dim
        better = self.code.bits(max(levels, self.channels.levels))
        return code + share * (better[0] - code), packed + share * (better[1] - packed)

    @property
    def aligned(self) -> AlignedPrice | None:
        """See ``Quantizer``: numbers by scales of a token and head, and no steps."""
        element, channels = self.code.attended_element, self.group.channels
        by_block = element in ("e2m1", "symmetric") and (channels is None or channels >= _SHORTEST_BLOCK)
        grouped = self.group == _BY_TOKEN or (by_block and self.group == Group(channels=channels))
        plain = element is not None and grouped and not self.transform
        return AlignedPrice(self) if plain and self.unpackable() is None else None

    def coded_bits(self, parts: Sequence[tuple[int, int]], shape: SideShape) -> float:
        """See ``Quantizer``; what all tokens of a stretch share is counted once for it, or for each of its classes."""
        whole = sum(tokens for _, tokens in parts)
        by_class = self.group.tokens == CLASS or self.mix is not None
        return math.fsum(
            tokens
            * shape.values
            * (
                self._code_bits(levels, shape.head_dim)[1]
                + self._metadata(shape, tokens if by_class else whole)
            )
            for levels, tokens in parts
            if tokens
        )

    def sequence_bits(self, shape: SideShape) -> float:
        """See ``Quantizer``."""
        return self.code.sequence_bits

    def coder(self, head_dim: int, seed: int = 0, device: torch.device | str = "cpu") -> SideCoder:
        """See ``Quantizer``."""
        self.check(head_dim)
        return SideCoder(self)

    def unpackable(self) -> str | None:
        """See ``Quantizer``: parts whose storage is simulated alone."""
        if not self.code.packs:
            return self.code.unpackable
        if self.calibrated:
            return "what is fitted to a model is simulated"
        if self.group.tokens == CLASS:
            return "its groups are all tokens of one level count"
        for name in ("outliers", "channels", "pivots", "residual", "budget"):
            if getattr(self, name) is not None:
                return f"its {name} {'are' if name.endswith('s') else 'is'} simulated"
        return next((reason for step in self.transform if (reason := step.unpackable)), None)

    def of_side(self, side: str) -> Quantizer:
        """See ``Quantizer``."""
        return self

    def options(self) -> dict[str, Any]:
        """Parts and fields that differ from the method's file; none for a side without a file of its name."""
        return changed_from_file(self)

    def at(self, place: Place) -> Side:
        """The side at its place, with the numbers of its calibration's file, kept from one prompt to the next."""
        return _bound(self, place)


@lru_cache(maxsize=4096)
def _bound(side: Side, place: Place) -> Side:
    """The side with its calibration's numbers, kept from one prompt to the next."""
    file = side.calibration if side.calibrated else None
    return side.bound(place, None if file is None else calibration.read(file).state(place.layer, place.side))


def replaced(side: Side, **changes: Any) -> Side:
    """``side`` with some fields changed, before it is bound to a layer."""
    return Side(**{entry.name: getattr(side, entry.name) for entry in fields(side)} | changes)


def check_fields(what: str, kind: type, given: Mapping[str, Any]) -> None:
    """Raise UsageError for a key that is no field of ``kind``."""
    known = {entry.name for entry in fields(kind)}
    if wrong := sorted(set(given) - known):
        raise UsageError(f"there is no {what}.{wrong[0]}; known are {', '.join(sorted(known))}")
