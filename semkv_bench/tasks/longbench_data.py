"""LongBench's items: the hub's archive, a local one, a folder of <task>.jsonl files, or a saved dataset."""

import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from semkv_bench.errors import MissingError, UsageError
from semkv_bench.files import parse_json
from semkv_bench.tasks.longbench_metrics import paragraph_number

__all__ = [
    "HUB_REVISION",
    "Archive",
    "Folder",
    "Item",
    "SavedDataset",
    "Source",
    "fetch_archive",
    "open_source",
]

HUB_DATASET = "THUDM/LongBench"
HUB_REVISION = "5e628be450b7e67fb7ae6e201bd6d8f7056f7672"
_TIMEOUT_S = 15
_SAVED = ("dataset_dict.json", "state.json")
_CLASSIFIED = ("trec", "lsht")
_NUMBERED = ("passage_retrieval_en", "passage_retrieval_zh")


@dataclass(frozen=True)
class Item:
    """One row of a LongBench file."""

    item_id: str
    input: str
    context: str
    answers: tuple[str, ...]
    all_classes: tuple[str, ...] | None


class Source(Protocol):
    """A place that holds ``<task>.jsonl`` for some tasks."""

    def present(self, names: Sequence[str]) -> tuple[str, ...]:
        """Those of ``names`` that are there."""

    def items(self, task: str) -> list[Item]:
        """All items of one task in file order; UsageError with file and line for a bad one."""


@dataclass(frozen=True)
class Folder:
    """A folder of ``<task>.jsonl`` files."""

    path: Path

    def present(self, names: Sequence[str]) -> tuple[str, ...]:
        """See Source.present."""
        return tuple(name for name in names if (self.path / f"{name}.jsonl").is_file())

    def items(self, task: str) -> list[Item]:
        """See Source.items."""
        file = self.path / f"{task}.jsonl"
        return _parse(file.read_bytes(), task, str(file))


@dataclass(frozen=True)
class Archive:
    """A zip file with a member ``<task>.jsonl`` for each task, in any folder."""

    path: Path

    def present(self, names: Sequence[str]) -> tuple[str, ...]:
        """See Source.present."""
        with self._open() as archive:
            held = {PurePosixPath(member).name for member in _members(archive)}
        return tuple(name for name in names if f"{name}.jsonl" in held)

    def items(self, task: str) -> list[Item]:
        """See Source.items."""
        with self._open() as archive:
            found = [m for m in _members(archive) if PurePosixPath(m).name == f"{task}.jsonl"]
            if len(found) > 1:
                raise UsageError(f"{self.path} holds {task}.jsonl more than once: {', '.join(found)}")
            try:
                data = archive.read(found[0])
            except (zipfile.BadZipFile, OSError, RuntimeError) as error:
                raise UsageError(f"{self.path}: cannot read {found[0]} ({error}); fetch it again") from None
        return _parse(data, task, f"{self.path}:{found[0]}")

    def _open(self) -> zipfile.ZipFile:
        try:
            return zipfile.ZipFile(self.path)
        except zipfile.BadZipFile:
            raise UsageError(
                f"task.path={self.path} is neither a folder of <task>.jsonl files nor a zip archive of them"
            ) from None


@dataclass(frozen=True)
class SavedDataset:
    """What ``datasets`` wrote with ``save_to_disk``: one split a task, or rows whose column ``dataset`` names it."""

    path: Path

    def present(self, names: Sequence[str]) -> tuple[str, ...]:
        """See Source.present."""
        return tuple(name for name in names if name in self._rows_by_task)

    def items(self, task: str) -> list[Item]:
        """See Source.items."""
        rows = ((f"{self.path}:{task}, row {i}", row) for i, row in enumerate(self._rows_by_task[task], 1))
        return _checked(rows, task, f"{self.path}:{task}")

    @cached_property
    def _rows_by_task(self) -> dict[str, list[Any]]:
        from datasets import DatasetDict, load_from_disk

        try:
            saved = load_from_disk(str(self.path))
        except (OSError, ValueError) as error:
            raise UsageError(f"task.path={self.path}: cannot read the saved dataset ({error})") from None
        if isinstance(saved, DatasetDict):
            return {name: list(split) for name, split in saved.items()}
        if "dataset" not in saved.column_names:
            raise UsageError(f"task.path={self.path}: the saved dataset has no column named dataset")
        rows: dict[str, list[Any]] = {}
        for row in saved:
            rows.setdefault(row["dataset"], []).append(row)
        return rows


