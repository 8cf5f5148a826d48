"""Consoles that outlive their reader: ``semkv-bench doctor | head -1``."""

import os
from contextlib import suppress

from rich.console import Console

__all__ = ["LastingConsole"]


class LastingConsole(Console):
    """A console that falls silent when its pipe is closed; the command goes on and keeps its exit code."""

    def on_broken_pipe(self) -> None:
        """Send what is still to come, and what is buffered, to nowhere."""
        # Streams without a descriptor have no pipe either.
        with suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), self.file.fileno())
