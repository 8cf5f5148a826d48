"""Where files live that outlast one run."""

import os
from pathlib import Path

__all__ = ["cache_dir"]


def cache_dir() -> Path:
    """The folder for downloaded files: ``SEMKV_CACHE``, else ``semkv-bench`` in the user's cache folder.

    The user's cache folder is ``XDG_CACHE_HOME`` or ``~/.cache``. The folder is named, not created.
    """
    own = os.environ.get("SEMKV_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "semkv-bench"
