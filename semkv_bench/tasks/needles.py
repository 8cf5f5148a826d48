"""What is hidden in a haystack, where, and how much filler goes around it."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from semkv_bench.errors import UsageError
from semkv_bench.tasks.encoding import Encoded
from semkv_bench.tasks.haystack import insert_at

__all__ = ["MAX_KEYS", "Length", "bury", "draw_depths", "draw_keys", "draw_values", "filled", "lengths_of"]

_NEARLY = 0.9  # of the length that was asked for
_GOLDEN_RATIO = 0.6180339887498949

_COLOURS = (
    "amber", "scarlet", "violet", "turquoise", "crimson", "emerald", "ivory", "cobalt", "silver", "golden",
)  # fmt: skip
_OBJECTS = (
    "lantern", "compass", "dragon", "castle", "rocket", "violin", "glacier", "tiger", "helmet", "submarine",
    "telescope", "pyramid", "falcon", "locomotive", "diamond", "volcano",
)  # fmt: skip
MAX_KEYS = min(len(_COLOURS), len(_OBJECTS))


@dataclass(frozen=True)
class Length:
    """A length of prompts: the tokens that they have at most, and what names it where there are several."""

    limit: int
    mark: str


def lengths_of(lengths: Sequence[int], max_prompt_tokens: int | None) -> list[Length]:
    """The ``lengths`` of a task, none above ``max_prompt_tokens``.

    Raises UsageError where the cap makes two of several lengths one.
    """
    limits = [length if max_prompt_tokens is None else min(length, max_prompt_tokens) for length in lengths]
    if len(set(limits)) < len(limits):
        raise UsageError(
            f"max_prompt_tokens={max_prompt_tokens} makes lengths of task.length={list(lengths)} one"
        )
    several = len(lengths) > 1
    return [
        Length(limit, f"-n{length}" if several else "") for length, limit in zip(lengths, limits, strict=True)
    ]


def draw_keys(rng: random.Random, n: int) -> list[str]:
    """``n`` keys (at most MAX_KEYS) that share neither colour nor object."""
    pairs = zip(rng.sample(_COLOURS, n), rng.sample(_OBJECTS, n), strict=True)
    return [f"{colour} {thing}" for colour, thing in pairs]


def draw_values(rng: random.Random, n: int) -> list[str]:
    """``n`` different numbers of seven digits."""
    return [str(value) for value in rng.sample(range(10**6, 10**7), n)]


def draw_depths(name: str, seed: int, index: int, n: int) -> list[float]:
    """``n`` depths in reading order: evenly apart, and stepped from index to index so that few cover the range."""
    start = random.Random(f"{name}/{seed}/depth").random() + index * _GOLDEN_RATIO
    return sorted((start + i / n) % 1.0 for i in range(n))


def bury(
    name: str,
    needles: Sequence[str],
    depths: Sequence[float],
    sentence: Callable[[], str],
    encode: Callable[[str], Encoded],
    limit: int,
) -> tuple[Encoded, str]:
    """The prompt that ``encode`` makes of the needles among as much filler as ``limit`` tokens allow.

    The haystack by itself comes with it. Filler is whole sentences from ``sentence``. Raises UsageError, naming
    ``name``, where the needles alone are longer than ``limit``.
    """
    filler: list[str] = []

    def haystack(n: int) -> str:
        filler.extend(sentence() for _ in range(n - len(filler)))
        return " ".join(insert_at(filler[:n], needles, depths))

    return filled(name, haystack, encode, limit)


def filled(
    name: str,
    text: Callable[[int], str],
    encode: Callable[[str], Encoded],
    limit: int,
    most: int | None = None,
) -> tuple[Encoded, str]:
    """The longest prompt of at most ``limit`` tokens that ``encode`` makes of ``text(n)``, and that text.

    ``text(n)`` has ``n`` pieces of filler and grows with it; there are ``most`` of them, or as many as are wanted.
    Raises UsageError, naming ``name``, where the text is longer than ``limit`` without any, does not grow, or is too
    short with all.
    """

    @cache
    def whole(n: int) -> Encoded:
        return encode(text(n))

    shortest = len(whole(0).input_ids)
    if shortest > limit:
        raise UsageError(
            f"prompts of {limit} tokens are too short for {name}, which takes {shortest} without any filler; "
            "raise task.length or max_prompt_tokens"
        )
    fits, over = 0, 1
    while (most is None or over <= most) and len(whole(over).input_ids) <= limit:
        if over > limit:
            raise UsageError(
                f"prompts of {name} do not grow with their text, so they cannot be filled up to {limit} tokens; "
                "task.chat=false leaves the chat template out"
            )
        fits, over = over, 2 * over
    over = over if most is None else min(over, most + 1)
    while over - fits > 1:
        middle = (fits + over) // 2
        if len(whole(middle).input_ids) <= limit:
            fits = middle
        else:
            over = middle
    if fits == most and (held := len(whole(fits).input_ids)) < _NEARLY * limit:
        raise UsageError(
            f"all the text that there is for {name} makes a prompt of {held} tokens, not of {limit}; lower "
            "task.length, or give a larger file"
        )
    return whole(fits), text(fits)
