"""Writing a set of files so that none of them is ever seen half written."""

import os
from collections.abc import Mapping
from pathlib import Path

from semkv_bench.errors import SemkvError

__all__ = ["write_all"]


def write_all(folder: Path, contents: Mapping[str, bytes]) -> dict[str, Path]:
    """Write ``contents`` (name relative to ``folder``: bytes) and return the path of each.

    Everything is written beside its place first and moved there last, so that a full disk leaves the
    earlier files as they were. Raises SemkvError naming the path that could not be written.
    """
    paths = {name: folder / name for name in contents}
    staged: dict[Path, Path] = {}
    current = folder
    try:
        for name, content in contents.items():
            current = paths[name]
            current.parent.mkdir(parents=True, exist_ok=True)
            draft = current.with_name(f".{current.name}.{os.getpid()}.tmp")
            staged[draft] = current
            _write_durably(draft, content)
        for draft, current in staged.items():
            os.replace(draft, current)
    except OSError as error:
        for draft in staged:
            _remove(draft)
        raise SemkvError(f"cannot write {current}: {error.strerror or error}") from error
    return paths


def _write_durably(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        # The folder itself may be what is unreachable; the error being raised already says so.
        return
