"""A server as a process: started, awaited, and ended with all that it started."""

import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from semkv_bench.engine.served import supervise
from semkv_bench.errors import MissingError, SemkvError

__all__ = ["ServerProcess", "free_port"]

_SHOWN_LINES = 3
_POLL = 0.1


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class ServerProcess:
    """A command that serves, under a supervisor that ends it when this process ends in any way.

    log: file that gets what the server prints, which tells what it really did. name: what errors call it, its command
    where None.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        name: str | None = None,
    ):
        self.command = list(command)
        self._name = name
        self.log = log
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen | None = None

    def __enter__(self) -> "ServerProcess":
        with self.log.open("ab") as out:
            self._process = subprocess.Popen(
                # By its path, which imports nothing of ours: a server must not wait for libraries it does not need.
                [sys.executable, supervise.__file__, *self.command],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self._environment,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._process
        if process is None:
            return
        supervise.end(process.pid)
        if process.stdin is not None:
            process.stdin.close()
        process.wait()

    @property
    def alive(self) -> bool:
        """Is the server still running?"""
        return self._process is not None and self._process.poll() is None

    def printed(self) -> str:
        """What the server printed so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait_until(self, ready: Callable[[], bool], seconds: float) -> None:
        """Wait until ``ready`` holds.

        Raises:
            MissingError: there is no such program.
            SemkvError: the server ended, or was not ready in time; the message has its last lines.
        """
        limit = time.monotonic() + seconds
        while not ready():
            if not self.alive:
                last = self._last_lines()
                if "FileNotFoundError" in last:
                    raise MissingError(
                        f"there is no program {self.command[0]!r}; install it or give its path"
                    )
                raise SemkvError(f"the server ended before it was ready ({self._named}); {last}")
            if time.monotonic() > limit:
                raise SemkvError(
                    f"the server was not ready within {seconds:g} s ({self._named}); give it more time by "
                    f"engine.start_seconds, or mend its command; {self._last_lines()}"
                )
            time.sleep(_POLL)

    @property
    def _named(self) -> str:
        return self._name or shlex.join(self.command)

    def _last_lines(self) -> str:
        lines = [line.strip() for line in self.printed().splitlines() if line.strip()]
        return f"its last lines: {' | '.join(lines[-_SHOWN_LINES:])}" if lines else "it printed nothing"
