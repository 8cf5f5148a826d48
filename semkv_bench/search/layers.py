"""The parts of a cache that have levels of their own, what they take, and the choices under a budget."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from semkv_bench.errors import UsageError
from semkv_bench.grid.cost import SIDES, LayerShape
from semkv_bench.quantizers.base import Quantizer
from semkv_bench.search.budget import Option, cheapest, choose, spread
from semkv_bench.settings.sets import uniform_settings
from semkv_bench.settings.setting import FULL, Setting

__all__ = ["PAIRS", "Cache", "LevelsBySide", "usual"]

PAIRS = {
    "K8V8": (256, 256),
    "K8V4": (256, 16),
    "K4V8": (16, 256),
    "K4V4": (16, 16),
    "K4V2": (16, 4),
    "K2V2": (4, 4),
}
"""KVTuner's pairs of bits of a layer's keys and values (arXiv 2502.04420), as levels."""

Part = tuple[int, str]
LevelsBySide = dict[Part, int]
"""Levels by layer and side."""


@dataclass(frozen=True)
class Cache:
    """A model's cache of ``tokens`` tokens under one method.

    shapes: of every layer; grid: the method's uniform settings by levels, highest first; parts: the layers and sides
    that are coded.
    """

    shapes: Sequence[LayerShape | None]
    tokens: int
    grid: Mapping[int, Setting]
    parts: tuple[Part, ...]

    @classmethod
    def of(
        cls,
        keys: Quantizer,
        values: Quantizer,
        levels: Sequence[int],
        shapes: Sequence[LayerShape | None],
        tokens: int,
    ) -> "Cache":
        """Raises UsageError for a method that has no levels to choose."""
        for side in (keys, values):
            if side.fixed_levels is not None or side.layers.levels:
                raise UsageError(
                    f"search chooses the levels of every layer, and {side.label} has them already; choose a quantizer "
                    "without levels of its own"
                )
            if getattr(side, "mix", None) is not None:
                raise UsageError(
                    f"{side.name} mixes levels among tokens; choose a quantizer with one level count"
                )
        grid = {s.keys.allocation.grid_point: s for s in uniform_settings(keys, values, levels)}
        coded = [i for i, layer in enumerate(shapes) if layer is not None and layer.coded]
        parts = tuple(
            (layer, side)
            for layer in coded
            for side, quantizer in zip(SIDES, (keys, values), strict=True)
            if quantizer.layers.stored(layer, len(shapes))
        )
        return cls(shapes, tokens, grid, parts)

    def bits(self, part: Part, levels: int) -> float:
        """Bits of one side of one layer."""
        layer, side = part
        cost = self.grid[levels].planned_layer(self.shapes[layer], self.tokens)
        return cost.key_bits if side == "keys" else cost.value_bits

    def uniform_bits(self, levels: int) -> float:
        """Bits per value of the whole cache at one level count."""
        return self.grid[levels].planned(self.shapes, self.tokens).cache_bits

    def budget(self, target: float) -> float:
        """Bits that all parts may take together at ``target`` bits per value of the whole cache.

        Raises UsageError for a target below the lowest levels, or that pays for the highest.
        """
        low, high = min(self.grid), max(self.grid)
        if target < self.uniform_bits(low) - 1e-9:
            raise UsageError(
                f"target_bits={target:g} is below {self.uniform_bits(low):.3f}, what a cache of {self.tokens} tokens "
                f"takes with every layer at L={low}, the lowest of grid.levels"
            )
        if target >= self.uniform_bits(high) - 1e-9:
            raise UsageError(
                f"target_bits={target:g} pays for L={high}, the highest of grid.levels, in every layer "
                f"({self.uniform_bits(high):.3f} bits): there is nothing to choose"
            )
        full = FULL.planned(self.shapes, self.tokens)
        at_low = self.grid[low].planned(self.shapes, self.tokens)
        others = at_low.key_bits + at_low.value_bits - sum(self.bits(part, low) for part in self.parts)
        return target * (full.key_values + full.value_values) - others

    def cache_bits(self, chosen: LevelsBySide) -> float:
        """Bits per value of the whole cache at these levels."""
        low = min(self.grid)
        at_low = self.grid[low].planned(self.shapes, self.tokens)
        more = sum(self.bits(part, levels) - self.bits(part, low) for part, levels in chosen.items())
        full = FULL.planned(self.shapes, self.tokens)
        return (at_low.key_bits + at_low.value_bits + more) / (full.key_values + full.value_values)

    def least_loss(self, losses: Mapping[tuple[Part, int], float], target: float) -> LevelsBySide:
        """Levels of small total loss within ``target`` bits; ``losses`` by part and levels."""
        options = [[Option(self.bits(part, n), losses[part, n]) for n in self.grid] for part in self.parts]
        levels = list(self.grid)
        chosen = choose(options, self.budget(target))
        return {part: levels[at] for part, at in zip(self.parts, chosen, strict=True)}

    def evenly(self, target: float) -> LevelsBySide:
        """The two uniform grid points around ``target``, spread evenly over layers and sides."""
        levels = sorted(self.grid)
        low = max(n for n in levels if self.uniform_bits(n) <= target + 1e-9)
        high = levels[levels.index(low) + 1]
        options = [[Option(self.bits(part, n), 0) for n in (low, high)] for part in self.parts]
        lows, highs = [0] * len(self.parts), [1] * len(self.parts)
        chosen = spread(options, lows, highs, self.budget(target))
        return {part: (low, high)[at] for part, at in zip(self.parts, chosen, strict=True)}

    def by_pairs(self, losses: Mapping[tuple[Part, int], float], target: float) -> LevelsBySide | None:
        """A pair of KVTuner's for every layer, of small total loss within ``target`` bits.

        None where a level count of theirs is not on the grid, or their cheapest pair takes more.
        """
        if not {n for pair in PAIRS.values() for n in pair} <= set(self.grid):
            return None
        layers = list(dict.fromkeys(layer for layer, _ in self.parts))
        sides = {layer: [side for at, side in self.parts if at == layer] for layer in layers}
        pairs = [dict(zip(SIDES, pair, strict=True)) for pair in PAIRS.values()]
        options = [
            [
                Option(
                    sum(self.bits((layer, side), pair[side]) for side in sides[layer]),
                    sum(losses[(layer, side), pair[side]] for side in sides[layer]),
                )
                for pair in pairs
            ]
            for layer in layers
        ]
        budget = self.budget(target)
        least = sum(options[number][at].bits for number, at in enumerate(cheapest(options)))
        if least > budget:
            return None
        chosen = choose(options, budget)
        return {
            (layer, side): pairs[at][side]
            for layer, at in zip(layers, chosen, strict=True)
            for side in sides[layer]
        }

    def one_pair(self, name: str) -> LevelsBySide:
        """One of ``PAIRS`` in every layer."""
        pair = dict(zip(SIDES, PAIRS[name], strict=True))
        return {part: pair[part[1]] for part in self.parts}


def usual(chosen: LevelsBySide, side: str) -> tuple[int | None, dict[int, int]]:
    """The commonest level count of a side, and the layers that have others; None where the side is not coded."""
    mine = {layer: levels for (layer, at), levels in chosen.items() if at == side}
    if not mine:
        return None, {}
    others = min(mine.values(), key=lambda n: (-Counter(mine.values())[n], n))
    return others, {layer: levels for layer, levels in mine.items() if levels != others}
