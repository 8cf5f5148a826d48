"""What settings cost: the rows and the table of ``semkv-bench storage``."""

from collections.abc import Callable
from functools import partial
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table
from rich.text import Text

from semkv_bench.checks import whole
from semkv_bench.config.compose import build
from semkv_bench.console import human_bytes
from semkv_bench.errors import MissingError, UsageError
from semkv_bench.grid.cost import Cost
from semkv_bench.models.known import CONFIGURATION, PUBLICATION, published
from semkv_bench.models.shape import ModelShape
from semkv_bench.plan.settings import quantizers
from semkv_bench.settings.sets import uniform_settings
from semkv_bench.settings.setting import FULL, Setting

__all__ = ["published_words", "show_storage", "storage_rows"]


_HEAD_DIM, _KV_HEADS = 128, 8


def storage_rows(config: DictConfig) -> list[dict[str, Any]]:
    """One row per setting: code, packed and effective bits, compression, and cache bytes where a model is given.

    All of these are of the dense layout; ``aligned_bits`` are effective bits in the layout that attention over codes
    reads (``SemKVCache(attention="packed")``), of settings that it knows.

    With ``tokens``, also bits per value of a whole cache of so many tokens, all stored at once, as a prompt is. The
    allocation's own settings where it has any, else the uniform grid. Without a model that cache is of one layer, one
    that is coded as the grid says. ``shape_from`` of a model's row says whether its shape is from its
    ``configuration`` or, where that cannot be had, from its ``publication``.
    """
    shape, origin = (None, None) if config.model is None else _shape(config.model)
    for name in ("head_dim", "kv_heads", "tokens"):
        whole(name, config[name], 1, or_null=True)
    if any(tokens < 1 for tokens in config.context):
        raise UsageError(f"context={list(config.context)} must hold numbers of tokens of at least 1")
    if shape is None:
        _check_no_layers(config)
        layer = ModelShape.alike(1, config.kv_heads or _KV_HEADS, config.head_dim or _HEAD_DIM)
        settings = _settings(config)
        for setting in settings:
            setting.check(layer.head_dim, layer.kv_heads)
        return [
            _row(setting, layer)
            | _whole(layer, config.tokens, partial(setting.planned_layer, layer.cache[0]))
            for setting in settings
        ]
    for name in ("head_dim", "kv_heads"):
        if config[name] not in (None, getattr(shape, name)):
            raise UsageError(
                f"{name}={config[name]} is not the model's, which is {getattr(shape, name)}; leave one out"
            )
    contexts = sorted({*config.context, *([] if config.tokens is None else [config.tokens])})
    settings = _settings(config)
    for setting in settings:
        setting.check_in(shape.cache)
    return [
        _row(setting, shape)
        | _whole(shape, config.tokens, partial(setting.planned, shape.cache))
        | _sizes(setting, shape, contexts)
        | {"shape_from": origin}
        for setting in settings
    ]


def show_storage(rows: list[dict[str, Any]], console: Console) -> None:
    """The rows as a table, and the sizes of whole caches as a second one where both leave no room for names."""
    contexts = list(rows[0].get("cache_bytes", {}))
    whole = ("cache_bits", "key_cache_bits", "value_cache_bits") if "tokens" in rows[0] else ()
    apart = bool(whole and contexts)
    title = f"bits per value, head_dim {rows[0]['head_dim']}"
    at = "cache of one sequence at so many tokens"
    table = _table(title if apart or not contexts else f"{title}; {at}")
    words = [
        "code",
        "packed",
        "effective",
        "smaller",
        *(name.removesuffix("_bits").replace("_", " ") for name in whole),
    ]
    for column in words:
        table.add_column(column, justify="right", no_wrap=True)
    sizes = _table(at) if apart else table
    for tokens in contexts:
        sizes.add_column(f"at {_thousands(int(tokens))}", justify="right", no_wrap=True)
    lines = []
    if contexts:
        bits = [*["16.000"] * 3, "1.00x", *["16.000"] * len(whole)]
        lines.append(("full", bits, [human_bytes(rows[0]["full_bytes"][tokens]) for tokens in contexts]))
    for row in rows:
        bits = [f"{row[name]:.3f}" for name in ("code_bits", "packed_bits", "effective_bits")]
        bits += [f"{row['compression']:.2f}x", *(f"{row[name]:.3f}" for name in whole)]
        lines.append((row["setting"], bits, [human_bytes(row["cache_bytes"][tokens]) for tokens in contexts]))
    for name, bits, held in lines:
        table.add_row(Text(name), *bits, *([] if apart else held))
        if apart:
            sizes.add_row(Text(name), *held)
    console.print(table)
    if apart:
        console.print(sizes)
    others = [row for row in rows if row.get("aligned_bits", row["effective_bits"]) != row["effective_bits"]]
    if others:
        told = ", ".join(f"{row['setting']} {row['aligned_bits']:.3f}" for row in others)
        console.print(
            f"Codes are packed densely; effective as attention over codes reads them: {told}.",
            highlight=False,
        )
    if whole:
        told = f"cache: bits per value over all that a cache of {rows[0]['tokens']:,} tokens holds"
        console.print(f"{told}; the other columns are the price of a coded value.", highlight=False)
    if rows[0].get("layers"):
        console.print(f"{rows[0]['layers']}.", highlight=False)
    if rows[0].get("shape_from") == PUBLICATION:
        console.print(
            "The model's configuration is not here: its shape is the one published.", highlight=False
        )


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("setting", overflow="fold", min_width=12)
    return table


