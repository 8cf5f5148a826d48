"""What counts as a runaway generation."""

from collections.abc import Sequence

__all__ = ["LOOP_TOKENS", "is_loop", "is_runaway"]

LOOP_TOKENS = 24


def is_loop(tokens: Sequence[int], least: int = LOOP_TOKENS) -> bool:
    """Do the last ``least`` tokens or more repeat one n-gram of at most a third of them, three times at the least?"""
    for period in range(1, least // 3 + 1):
        tail = tokens[-least:]
        if len(tail) == least and all(tail[i] == tail[i - period] for i in range(period, least)):
            return True
    return False


def is_runaway(tokens: Sequence[int], ended: bool) -> bool:
    """A generation that was stopped by its token limit, or that looped before it ended."""
    return not ended or is_loop(tokens)
