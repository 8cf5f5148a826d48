"""Levels by layer and side as the YAML of a quantizer."""

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from semkv_bench.config.compose import build
from semkv_bench.grid.cost import SIDES
from semkv_bench.quantizers import Method, Pair
from semkv_bench.search.layers import LevelsBySide, usual

__all__ = ["layered", "yaml_text"]


def layered(
    quantizer: DictConfig, value_quantizer: DictConfig | None, chosen: LevelsBySide, called: str
) -> dict[str, Any]:
    """The node of a quantizer with ``chosen`` levels, which names call ``called``."""
    keys = _plain(quantizer)
    values = keys if value_quantizer is None else _plain(value_quantizer)
    layers = {side: _layers(chosen, side, called) for side in SIDES}
    if value_quantizer is None and isinstance(build(quantizer, "quantizer"), Method):
        return {**keys, **{side: _with_layers(keys.get(side) or {}, layers[side]) for side in SIDES}}
    return {
        "_target_": f"{Pair.__module__}.{Pair.__qualname__}",
        "keys": _of_side(keys, quantizer, "keys", layers),
        "values": _of_side(values, value_quantizer or quantizer, "values", layers),
    }


def _of_side(
    node: dict[str, Any], config: DictConfig, side: str, layers: Mapping[str, dict[str, Any]]
) -> dict[str, Any]:
    if isinstance(build(config, "quantizer"), Method):
        return {**node, side: _with_layers(node.get(side) or {}, layers[side])}
    return _with_layers(node, layers[side])


def _with_layers(node: dict[str, Any], layers: dict[str, Any]) -> dict[str, Any]:
    kept = {name: count for name, count in (node.get("layers") or {}).items() if name.startswith("skip_")}
    return {**node, "layers": {**kept, **layers}}


def _layers(chosen: LevelsBySide, side: str, called: str) -> dict[str, Any]:
    others, levels = usual(chosen, side)
    return {} if others is None else {"levels": levels or None, "others": others, "called": called}


def _plain(node: DictConfig) -> dict[str, Any]:
    return OmegaConf.to_container(node, resolve=True)


def yaml_text(node: Mapping[str, Any], about: str) -> str:
    """The file of a quantizer; ``about`` is its first line."""
    return f"# {about}\n{OmegaConf.to_yaml(OmegaConf.create(dict(node)))}"