def published_words(node: DictConfig) -> str:
    """What can be said of the memory of a model whose files are not here; empty where they are, or nothing can."""
    source = build(node, "model")
    try:
        _, origin = _shape(node)
    except MissingError:
        return ""
    if origin == CONFIGURATION:
        return ""
    known = published(source)
    token = human_bytes(FULL.planned(known.shape.cache, 1).nbytes)
    return (
        f"; as published, its weights take {human_bytes(2 * known.parameters)} in 16 bits and each row of its cache "
        f"{token} a token (see semkv-bench storage)"
    )


def _shape(node: DictConfig) -> tuple[ModelShape, str]:
    source = build(node, "model")
    try:
        return source.shape(), CONFIGURATION
    except MissingError:
        if (known := published(source)) is None:
            raise
        return known.shape, PUBLICATION


def _settings(config: DictConfig) -> list[Setting]:
    keys, values = quantizers(config)
    own = build(config.allocation, "allocation").settings(keys, values)
    grid = OmegaConf.to_container(config.grid)
    return own or uniform_settings(keys, values, grid["levels"], grid["key_levels"], grid["value_levels"])


def _check_no_layers(config: DictConfig) -> None:
    for side in quantizers(config):
        if side.layers.levels:
            raise UsageError(
                f"{side.label} has levels by layer, and only a model tells how many layers there are: give model=NAME"
            )


def _row(setting: Setting, shape: ModelShape) -> dict[str, Any]:
    storage = setting.storage_in(shape.cache)
    aligned = setting.aligns and setting.aligned_storage(shape.head_dim, shape.kv_heads).effective_bits
    return {
        "setting": setting.name,
        "head_dim": shape.head_dim,
        "code_bits": storage.code_bits,
        "packed_bits": storage.packed_bits,
        "effective_bits": storage.effective_bits,
        "compression": storage.compression,
    } | ({"aligned_bits": aligned} if aligned else {})


def _whole(shape: ModelShape, tokens: int | None, planned: Callable[[int], Cost]) -> dict[str, Any]:
    """What a cache of ``tokens`` tokens costs, if they are given."""
    if tokens is None:
        return {}
    cost = planned(tokens)
    return {
        "kv_heads": shape.kv_heads,
        "tokens": tokens,
        "cache_bits": cost.cache_bits,
        "key_cache_bits": cost.key_cache_bits,
        "value_cache_bits": cost.value_cache_bits,
        "cache_compression": cost.compression,
    }


def _sizes(setting: Setting, shape: ModelShape, contexts: list[int]) -> dict[str, Any]:
    costs = {str(tokens): setting.planned(shape.cache, tokens) for tokens in contexts}
    sizes = {
        "cache_bytes": {tokens: cost.nbytes for tokens, cost in costs.items()},
        "full_bytes": {tokens: cost.full_bytes for tokens, cost in costs.items()},
        "layers": shape.described,
    }
    # Beside keys and values, in 16 bits and of one size whatever the number of tokens.
    return sizes | ({"state_bytes": 2 * shape.state_values} if shape.state_values else {})


def _thousands(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else f"{tokens:,}"
