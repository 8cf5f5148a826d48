"""The settings that a configuration asks for."""

from typing import Any

from omegaconf import DictConfig, OmegaConf

from semkv_bench.config.compose import build
from semkv_bench.errors import UsageError
from semkv_bench.quantizers.base import Quantizer, Sides
from semkv_bench.settings.reading import ReadAll
from semkv_bench.settings.setting import FULL, Setting, uniform_settings

__all__ = ["method_pairs", "planned_settings", "quantizers"]


def quantizers(config: DictConfig) -> tuple[Quantizer, Quantizer]:
    """Quantizers of the keys and of the values."""
    chosen = _quantizer(config.quantizer, "quantizer")
    if config.value_quantizer is None:
        return chosen.of_side("keys"), chosen.for_values()
    return chosen.of_side("keys"), _quantizer(config.value_quantizer, "value_quantizer").of_side("values")


def method_pairs(config: DictConfig) -> list[tuple[Quantizer, Quantizer]]:
    """Quantizers of the keys and of the values, of every method that is compared."""
    if not config.get("method"):
        return [quantizers(config)]
    made = [_quantizer(node, f"method.{name}") for name, node in config.method.items()]
    return [(each.of_side("keys"), each.for_values()) for each in made]


def _quantizer(node: DictConfig, group: str) -> Sides:
    made = build(node, group)
    if not isinstance(made, Sides):
        raise UsageError(
            f"{group}: its file must say `_target_: module.Class` of a Quantizer; it makes a {type(made).__name__}"
        )
    return made


def planned_settings(config: DictConfig) -> tuple[Setting, ...]:
    """``full``, the uniform grid of every method and what allocation and reading add, with distinct names."""
    pairs = method_pairs(config)
    points = [_plain(config.grid[name]) for name in ("levels", "key_levels", "value_levels")]
    grids = [setting for pair in pairs for setting in uniform_settings(*pair, *points)]
    allocation = build(config.allocation, "allocation")
    reads = build(config.read, "read") if config.get("read") else ReadAll()
    allocated: list[Setting] = []
    for pair in pairs:
        # Deletion is the same whatever the method.
        added = [*allocation.settings(*pair), *reads.settings(*pair)]
        allocated += [setting for setting in added if setting not in allocated]
    settings = (FULL, *grids, *allocated)
    names = [setting.name for setting in settings]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"the sweep holds {', '.join(repeated)} more than once")
    return settings


def _plain(node: Any) -> Any:
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
