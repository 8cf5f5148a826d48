"""What counts as a runaway generation: one definition for all protocols, tasks and lengths.

A generation has run away if it met its token limit, or if its end is a loop: some n-gram written at least
three times in a row, over at least ``LOOP_TOKENS`` tokens. So "the the the ..." counts from 24 tokens on, and a
sentence of 20 tokens once it stands there for the third time; numbers that are counted, lists and a phrase that
comes back now and then do not. What loops and then goes on to something else has not run away.

A task with a tight limit cuts off good answers, too. ``full`` is then cut off as often, and the comparison,
which is paired, does not see it.
"""

from collections.abc import Sequence

__all__ = ["LOOP_TOKENS", "is_loop", "is_runaway"]

LOOP_TOKENS = 24


def is_loop(tokens: Sequence[int], least: int = LOOP_TOKENS) -> bool:
    """Do the tokens end with one n-gram three times in a row or more often, over ``least`` tokens or more?"""
    for period in range(1, len(tokens) // 3 + 1):
        span = max(least, 3 * period)
        if span > len(tokens):
            break
        tail = tokens[-span:]
        if all(tail[i] == tail[i - period] for i in range(period, span)):
            return True
    return False


def is_runaway(tokens: Sequence[int], ended: bool) -> bool:
    """A generation that was stopped by its token limit, or that looped to its end."""
    return not ended or is_loop(tokens)
