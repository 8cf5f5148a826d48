"""The terminal: consoles that outlive their reader, progress of long loops, log lines."""

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.logging import RichHandler
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

__all__ = [
    "ERR",
    "OUT",
    "LastingConsole",
    "Progressing",
    "human_bytes",
    "print_plain",
    "set_up_output",
    "track",
]


class LastingConsole(Console):
    """A console that falls silent when its pipe is closed; the command goes on and keeps its exit code.

    Brackets are text: those of ``affine[g32]`` are no markup.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, **options})

    def on_broken_pipe(self) -> None:
        """Send what is still to come, and what is buffered, to nowhere."""
        # Streams without a descriptor have no pipe either.
        with suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), self.file.fileno())


OUT = LastingConsole()


ERR = LastingConsole(stderr=True)


def set_up_output() -> None:
    """Quiet the libraries and show our own log lines on stderr; a worker process calls it once, too."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Threads that spin at barriers slow a sweep tenfold as soon as anything else wants a core. Read by torch on import.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch|transformers|hydra")
    handler = RichHandler(console=ERR, show_time=False, show_path=False, show_level=False, markup=False)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], format="%(message)s", force=True)
    logging.getLogger("semkv_bench").setLevel(logging.INFO)


def print_plain(text: str) -> None:
    """Print ``text`` to stdout as it is, whatever the terminal; a closed pipe is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        OUT.on_broken_pipe()


def human_bytes(size: float) -> str:
    """``31.9 MiB``."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"


T = TypeVar("T")


_QUIET_SECONDS = 15.0
_A_SECOND = 2
_ROWS_BESIDE = 6


@dataclass(frozen=True)
class Progressing:
    """What is said beside a loop's progress. line: in plain text; table: in at most so many rows of a terminal."""

    line: Callable[[], str]
    table: Callable[[int], RenderableType]


def track(
    items: Iterable[T], total: int, what: str, console: Console, beside: Progressing | None = None
) -> Iterator[T]:
    """Yield ``items`` and show how many of ``total`` are done, how long the rest may take, and what is ``beside``."""
    if console.is_terminal:
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        task = bar.add_task(what, total=total)

        def shown() -> RenderableType:
            return bar if beside is None else Group(bar, beside.table(console.height - _ROWS_BESIDE))

        with Live(console=console, get_renderable=shown, refresh_per_second=_A_SECOND):
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
            told = beside.line() if beside is not None else ""
            console.print(
                f"{what}: {done} of {total}, {now - began:.0f} s, about {left:.0f} s left{told and f'; {told}'}",
                highlight=False,
                soft_wrap=True,
            )
            spoken = now
