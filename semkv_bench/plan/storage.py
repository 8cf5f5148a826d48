"""What settings cost: the rows and the table of ``semkv-bench storage``."""

from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from semkv_bench.config.compose import build
from semkv_bench.console import human_bytes
from semkv_bench.errors import MissingError, UsageError
from semkv_bench.models.known import CONFIGURATION, PUBLICATION, published
from semkv_bench.models.shape import ModelShape
from semkv_bench.plan.settings import quantizers
from semkv_bench.settings.setting import FULL, Setting, uniform_settings
from semkv_bench.settings.storage import cache_bytes

__all__ = ["published_words", "show_storage", "storage_rows"]


_HEAD_DIM = 128


def storage_rows(config: DictConfig) -> list[dict[str, Any]]:
    """One row per setting: code, packed and effective bits, compression, and cache bytes where a model is given.

    The allocation's own settings where it has any, else the uniform grid. ``shape_from`` of a model's row says
    whether its shape is from its ``configuration`` or, where that cannot be had, from its ``publication``.
    """
    shape, origin = (None, None) if config.model is None else _shape(config.model)
    if config.head_dim is not None and config.head_dim < 1:
        raise UsageError(f"head_dim={config.head_dim} must be a whole number of at least 1")
    if any(tokens < 1 for tokens in config.context):
        raise UsageError(f"context={list(config.context)} must hold numbers of tokens of at least 1")
    head_dim = config.head_dim or (shape.head_dim if shape else _HEAD_DIM)
    if shape is not None and config.head_dim not in (None, shape.head_dim):
        raise UsageError(
            f"head_dim={config.head_dim} is not the model's, which is {shape.head_dim}; leave one out"
        )
    rows = [_row(setting, head_dim, shape, list(config.context)) for setting in _settings(config, head_dim)]
    return rows if origin is None else [{**row, "shape_from": origin} for row in rows]


def show_storage(rows: list[dict[str, Any]], console: Console) -> None:
    """The rows as a table."""
    at = "; cache of one sequence at so many tokens" if "cache_bytes" in rows[0] else ""
    table = Table(
        title=f"bits per value, head_dim {rows[0]['head_dim']}{at}",
        title_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
    )
    table.add_column("setting", overflow="fold", min_width=10)
    for column in ("code", "packed", "effective", "smaller"):
        table.add_column(column, justify="right", no_wrap=True)
    contexts = list(rows[0].get("cache_bytes", {}))
    for tokens in contexts:
        table.add_column(f"at {_thousands(int(tokens))}", justify="right", no_wrap=True)
    if contexts:
        sizes = [human_bytes(rows[0]["full_bytes"][tokens]) for tokens in contexts]
        table.add_row("full", "16.000", "16.000", "16.000", "1.00x", *sizes)
    for row in rows:
        cells = [f"{row[name]:.3f}" for name in ("code_bits", "packed_bits", "effective_bits")]
        sizes = [human_bytes(row["cache_bytes"][tokens]) for tokens in contexts]
        table.add_row(row["setting"], *cells, f"{row['compression']:.2f}x", *sizes)
    console.print(table)
    if rows[0].get("shape_from") == PUBLICATION:
        console.print(
            "The model's configuration is not here: its shape is the one published.", highlight=False
        )


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
    token = human_bytes(cache_bytes(FULL, known.shape, 1))
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


def _settings(config: DictConfig, head_dim: int) -> list[Setting]:
    keys, values = quantizers(config)
    own = build(config.allocation, "allocation").settings(keys, values)
    grid = OmegaConf.to_container(config.grid)
    settings = own or uniform_settings(keys, values, grid["levels"], grid["key_levels"], grid["value_levels"])
    for setting in settings:
        setting.check(head_dim)
    return settings


def _row(setting: Setting, head_dim: int, shape: ModelShape | None, contexts: list[int]) -> dict[str, Any]:
    storage = setting.storage(head_dim)
    row = {
        "setting": setting.name,
        "head_dim": head_dim,
        "code_bits": storage.code_bits,
        "packed_bits": storage.packed_bits,
        "effective_bits": storage.effective_bits,
        "compression": storage.compression,
    }
    if shape is not None:
        row["cache_bytes"] = {str(tokens): cache_bytes(setting, shape, tokens) for tokens in contexts}
        row["full_bytes"] = {str(tokens): cache_bytes(FULL, shape, tokens) for tokens in contexts}
    return row


def _thousands(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else f"{tokens:,}"
