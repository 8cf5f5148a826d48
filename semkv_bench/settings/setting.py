"""Settings: the ways to store the cache that one sweep compares, built from the configuration."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from semkv_bench.errors import UsageError
from semkv_bench.grid.cost import FULL_BITS, SIDES, Cost, LayerShape, Price, SideShape, Stored, Tokens, cost
from semkv_bench.grid.levels import FULL_PRECISION, Storage, mix
from semkv_bench.importance import choice
from semkv_bench.quantizers.base import Quantizer
from semkv_bench.settings.allocation import Allocation, Prune, Uniform

if TYPE_CHECKING:
    from semkv_bench.settings.eviction import Evict
    from semkv_bench.settings.reading import Reading

__all__ = [
    "FULL",
    "Coded",
    "Setting",
]


@dataclass(frozen=True)
class Coded:
    """How the keys, or the values, of a setting are coded."""

    quantizer: Quantizer
    allocation: Allocation

    def storage(self, head_dim: int, heads: int = 1) -> Storage:
        """Cost of a coded value at ``head_dim`` values a vector, where ``heads`` share metadata."""
        return self.allocation.storage(self.quantizer, head_dim, heads)

    def at(self, layer: int, layers: int) -> "Coded | None":
        """The same in one of ``layers`` layers; None where that one stays in 16 bits."""
        chosen = self.quantizer.layers
        if not chosen.stored(layer, layers):
            return None
        if layer in (chosen.levels or {}):
            return Coded(self.quantizer, Uniform(chosen.levels[layer]))
        return self

    def coded_bits(self, tokens: int, shape: SideShape) -> float:
        """See ``semkv_bench.grid.cost.Price``."""
        return self.quantizer.coded_bits(self.allocation.parts(tokens), shape)

    def sequence_bits(self, shape: SideShape) -> float:
        """See ``semkv_bench.grid.cost.Price``."""
        return self.quantizer.sequence_bits(shape)


@dataclass(frozen=True)
class Setting:
    """One way to store the cache. ``keys`` or ``values`` that are None stay in 16 bits.

    prune: what is deleted; what stays is stored as ``keys`` and ``values`` say. read: which part of it a step reads;
    None: all of it.
    """

    name: str
    kind: str
    quantizer: str | None = None
    keys: Coded | None = None
    values: Coded | None = None
    prune: "Prune | Evict | None" = None
    read: "Reading | None" = None

    def storage(self, head_dim: int, heads: int = 1) -> Storage:
        """Price of a coded value at ``head_dim`` values a vector; what a cache costs is ``cost``.

        An engine's own setting overrides this.
        """
        sides = [
            FULL_PRECISION if side is None else side.storage(head_dim, heads)
            for side in (self.keys, self.values)
        ]
        coded = mix([(1, side) for side in sides])
        return coded if self.prune is None else self.prune.storage(coded)

    @property
    def aligns(self) -> bool:
        """Is there a kernel of ours that attends to its codes? Then they have a layout for it, too."""
        sides = (self.keys, self.values)
        return self.prune is None and all(
            side is not None and side.quantizer.aligned is not None for side in sides
        )

    def aligned_storage(self, head_dim: int, heads: int = 1) -> Storage:
        """``storage`` in the layout that attention reads codes from, of a setting that ``aligns``."""
        sides = (self.keys, self.values)
        return mix((1, side.allocation.storage(side.quantizer.aligned, head_dim, heads)) for side in sides)

    def storage_in(self, cache: Sequence[LayerShape | None]) -> Storage:
        """Price of a coded value, averaged over all that is coded in a cache of these layers.

        Where it would leave all of them in 16 bits, as the one layer of a cache whose model is not known, it is that of
        a layer between.
        """
        values: Counter[tuple[str, SideShape, int | None]] = Counter()
        spared: Counter[tuple[str, SideShape, int | None]] = Counter()
        for index, layer in enumerate(cache):
            if layer is not None and layer.coded:
                for name in SIDES:
                    shape, side = getattr(layer, name), getattr(self, name)
                    layers = None if side is None else side.quantizer.layers
                    own = layers and (layers.levels or {}).get(index)
                    stored = layers is None or layers.stored(index, len(cache))
                    (values if stored else spared)[name, shape, own] += shape.values
        return mix((count, self._side_storage(*at)) for at, count in (values or spared).items())

    def _side_storage(self, side: str, shape: SideShape, own_levels: int | None) -> Storage:
        """Of the layers that have ``own_levels``, or the grid's where that is None."""
        if self._own_format:
            return self.storage(shape.head_dim)
        coded = getattr(self, side)
        if own_levels is not None:
            coded = replace(coded, allocation=Uniform(own_levels))
        stays = FULL_PRECISION if coded is None else coded.storage(shape.head_dim, shape.heads)
        return stays if self.prune is None else self.prune.storage(stays)

    def price(self, layer: int, side: str, layers: int | None) -> Price | None:
        """How ``keys`` or ``values`` of one of ``layers`` layers are coded (None: as the grid says); None: not."""
        if self._own_format:
            return self
        coded = getattr(self, side)
        return coded if coded is None or layers is None else coded.at(layer, layers)

    @property
    def _own_format(self) -> bool:
        """Is the setting an engine's own, which tells its bits by ``storage`` alone?"""
        parts = (self.keys, self.values, self.prune, self.read)
        return self.kind != "full" and all(part is None for part in parts)

    def coded_bits(self, tokens: int, shape: SideShape) -> float:
        """See ``semkv_bench.grid.cost.Price``; of an engine's own setting."""
        return tokens * shape.values * self.storage(shape.head_dim).effective_bits

    def sequence_bits(self, shape: SideShape) -> float:
        """See ``semkv_bench.grid.cost.Price``."""
        return 0.0

    def codes(self, side: str) -> bool:
        """Are ``keys`` or ``values`` stored in another way than in 16 bits?"""
        return self.prune is not None or self._own_format or getattr(self, side) is not None

    def cost(self, stored: Stored) -> Cost:
        """What a cache costs that holds ``stored``."""
        layers = 1 + max((layer for part in stored.sides for layer in part.layers), default=0)
        found = cost(partial(self.price, layers=layers), stored)
        if self.read is not None:
            return replace(found, key_bits=found.key_bits + self._summary_bits(stored))
        if self.prune is None or not self.prune.uneven:
            return found
        # Where heads differ, each layer says where the tokens of each of its heads begin; keys and values share it.
        index = [
            _INDEX_BITS * (part.shape.heads + 1) * len(part.layers)
            for part in stored.sides
            if part.side == "keys" and part.tokens.deleted
        ]
        return replace(found, key_bits=found.key_bits + sum(index))

    def read_bits(self, stored: Stored, share: float) -> float:
        """Bits per value that a step reads of a cache that holds ``stored``, where it reads ``share`` of its blocks.

        Summaries and what follows the blocks, in 16 bits, are read whole.
        """
        found, summaries = self.cost(stored), self._summary_bits(stored)
        after = FULL_BITS * sum(
            part.shape.values * (part.tokens.total - stored.in_blocks) * len(part.layers)
            for part in stored.sides
        )
        bits, values = found.key_bits + found.value_bits, found.key_values + found.value_values
        return (share * (bits - summaries - after) + summaries + after) / values

    def _summary_bits(self, stored: Stored) -> float:
        """Bits of what stands for the blocks: 16 for each channel of their vectors."""
        keys = sum(part.shape.values * len(part.layers) for part in stored.sides if part.side == "keys")
        return FULL_BITS * keys * self.read.vectors[self.read.by] * self.read.blocks(stored.in_blocks)

    def holding(self, cache: Sequence[LayerShape | None], sides: Sequence[Tokens], prompt: int) -> Stored:
        """What a cache of these layers holds whose keys and values are ``sides``, behind a prompt of so many tokens."""
        return replace(Stored.of(cache, *sides), in_blocks=0 if self.read is None else prompt)

    def stored(self, tokens: int) -> tuple[Tokens, Tokens]:
        """How keys and values of ``tokens`` tokens are held that are stored at once, as a prompt is."""
        if self.prune is not None:
            kept = self.prune.kept(tokens)
            held = (
                Tokens.of([kept]) if side is not None else Tokens(kept=kept)
                for side in (self.keys, self.values)
            )
            return tuple(replace(side, deleted=tokens - kept) for side in held)
        sides = ((name, getattr(self, name)) for name in SIDES)
        return tuple(
            side.quantizer.stored(tokens)
            if side is not None
            else (Tokens.of([tokens]) if self.codes(name) else Tokens(kept=tokens))
            for name, side in sides
        )

    def planned(self, cache: Sequence[LayerShape | None], tokens: int) -> Cost:
        """What a cache of these layers costs that stores ``tokens`` tokens at once, as it does a prompt."""
        return self.cost(self.holding(cache, self.stored(tokens), tokens))

    def planned_layer(self, layer: LayerShape, tokens: int) -> Cost:
        """The same of one layer alone, coded as the grid says: none departs from it."""
        return cost(partial(self.price, layers=None), Stored.of([layer], *self.stored(tokens)))

    def check(self, head_dim: int, heads: int | None = None) -> None:
        """Raise UsageError if the vectors of ``heads`` heads of ``head_dim`` values cannot be stored so."""
        for side in (self.keys, self.values):
            if side is not None:
                self._check_side(side, head_dim, heads)
        self._check_ranks()

    def check_in(self, cache: Sequence[LayerShape | None]) -> None:
        """Raise UsageError if a coded layer's vectors cannot be stored so."""
        for side, name in ((self.keys, "keys"), (self.values, "values")):
            shapes = {getattr(layer, name) for layer in cache if layer is not None and layer.coded}
            for shape in sorted(shapes if side is not None else (), key=lambda s: (s.head_dim, s.heads)):
                self._check_side(side, shape.head_dim, shape.heads)
        self._check_layers([i for i, layer in enumerate(cache) if layer is not None and layer.coded])
        self._check_ranks()

    def _check_layers(self, coded: Sequence[int]) -> None:
        """Refuse a setting that leaves all ``coded`` layers in 16 bits."""
        layers = 1 + max(coded, default=-1)
        sides = [side.quantizer.layers for side in (self.keys, self.values) if side is not None]
        for side in sides:
            side.check(layers)
        if sides and coded and not any(side.stored(layer, layers) for side in sides for layer in coded):
            first, last = sides[0].skip_first, sides[0].skip_last
            raise UsageError(
                f"{self.name} leaves the first {first} and the last {last} layers in 16 bits, and so all {layers} of "
                "this model; lower quantizer.keys.layers and quantizer.values.layers, skip_first and skip_last"
            )

    def _check_side(self, side: Coded, head_dim: int, heads: int | None) -> None:
        side.quantizer.check(head_dim)
        if heads is not None:
            side.quantizer.check_heads(heads, head_dim)
        for count, _ in side.allocation.parts(2):
            side.quantizer.check_levels(count)
        for count in (side.quantizer.layers.levels or {}).values():
            side.quantizer.check_levels(count)
        if side.allocation.metric is not None and not side.quantizer.granularity.mixed:
            raise UsageError(
                f"{self.name}: {side.quantizer.name} has one range for several tokens of a channel, so these must "
                "have one level count; use allocation=uniform"
            )

    def _check_ranks(self) -> None:
        sides = [side for side in (self.keys, self.values) if side is not None]
        if self.metrics and len({side.quantizer.keep for side in sides}) > 1:
            raise UsageError(
                f"{self.name} ranks tokens, so keys and values must keep the same ones in 16 bits: give both one keep"
            )

    def describe(self) -> dict[str, Any]:
        """What the setting is, as data: the fields of the charter and of every record; None where there is no such.

        kind; family: the quantizer's name, without options; levels: of a uniform setting, a number, or
        ``{"keys": .., "values": ..}`` where the sides differ (None: 16 bits), None where they differ by layer;
        high, low, fraction: of a mix; keep: the share that pruning keeps; metric, scope: what ranks tokens; options:
        those that differ from the defaults, under ``keys`` and ``values`` where the sides differ.
        """
        sides = [side for side in (self.keys, self.values) if side is not None]
        found = dict.fromkeys(_DESCRIBED)
        found["kind"] = self.kind
        if sides:
            names = list(dict.fromkeys(side.quantizer.name for side in sides))
            found |= {"family": "+".join(names), "options": _both([_options(side) for side in sides])}
        if self.kind == "uniform":
            counts = [side and side.allocation.grid_point for side in (self.keys, self.values)]
            if any(side.quantizer.layers.levels for side in sides):
                counts = [None, None]
            found["levels"] = counts[0] if counts[0] == counts[1] else dict(zip(SIDES, counts, strict=True))
        if self.prune is not None and sides:
            found["levels"] = sides[0].allocation.grid_point
        if self.read is not None:
            found |= {"keep": self.read.keep, "metric": self.read.by, "scope": str(self.read.block)}
            found["levels"] = sides[0].allocation.grid_point if sides else None
        ranked = next((side.allocation for side in sides if side.allocation.metric is not None), self.prune)
        if ranked is not None:
            named = ("high", "low", "fraction", "keep", "metric", "scope")
            found |= {name: getattr(ranked, name) for name in named if hasattr(ranked, name)}
            metrics = [side.allocation.metric for side in sides] if self.prune is None else []
            if len(set(metrics)) > 1:
                found["metric"] = dict(zip(SIDES, metrics, strict=True))
        return found

    @property
    def metrics(self) -> set[str]:
        """Labels of the importance metrics that the setting ranks tokens by."""
        allocations = [side.allocation for side in (self.keys, self.values) if side is not None]
        allocations += [self.prune] if self.prune is not None else []
        return set().union(*(allocation.metrics for allocation in allocations))

    @property
    def scored(self) -> dict[str, set[str]]:
        """The same by whether the question is in sight of the metric, ``seen`` or ``unseen``."""
        question = getattr(self.prune, "question", "seen")
        found = {each: self.metrics if each == question else set() for each in ("seen", "unseen")}
        return {**found, "seen": found["seen"] | self.prompt_metrics}

    @property
    def prompt_metrics(self) -> set[str]:
        """Labels of the metrics that mark tokens of the prompt which stay in 16 bits."""
        sides = [side for side in (self.keys, self.values) if side is not None]
        return {metric for side in sides if (metric := side.quantizer.prompt_metric) is not None}

    @property
    def seeded(self) -> bool:
        """Does the seed change what is stored (random rotation, random importance)?"""
        sides = [side for side in (self.keys, self.values) if side is not None]
        return any(side.quantizer.seeded for side in sides) or any(
            choice.metric(label).seeded for label in self.metrics
        )


FULL = Setting(name="full", kind="full")

_INDEX_BITS = 32

_DESCRIBED = ("kind", "family", "levels", "high", "low", "fraction", "keep", "metric", "scope", "options")


def _options(side: Coded) -> dict[str, Any] | None:
    """Options of a side as plain data."""
    options = side.quantizer.options()
    plain = {name: value if _is_plain(value) else str(value) for name, value in options.items()}
    return plain or None


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | bool | dict | list | tuple)


def _both(found: Sequence[Any]) -> Any:
    """One entry where all sides have the same."""
    same = all(entry == found[0] for entry in found)
    return found[0] if same else dict(zip(SIDES, found, strict=True))
