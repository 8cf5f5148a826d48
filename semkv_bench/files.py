"""Files that outlast a process: where they live, how they are written, locked and read."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from platformdirs import user_cache_path

from semkv_bench.errors import MissingError, SemkvError, UsageError

__all__ = [
    "cache_dir",
    "check_writable",
    "hold_lock",
    "json_lines",
    "locked",
    "parse_json",
    "read_text",
    "write_atomically",
]


def cache_dir() -> Path:
    """The folder for downloaded files: ``SEMKV_CACHE``, else ``semkv-bench`` in the user's cache folder.

    The folder is named, not created.
    """
    own = os.environ.get("SEMKV_CACHE")
    if own:
        return Path(own).expanduser()
    return user_cache_path("semkv-bench", appauthor=False)


def check_writable(folder: Path, key: str = "out", instead: str = "out=DIR") -> None:
    """Is ``folder`` a place to write to, or to be made? Asked before the work for it is done; nothing is created.

    ``key`` names it in errors, which point to ``instead``. Raises UsageError where a file is in its place,
    SemkvError where it may not be written to.
    """
    # Path.exists raises where a folder above may not be entered.
    present = next(place for place in (folder, *folder.absolute().parents) if os.path.exists(place))
    if not os.path.isdir(present):
        what = "is a file; give a folder" if present == folder else f"cannot be made: {present} is a file"
        raise UsageError(f"{key}={folder} {what}")
    if not os.access(present, os.W_OK | os.X_OK):
        raise SemkvError(
            f"cannot write {key}={folder}: {present} may not be written to; choose another place by {instead}"
        )


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write ``content`` beside ``path`` and put it in its place: others see the old file or the whole new one."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        scratch.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def hold_lock(path: Path, wait: bool = True) -> FileLock | None:
    """The lock ``path``, held until its ``release`` or the end of the process.

    None where another process holds it and ``wait`` is false. Raises OSError where the file cannot be written.
    """
    # A lock waits for ever where it cannot be made.
    path.open("a").close()
    lock = FileLock(path)
    try:
        lock.acquire(timeout=-1 if wait else 0)
    except Timeout:
        return None
    return lock


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time within. Raises OSError where ``path`` cannot be written."""
    lock = hold_lock(path)
    try:
        yield
    finally:
        lock.release()


def parse_json(text: str | bytes) -> Any:
    """The JSON value in ``text``. Raises ValueError with one line, also for what is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except ValueError as error:
        if "int_max_str_digits" in str(error):
            raise ValueError("a whole number of more digits than any score or count has") from error
        raise ValueError(getattr(error, "msg", None) or str(error).splitlines()[0]) from error


def read_text(path: Path, shown: str | None = None) -> str:
    """What a user's text file holds, without a byte order mark; ``shown`` is what errors call it.

    Raises MissingError where it cannot be read, UsageError where it is not UTF-8.
    """
    shown = str(path) if shown is None else shown
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise MissingError(f"{shown} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{shown} is not UTF-8 text") from error


def json_lines(path: Path, shown: str | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number, from 1, and object of every line that is not blank.

    shown: what errors call the file. Raises MissingError where it cannot be read, UsageError naming the line that
    is no JSON object.
    """
    for number, line in enumerate(read_text(path, shown).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = parse_json(line)
        except ValueError as error:
            raise UsageError(f"{where}: broken JSON ({error})") from error
        if not isinstance(row, dict):
            raise UsageError(f"{where}: expected a JSON object")
        yield number, row
