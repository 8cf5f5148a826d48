"""Ctrl-C: one line at any moment, also while libraries are being imported."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["STOPPED", "one_line_on_interrupt"]

STOPPED = "stopped; what is recorded is safe, run the same command again to continue"
_CODE = 128 + signal.SIGINT


@contextmanager
def one_line_on_interrupt() -> Iterator[None]:
    """KeyboardInterrupt as usual, but an end at once where it would come out of an unfinished import.

    There it would leave torch half set up, and other errors would come of it. The main thread alone may call this;
    elsewhere it does nothing.
    """
    try:
        before = signal.signal(signal.SIGINT, _stop)
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _stop(number: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os.write(2, f"{STOPPED}\n".encode())
            os._exit(_CODE)
        frame = frame.f_back
    raise KeyboardInterrupt
