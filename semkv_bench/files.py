"""Where files live that outlast one run."""

import os
from pathlib import Path

from semkv_bench.errors import SemkvError, UsageError

__all__ = ["cache_dir", "check_writable"]


def cache_dir() -> Path:
    """The folder for downloaded files: ``SEMKV_CACHE``, else ``semkv-bench`` in the user's cache folder.

    The user's cache folder is ``XDG_CACHE_HOME`` or ``~/.cache``. The folder is named, not created.
    """
    own = os.environ.get("SEMKV_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "semkv-bench"


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
