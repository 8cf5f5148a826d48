"""The settings that a configuration asks for."""

from typing import Any

from omegaconf import DictConfig, OmegaConf

from semkv_bench.config.compose import build
from semkv_bench.errors import UsageError
from semkv_bench.quantizers import Method, Quantizer
from semkv_bench.settings.setting import FULL, Setting, uniform_settings

__all__ = ["planned_settings", "quantizers"]


def quantizers(config: DictConfig) -> tuple[Quantizer, Quantizer]:
    """Quantizers of the keys and of the values."""
    chosen = _quantizer(config, "quantizer")
    if config.value_quantizer is None:
        return chosen.of_side("keys"), chosen.for_values()
    return chosen.of_side("keys"), _quantizer(config, "value_quantizer").of_side("values")


def _quantizer(config: DictConfig, group: str) -> Quantizer | Method:
    made = build(config[group], group)
    if not isinstance(made, Quantizer | Method):
        raise UsageError(
            f"{group}: its file must say `_target_: module.Class` of a Quantizer; it makes a {type(made).__name__}"
        )
    return made


def planned_settings(config: DictConfig) -> tuple[Setting, ...]:
    """``full``, the uniform grid and what the allocation adds, with distinct names."""
    keys, values = quantizers(config)
    grid = uniform_settings(
        keys, values, *(_plain(config.grid[k]) for k in ("levels", "key_levels", "value_levels"))
    )
    settings = (FULL, *grid, *build(config.allocation, "allocation").settings(keys, values))
    names = [setting.name for setting in settings]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"the sweep holds {', '.join(repeated)} more than once")
    return settings


def _plain(node: Any) -> Any:
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
