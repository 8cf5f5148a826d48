"""The settings that a configuration asks for."""

import logging
from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from semkv_bench.config.choices import conf_dir
from semkv_bench.config.compose import build
from semkv_bench.config.own import fingerprints
from semkv_bench.errors import UsageError
from semkv_bench.quantizers.base import Quantizer, Sides
from semkv_bench.settings.reading import ReadAll
from semkv_bench.settings.sets import uniform_settings
from semkv_bench.settings.setting import FULL, Setting

__all__ = ["method_pairs", "planned_settings", "quantizers"]

log = logging.getLogger(__name__)


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
    if fingerprints([made]) and made.name in _names_of_ours():
        raise UsageError(
            f"{group}: {type(made).__name__} is called {made.name}, like a quantizer of the package's own; give it a "
            "name of its own"
        )
    return made


def _names_of_ours() -> set[str]:
    """What records of the package's own quantizers call them."""
    found, classes = {path.stem for path in (conf_dir() / "quantizer").glob("*.yaml")}, [Quantizer]
    while classes:
        cls = classes.pop()
        classes += cls.__subclasses__()
        if cls.__module__.startswith(f"{__package__.partition('.')[0]}."):
            found.add(getattr(cls, "name", ""))
    return found


def planned_settings(config: DictConfig) -> tuple[Setting, ...]:
    """``full``, the uniform grid of every method and what allocation and reading add, with distinct names."""
    pairs = method_pairs(config)
    points = [plain_node(config.grid[name]) for name in ("levels", "key_levels", "value_levels")]
    several = len(pairs) > 1
    grids = []
    for pair in pairs:
        uniform = uniform_settings(*pair, *points)
        grids += _possible(uniform) if several else uniform
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


def _possible(settings: Sequence[Setting]) -> Sequence[Setting]:
    """Those of a method's settings whose level counts its codes have; all where none has, so that this is refused."""
    kept = [setting for setting in settings if not _missing(setting)]
    if not kept or len(kept) == len(settings):
        return settings
    left = ", ".join(setting.name for setting in settings if setting not in kept)
    log.warning("of this grid %s leaves out %s: its codes have no such level counts", kept[0].quantizer, left)
    return kept


def _missing(setting: Setting) -> bool:
    try:
        for side in (setting.keys, setting.values):
            for count, _ in [] if side is None else side.allocation.parts(2):
                side.quantizer.check_levels(count)
    except UsageError:
        return True
    return False


def plain_node(node: Any) -> Any:
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
