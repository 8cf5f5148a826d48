"""``python supervise.py COMMAND...``: a server that ends with whoever started it.

Standard input is a pipe that the starter holds and never writes to. However the starter ends, killed or not, the pipe
closes, and the command goes with all that it has started, in its process group or out of it.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading

import psutil

_PATIENCE = 10.0  # seconds between asking and killing


def main(command: list[str]) -> int:
    """Run ``command`` until it ends, a signal comes or standard input closes; returns its exit status."""
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: end(server.pid))
    threading.Thread(target=_end_with_the_pipe, args=(server.pid,), daemon=True).start()
    return server.wait()


def _end_with_the_pipe(pid: int) -> None:
    # Not by sys.stdin, whose lock this thread would hold when the interpreter ends with the server.
    while os.read(0, 4096):
        pass
    end(pid)


def end(pid: int, patience: float = _PATIENCE) -> None:
    """End process ``pid`` and all its descendants: first asked, then killed."""
    with contextlib.suppress(psutil.NoSuchProcess):
        first = psutil.Process(pid)
        family = [*first.children(recursive=True), first]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        _, alive = psutil.wait_procs(family, timeout=patience)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
