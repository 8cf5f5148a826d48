"""Progress of long loops: a bar on a terminal, plain lines elsewhere."""

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

__all__ = ["track"]

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
