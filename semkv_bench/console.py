"""Consoles that outlive their reader: ``semkv-bench doctor | head -1``."""

import os
from contextlib import suppress

from rich.console import Console
import json
import logging
import os
import re
import shlex
import signal
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from rich.logging import RichHandler
from semkv_bench.console import LastingConsole
from semkv_bench.errors import MissingError, SemkvError, UsageError
from semkv_bench.errors import STOPPED, one_line_on_interrupt
from typing import Any
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table
from semkv_bench.config.compose import build
from semkv_bench.errors import MissingError, UsageError
from semkv_bench.models.load.shape import ModelShape
from semkv_bench.plan.plan.settings import quantizers
from semkv_bench.models.known import published
from semkv_bench.settings.setting import FULL, Setting, uniform_settings
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

__all__ = ["LastingConsole"]


class LastingConsole(Console):
    """A console that falls silent when its pipe is closed; the command goes on and keeps its exit code."""

    def on_broken_pipe(self) -> None:
        """Send what is still to come, and what is buffered, to nowhere."""
        # Streams without a descriptor have no pipe either.
        with suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), self.file.fileno())


_out = LastingConsole()



_err = LastingConsole(stderr=True)



def set_up_output() -> None:
    """Quiet the libraries and show our own log lines on stderr; a worker process calls it once, too."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Threads that spin at barriers slow a sweep tenfold as soon as anything else wants a core. Read by torch on import.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch|transformers|hydra")
    handler = RichHandler(console=_err, show_time=False, show_path=False, show_level=False, markup=False)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], format="%(message)s", force=True)
    logging.getLogger("semkv_bench").setLevel(logging.INFO)



def human_bytes(size: float) -> str:
    """``31.9 MiB``."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"



T = TypeVar("T")



_QUIET_SECONDS = 15.0



def track(items: Iterable[T], total: int, what: str, console: Console) -> Iterator[T]:
    """Yield ``items`` and show how many of ``total`` are done and how long the rest may take."""
    if console.is_terminal:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console) as bar:
            task = bar.add_task(what, total=total)
            for item in items:
                yield item
                bar.advance(task)
        return
    began = spoken = time.monotonic()
    for done, item in enumerate(items, start=1):
        yield item
        now = time.monotonic()
        if now - spoken >= _QUIET_SECONDS or done == total:
            left = (now - began) / done * (total - done)
            console.print(
                f"{what}: {done} of {total}, {now - began:.0f} s, about {left:.0f} s left", highlight=False
            )
            spoken = now

