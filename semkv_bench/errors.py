"""Errors worded for the person at the command line, each with its exit code, and Ctrl-C as one line."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = [
    "STOPPED",
    "CheckFailed",
    "MissingError",
    "NonFiniteError",
    "SemkvError",
    "UsageError",
    "one_line_on_interrupt",
]


class SemkvError(Exception):
    """Base of every error that is shown to a user as one line; ``exit_code`` is the process status.

    By itself: what was asked for could not be done (exit 3), for example because a disk is full. Exit 1 is left to
    checks that ran, so that a build can tell a moved cliff from a machine in trouble.
    """

    exit_code = 3


class CheckFailed(SemkvError):
    """A check ran and did not hold (exit 1)."""

    exit_code = 1


class UsageError(SemkvError):
    """A wrong value in the command, the configuration or an input file (exit 2)."""

    exit_code = 2


class MissingError(SemkvError):
    """A model, data file or package that is not there (exit 3); the message says how to get it."""

    exit_code = 3


class NonFiniteError(SemkvError):
    """The tensor to be quantized holds NaN or infinity."""


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
