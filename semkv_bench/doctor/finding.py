"""TODO-DOC"""

import importlib
import json
import platform
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING
from rich.console import Console
from rich.table import Table
import semkv_bench

__all__ = ["Finding", "MISSING", "NOTE", "OK"]


OK, NOTE, MISSING = "ok", "note", "missing"



@dataclass(frozen=True)
class Finding:
    """What one check found.

    state: ``ok``; ``note`` for what is useful but not needed; ``missing`` for what a sweep cannot do without.
    mend: what to do about it, a command where there is one.
    """

    name: str
    state: str
    found: str
    mend: str | None = None