def _members(archive: zipfile.ZipFile) -> list[str]:
    return [name for name in archive.namelist() if not name.startswith("__MACOSX/")]


def open_source(path: str | Path) -> Source:
    """The folder or archive at ``path``; MissingError where nothing is there."""
    path = Path(path).expanduser()
    if any((path / name).is_file() for name in _SAVED):
        return SavedDataset(path)
    if path.is_dir():
        return _within(path)
    if path.is_file():
        return Archive(path)
    raise MissingError(
        f"task.path={path} does not exist; give a folder of <task>.jsonl files, LongBench's data.zip or its folder, "
        "or leave it out to fetch the data from the hub"
    )


def _within(folder: Path) -> Source:
    """The folder itself, or where it holds no file of items LongBench's data.zip or the ``data`` unpacked from it."""
    if not any(folder.glob("*.jsonl")):
        if (folder / "data.zip").is_file():
            return Archive(folder / "data.zip")
        if any(folder.glob("data/*.jsonl")):
            return Folder(folder / "data")
    return Folder(folder)


def fetch_archive(revision: str) -> Source:
    """data.zip of the hub's dataset, kept in the hub's cache; MissingError where it cannot be had."""
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    fetch = partial(hf_hub_download, HUB_DATASET, "data.zip", repo_type="dataset", revision=revision)
    try:
        try:
            path = fetch(local_files_only=True)
        except LocalEntryNotFoundError:
            # The hub's client would try for half a minute where there is no network.
            if not constants.HF_HUB_OFFLINE:
                _touch(constants.ENDPOINT)
            path = fetch()
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise MissingError(
            f"LongBench's data is not here and cannot be fetched ({type(error).__name__}); where there is a "
            f"network run `hf download {HUB_DATASET} data.zip --repo-type dataset --revision {revision} "
            "--local-dir DIR`, then give task.path=DIR/data.zip"
        ) from None
    return Archive(Path(path))


def _touch(url: str) -> None:
    """Raise OSError where the host of ``url`` cannot be reached; any answer of it will do."""
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=_TIMEOUT_S).close()
    except urllib.error.HTTPError:
        return


def _parse(data: bytes, task: str, label: str) -> list[Item]:
    return _checked(_lines(data, label), task, label)


def _lines(data: bytes, label: str) -> Iterator[tuple[str, Any]]:
    # Splitting at line feeds only: str.splitlines would also split at separators inside the texts.
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not line.strip():
            continue
        where = f"{label}:{number}"
        try:
            yield where, parse_json(line)
        except ValueError as error:
            raise UsageError(f"{where}: not valid JSON ({error})") from None


def _checked(rows: Iterable[tuple[str, Any]], task: str, label: str) -> list[Item]:
    """Items of rows that come with where each stands."""
    items: list[Item] = []
    seen: dict[str, str] = {}
    for where, row in rows:
        item = _item(row, task, where)
        if item.item_id in seen:
            raise UsageError(f"{where}: _id {item.item_id} was already used at {seen[item.item_id]}")
        seen[item.item_id] = where
        items.append(item)
    if not items:
        raise UsageError(f"{label} holds no items")
    return items


def _item(row: Any, task: str, where: str) -> Item:
    if not isinstance(row, dict):
        raise UsageError(f"{where}: not a JSON object")
    for key in ("_id", "input", "context"):
        if not isinstance(row.get(key), str):
            raise UsageError(f"{where}: field {key} must be there and be text")
    answers, classes = row.get("answers"), row.get("all_classes")
    if not _is_text_list(answers) or not answers:
        raise UsageError(f"{where}: field answers must be a list of at least one text")
    if classes is not None and not _is_text_list(classes):
        raise UsageError(f"{where}: field all_classes must be a list of texts or null")
    if row.get("dataset", task) != task:
        raise UsageError(f"{where}: field dataset is {row['dataset']}, but the file is named for {task}")
    if task in _CLASSIFIED and not set(answers) <= set(classes or ()):
        raise UsageError(f"{where}: field all_classes must hold the answers of a classification task")
    if task in _NUMBERED and None in map(paragraph_number, answers):
        raise UsageError(f"{where}: field answers must name a paragraph by its number")
    classes = None if classes is None else tuple(classes)
    return Item(row["_id"], row["input"], row["context"], tuple(answers), classes)


def _is_text_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)
