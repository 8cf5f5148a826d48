"""The sets of settings that a configuration names: a grid, mixes of its points, deletions."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from semkv_bench.errors import UsageError
from semkv_bench.grid.levels import check_levels
from semkv_bench.quantizers.base import Quantizer, pair_label
from semkv_bench.settings.allocation import Allocation, Prune, TwoLevel, Uniform
from semkv_bench.settings.setting import Coded, Setting

__all__ = ["GridOnly", "Pruned", "TwoLevelMixes", "check_tokenwise", "listed", "uniform_settings"]


def uniform_settings(
    keys: Quantizer,
    values: Quantizer,
    levels: Sequence[int],
    key_levels: Sequence[int] | int | str | None = None,
    value_levels: Sequence[int] | int | str | None = None,
) -> list[Setting]:
    """One uniform setting per grid point, highest levels first.

    ``key_levels`` and ``value_levels`` replace the grid on one side: a list in step with ``levels``, one
    number held fixed, or ``full`` for 16 bits. A format with one level count is one setting, whatever the grid.

    Raises:
        UsageError: the grid is empty, holds something other than whole numbers from 2 or repeats itself.
    """
    grid = check_levels(levels)
    sides = [
        _side_levels(name, given, grid, quantizer)
        for name, given, quantizer in (("key", key_levels, keys), ("value", value_levels, values))
    ]
    points = sorted(zip(*sides, strict=True), key=_descending)
    if all(_gridless(quantizer, side) for quantizer, side in zip((keys, values), sides, strict=True)):
        points = points[:1]
    settings = [_uniform(keys, values, pair) for pair in points]
    names = [setting.name for setting in settings]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise UsageError(f"the grid holds {', '.join(repeated)} more than once")
    return settings


@dataclass(frozen=True)
class GridOnly:
    """No settings besides the uniform grid."""

    def settings(self, keys: Quantizer, values: Quantizer) -> list[Setting]:
        """None."""
        return []


@dataclass(frozen=True)
class TwoLevelMixes:
    """Every combination of ``high``, ``low``, ``fraction``, ``metric`` and ``scope``; each may be a list.

    value_metric ranks the values' tokens by another metric than the keys'; None: by the same.
    """

    high: Any = 6
    low: Any = 5
    fraction: Any = 0.25
    metric: Any = "key_norm"
    scope: Any = "shared"
    value_metric: str | None = None

    def settings(self, keys: Quantizer, values: Quantizer) -> list[Setting]:
        """One mixed setting per combination."""
        label = pair_label(keys, values)
        made = []
        for metric, scope, high, low, fraction in itertools.product(
            *map(listed, (self.metric, self.scope, self.high, self.low, self.fraction))
        ):
            mixed = TwoLevel(high, low, fraction, metric, scope)
            for_values = mixed if self.value_metric is None else replace(mixed, metric=self.value_metric)
            name = f"{label}-{mixed.label}" + (f"+{self.value_metric}" if self.value_metric else "")
            made.append(Setting(name, mixed.kind, label, Coded(keys, mixed), Coded(values, for_values)))
        return made


@dataclass(frozen=True)
class Pruned:
    """Every combination of ``keep``, ``metric`` and ``scope``; each may be a list."""

    keep: Any = 0.25
    metric: Any = "key_norm"
    scope: Any = "shared"

    def settings(self, keys: Quantizer, values: Quantizer) -> list[Setting]:
        """One pruned setting per combination; nothing is quantized."""
        made = []
        for metric, scope, keep in itertools.product(*map(listed, (self.metric, self.scope, self.keep))):
            prune = Prune(keep, metric, scope)
            made.append(Setting(f"prune@{prune.label}", prune.kind, prune=prune))
        return made


def listed(value: Any, group: str = "allocation") -> list[Any]:
    """The entries of an option that may be a list."""
    listed = list(value) if isinstance(value, list | tuple) else [value]
    if not listed:
        raise UsageError(f"an empty list in {group} leaves no setting; give at least one value")
    return listed


def check_tokenwise(name: str, keys: Quantizer, values: Quantizer, why: str) -> None:
    """Raise UsageError for quantizers that code tokens together, or leave some in 16 bits; ``why`` that matters."""
    for side in (keys, values):
        if not side.granularity.mixed or side.keep.windowed or side.keep.sinks:
            raise UsageError(
                f"{name}: {side.name} codes tokens together or leaves some in 16 bits, so what is {why}; quantize the "
                "rest by a method that codes each token by itself, such as affine"
            )


def _gridless(quantizer: Quantizer, side: Sequence[int | None]) -> bool:
    """Does the grid leave this side as it is: a format with one level count, or 16 bits?"""
    return quantizer.fixed_levels is not None or set(side) == {None}


def _side_levels(
    name: str, given: Sequence[int] | int | str | None, grid: tuple[int, ...], quantizer: Quantizer
) -> list[int | None]:
    if given is None:
        return list(grid) if quantizer.fixed_levels is None else [quantizer.fixed_levels] * len(grid)
    if given == "full":
        return [None] * len(grid)
    if isinstance(given, str):
        raise UsageError(f"grid.{name}_levels={given} must be a whole number, a list, full or null")
    side = check_levels([given] if isinstance(given, int) else given)
    for count in side:
        quantizer.check_levels(count)
    if isinstance(given, int):
        return list(side) * len(grid)
    if len(side) != len(grid):
        raise UsageError(f"grid.{name}_levels has {len(side)} entries, grid.levels has {len(grid)}")
    return list(side)


def _descending(pair: tuple[int | None, int | None]) -> tuple[float, float]:
    key, value = (float("inf") if side is None else side for side in pair)
    return (-key, -value)


def _uniform(keys: Quantizer, values: Quantizer, pair: tuple[int | None, int | None]) -> Setting:
    key, value = pair
    label = pair_label(keys, values)
    same = key == value and key is not None
    points = f"-L{key}" if same else f"-K{key or 'full'}V{value or 'full'}"
    if None not in pair and None not in (keys.fixed_levels, values.fixed_levels):
        points = ""
    if key is None and value is None:
        raise UsageError("grid.key_levels and grid.value_levels are both full: nothing is quantized")
    return Setting(
        label + points,
        "uniform",
        label,
        None if key is None else Coded(keys, _grid_point(keys, key)),
        None if value is None else Coded(values, _grid_point(values, value)),
    )


def _grid_point(quantizer: Quantizer, levels: int) -> Allocation:
    """All tokens at ``levels``, or what the method's own mix makes of them."""
    mix = getattr(quantizer, "mix", None)
    if mix is None or levels >= mix.high:
        return Uniform(levels)
    return TwoLevel(mix.high, levels, mix.fraction, mix.metric, mix.scope)
