"""Methods from parts: transform x group x code x keep x residual, a side each for keys and values.

A method is one YAML file whose ``_target_`` is ``semkv_bench.quantizers.Method``. Its sides name their parts: steps
of ``transform`` and the ``code`` by ``_target_``, the others (``group``, ``keep``, ``outliers``, ``channels``,
``pivots``, ``residual``, ``layers``, ``mix``, ``budget``) by their fields alone. To add a part, write a frozen
dataclass after the contract at the top of transforms.py, codes.py or exact.py; to add a method of parts that exist,
write the YAML file.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from omegaconf import OmegaConf

from semkv_bench.config.choices import choice_file
from semkv_bench.config.compose import build
from semkv_bench.errors import MissingError, SemkvError, UsageError
from semkv_bench.grid.cost import SideShape
from semkv_bench.grid.levels import Storage, check_levels
from semkv_bench.kernels.numerics import check_rows, finite_cast
from semkv_bench.lazy import torch
from semkv_bench.quantizers import calibration
from semkv_bench.quantizers.base import Coder, Encoded, NonFiniteError, Quantizer, Sides
from semkv_bench.quantizers.codes import Code, Uniform, ValueCode
from semkv_bench.quantizers.exact import Budget, Channels, LowRank, Mix, Outliers, Pivots
from semkv_bench.quantizers.granularity import TOGETHER, Granularity
from semkv_bench.quantizers.groups import CLASS, Group
from semkv_bench.quantizers.packing import LayoutOf, Packed, Stream
from semkv_bench.quantizers.parts import Part, Place
from semkv_bench.quantizers.transforms import Kept, Step

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["Method", "Side"]

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
                _check_fields(name, kind, given)
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
        plain = _replaced(self.bound(Place(0, self.side), state), calibration=None)
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
        return _replaced(self, transform=steps, group=parts["group"], code=parts["code"])

    def check_levels(self, levels: int) -> None:
        """Raise UsageError if there is no such code with ``levels`` levels."""
        if self.fixed_levels not in (None, levels):
            raise UsageError(
                f"{self.name} is one format: its {self.side} have {self.fixed_levels} levels, not {levels}; "
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
        if not isinstance(self.code, ValueCode):
            return f"{type(self.code).__name__} is simulated and gives no codes to store"
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
        preset = _preset(self.name)
        return {} if preset is None else _differences(self, getattr(preset, self.side))


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
                _check_fields(side, Side, given)
                made = Side(**{**given, **own})
            else:
                made = _replaced(given, **own)
            object.__setattr__(self, side, made)

    def of_side(self, side: str) -> Side:
        """What codes ``keys`` or ``values``."""
        return getattr(self, side)

    def for_values(self) -> Side:
        """What codes the values where this method codes the keys."""
        return self.values


def _replaced(side: Side, **changes: Any) -> Side:
    return Side(**{entry.name: getattr(side, entry.name) for entry in fields(side)} | changes)


def _check_fields(what: str, kind: type, given: Mapping[str, Any]) -> None:
    known = {entry.name for entry in fields(kind)}
    if wrong := sorted(set(given) - known):
        raise UsageError(f"there is no {what}.{wrong[0]}; known are {', '.join(sorted(known))}")


@lru_cache(maxsize=64)
def _preset(name: str) -> Method | None:
    """The method as its file has it; None if there is no such file."""
    try:
        node = OmegaConf.load(choice_file("quantizer", name))
    except StopIteration:
        return None
    made = build(node, "quantizer")
    return made if isinstance(made, Method) else None


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


class SideCoder(Coder):
    """Codes pieces of one side as its parts say.

    A piece of tokens falls into units that are coded alone, each [heads, tokens, channels].
    """

    simulated: ClassVar[bool] = True

    def __init__(self, side: Side) -> None:
        self.side = side
        self._prompt: Tensor | None = None
        self._code = side.code
        self._steps = side.transform
        self._pivots: Tensor | None = None
        self._attention: Tensor | None = None

    @property
    def predicts(self) -> bool:
        """See ``Coder``."""
        return self.side.predicts

    def scored(self, scores: Tensor) -> SideCoder:
        """See ``Coder``: attention for a budget, or pivots, which score above 0."""
        made = copy.copy(self)
        if self.side.budget is not None:
            made._attention = scores
        else:
            made._pivots = scores > 0
        return made

    def beside(self, below: Sequence[Tensor]) -> SideCoder:
        """See ``Coder``."""
        made = copy.copy(self)
        made._steps = tuple(step.beside(below) for step in self._steps)
        return made

    def at(self, place: Place) -> SideCoder:
        """See ``Coder``."""
        if not (self.side.calibrated or self.side.positional):
            return self
        return SideCoder(_bound(self.side, place))

    def placed(self, start: int) -> SideCoder:
        """See ``Coder``."""
        if not self.side.positional:
            return self
        made = copy.copy(self)
        made._steps = tuple(step.placed(start) for step in self._steps)
        return made

    def prepare(self, prompt: Tensor) -> None:
        """See ``Coder``."""
        self._prompt = prompt.float()
        if self._prompt.numel():
            self._code = self.side.code.of_prompt(self._prompt)

    def code_row(self, x: Tensor, levels: Tensor, out: Tensor) -> None:
        """See ``Coder``."""
        check_rows(x, levels)
        if not x.shape[1]:
            return
        y, kept = self._changed(x)
        for count, target in zip(levels, out, strict=True):
            values = self._undone(self._at(y, count.expand(x.shape[1])), kept)
            target.copy_(finite_cast(values, target.dtype))
            if self._pivots is not None:
                target[:, self._pivots] = x[:, self._pivots].to(target.dtype)

    def _changed(self, x: Tensor) -> tuple[Tensor, list[Kept]]:
        """x [heads, tokens, channels] in units [units, heads, tokens, channels], all steps done; what undoes them."""
        if not bool(torch.isfinite(x).all()):
            raise NonFiniteError("NaN or infinity in the tensor to be quantized")
        tokens = x.shape[1]
        size = self.side.granularity.tokens or tokens
        size = tokens if size == 1 else size
        if tokens % size:
            raise ValueError(f"{tokens} tokens are not whole groups of {size}")
        y = x.float().unflatten(1, (-1, size)).transpose(0, 1)
        kept = []
        for step in self._steps:
            y, stored = step.apply(y, self._prompt)
            kept.append(stored)
        return y, kept

    def _undone(self, y: Tensor, kept: Sequence[Kept]) -> Tensor:
        """Values [heads, tokens, channels] of units."""
        for step, stored in zip(reversed(self._steps), reversed(kept), strict=True):
            y = step.undo(y, stored)
        return y.transpose(0, 1).flatten(1, 2)

    def _at(self, y: Tensor, levels: Tensor) -> Tensor:
        """Values of y [units, heads, tokens, channels] at levels int64 [tokens of all units]."""
        counts = levels.unique().tolist()
        for count in counts:
            self.side.check_levels(count)
        if len(counts) == 1:
            return self._coded(y, counts[0])
        self._check_mixed()
        levels = levels.view(y.shape[0], 1, y.shape[2], 1)
        found = torch.empty_like(y)
        for count in counts:
            here = (levels == count).flatten()
            if self.side.group.tokens == CLASS:
                found[:, :, here] = self._coded(y[:, :, here], count)
            else:
                found = torch.where(levels == count, self._coded(y, count), found)
        return found

    def _check_mixed(self) -> None:
        if not self.side.granularity.mixed:
            raise UsageError(f"{self.side.name}: tokens of one channel group must have one level count")

    def _coded(self, y: Tensor, levels: int) -> Tensor:
        """Values of y at one level count."""
        side, source, mask = self.side, y, None
        if side.outliers is not None:
            source, mask = side.outliers.take(y)
        if side._key_pivots is not None:
            mask = side.pivots.mask(y)
            source = torch.where(mask, _first_other(y, mask), y)
        if side.budget is not None:
            levels = side.budget.levels(source, levels, self._attention)[..., None]
        found = self._grouped(source, levels)
        if side.channels is not None:
            better = self._grouped(source, max(levels, side.channels.levels))
            found = torch.where(side.channels.mask(y), better, found)
        if mask is not None:
            found = torch.where(mask, y, found)
        if side.residual is not None:
            rank = side.residual.of(y.shape[2], side.keep.block)
            found = found + side.residual.term(y - found, rank)
            found = found if mask is None else torch.where(mask, y, found)
        return found

    def _grouped(self, y: Tensor, levels: int | Tensor) -> Tensor:
        group = self.side.group
        return group.join(self._code.quantize_dequantize(group.split(y), levels), y.shape[1])

    def pack(self, x: Tensor, levels: Tensor, layout_of: LayoutOf) -> Packed:
        """See ``Coder``; metadata are those of the groups, then of the steps: of every token, where none are shared."""
        y, kept = self._changed(x)
        counts = levels.unique().tolist()
        if len(counts) > 1:
            self._check_mixed()
        codes, stored = self._encoded(y, counts[0])
        grouped = self.side.group.split(levels.view(y.shape[0], 1, -1, 1).expand(y.shape))[..., :1]
        for count in counts[1:]:
            others = self._encoded(y, count)
            codes = torch.where(grouped == count, others[0], codes)
            stored = tuple(
                torch.where(grouped == count, *pair) for pair in zip(others[1], stored, strict=True)
            )
        codes = self.side.group.join(codes, y.shape[1]).transpose(0, 1).flatten(1, 2)
        metadata = [*stored, *(part for step in kept for part in step)]
        stream = Stream.of(codes.to(torch.uint8).contiguous(), layout_of(levels, *x.shape[::2]))
        if not self._token_by_token:
            return Packed(x.shape[1], (stream,), shared=tuple(part.contiguous() for part in metadata))
        # One unit: [1, heads, tokens, ...].
        return Packed(x.shape[1], (stream,), tuple(part[0].contiguous() for part in metadata))

    def _encoded(self, y: Tensor, levels: int) -> tuple[Tensor, Kept]:
        return self.side.code.encode(self.side.group.split(y), levels)

    @property
    def _token_by_token(self) -> bool:
        """Does no token share what is stored with it, with other tokens or over heads?"""
        group = self.side.group
        return group.axis == "token" and group.heads == "each" and self.side.granularity.tokens == 1

    def unpack(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        """See ``Coder``."""
        (stream,), group = packed.streams, self.side.group
        whole = stream.layout.tokens
        size = self.side.granularity.tokens or whole
        size = whole if size == 1 else size
        units = stream.codes().float().unflatten(1, (-1, size)).transpose(0, 1)
        metadata = list(packed.shared) or [part[None] for part in packed.by_token]
        kept = [metadata[start:stop] for start, stop in self._places(len(metadata))]
        levels = stream.layout.levels().view(units.shape[0], 1, -1, 1).expand(units.shape)
        values = self.side.code.decode(group.split(units), tuple(kept[0]), group.split(levels)[..., :1])
        return finite_cast(self._undone(group.join(values, units.shape[1]), kept[1:]), dtype)

    def _places(self, count: int) -> list[tuple[int, int]]:
        """Where the code's metadata lie among ``count`` tensors, then those of every step."""
        sizes = [step.keeps for step in self.side.transform]
        ends = list(itertools.accumulate([count - sum(sizes), *sizes], initial=0))
        return list(itertools.pairwise(ends))

    def encode(self, x: Tensor, levels: Tensor | int) -> Encoded:
        """Raises SemkvError: what is stored hangs on groups of tokens; see ``pack``."""
        raise SemkvError(f"{self.side.name} has no codes token by token; see pack and unpack")

    def decode(self, encoded: Encoded, dtype: torch.dtype) -> Tensor:
        """See ``encode``."""
        raise SemkvError(f"{self.side.name} has no codes token by token; see pack and unpack")


@lru_cache(maxsize=4096)
def _bound(side: Side, place: Place) -> Side:
    """The side with its calibration's numbers, kept from one prompt to the next."""
    file = side.calibration if side.calibrated else None
    return side.bound(place, None if file is None else calibration.read(file).state(place.layer, place.side))


def _first_other(y: Tensor, mask: Tensor) -> Tensor:
    """For every channel the value of the unit's first token that is not marked: it widens no range."""
    first = (~mask).int().argmax(2, keepdim=True).expand(-1, -1, 1, y.shape[-1])
    return y.gather(2, first)
