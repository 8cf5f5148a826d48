"""Errors worded for the person at the command line, each with its exit code."""

__all__ = ["CheckFailed", "MissingError", "SemkvError", "UsageError"]


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
