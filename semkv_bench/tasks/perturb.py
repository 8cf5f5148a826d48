"""Prompts as people mistype them: slips of the finger, odd capitals, loose punctuation, all seeded."""

import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from semkv_bench.errors import UsageError
from semkv_bench.tasks.base import Example, choose_names
from semkv_bench.tasks.encoding import Encoded, encode_target

__all__ = ["KINDS", "check_changed", "kinds_of", "perturbed", "with_variants"]

# Every letter's neighbours on a QWERTY keyboard, in its own row.
_ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
_NEIGHBOURS = {
    letter: row[max(0, at - 1) : at] + row[at + 1 : at + 2] for row in _ROWS for at, letter in enumerate(row)
}
# What may be changed: words of letters alone, and marks behind a word.
_WORD = re.compile(r"(?<![\w.@/-])[^\W\d_]{2,}(?![\w@/-])")
_MARK = re.compile(r"(?<=[^\W\d_])[.,;:!?](?=\s|$)")


def _mistyped(word: str, rng: random.Random) -> str:
    """The word with one slip behind its first letter: two letters swapped, one missing, doubled or its neighbour."""
    at = rng.randrange(1, len(word) - 1)
    one, two = word[at], word[at + 1]
    slips = [word[:at] + word[at + 1 :], word[:at] + one + word[at:]]
    if one != two:
        slips.append(word[:at] + two + one + word[at + 2 :])
    if near := _NEIGHBOURS.get(one):
        slips.append(word[:at] + rng.choice(near) + word[at + 1 :])
    return rng.choice(slips)


def _shouted(word: str, rng: random.Random) -> str:
    return word.lower() if word.isupper() else word.upper()


def _loosened(mark: str, rng: random.Random) -> str:
    return rng.choice(["", mark * 2, rng.choice([other for other in ",.!?" if other != mark])])


KINDS: dict[str, tuple[re.Pattern[str], int, float, Callable[[str, random.Random], str]]] = {
    "typo": (_WORD, 4, 0.08, _mistyped),
    "case": (_WORD, 2, 0.2, _shouted),
    "punctuation": (_MARK, 1, 0.3, _loosened),
}
"""By kind: what is looked for, its least length, how often it is changed, and how."""


def kinds_of(value: Any) -> tuple[str, ...]:
    """The kinds that ``task.perturb`` names; none for null."""
    return (
        () if value is None else choose_names("task.perturb", value, tuple(KINDS), {"all": tuple(KINDS)})[0]
    )


def perturbed(text: str, kind: str, key: str, keep: Iterable[str] = ()) -> str:
    """``text`` with some words or marks changed, drawn by ``key``; unchanged where there is nothing to change.

    Left alone: numbers and what holds digits, and every place where one of ``keep`` stands, whatever its case.

    >>> perturbed("The secret number is 12.", "case", "a", keep=["secret"]) != "The secret number is 12."
    True
    """
    pattern, least, rate, change = KINDS[kind]
    rng = random.Random(f"perturb/{kind}/{key}")
    kept = [
        found.span()
        for word in keep
        if word.strip()
        for found in re.finditer(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE)
    ]
    places = [
        found
        for found in pattern.finditer(text)
        if len(found[0]) >= least and not any(a < found.end() and found.start() < b for a, b in kept)
    ]
    chosen = [found for found in places if rng.random() < rate] or places[:1]
    pieces, end = [], 0
    for found in chosen:
        pieces += [text[end : found.start()], change(found[0], rng)]
        end = found.end()
    return "".join([*pieces, text[end:]])


def with_variants(
    tokenizer: Any,
    example: Example,
    text: str,
    kinds: Sequence[str],
    encode: Callable[[str], Encoded],
    keep: Sequence[str] = (),
) -> list[Example]:
    """The example, whose prompt ``encode`` made of ``text``, and one more for each of ``kinds``.

    They are one cluster: evidence of one prompt. keep: what must stay as it is besides the references.
    """
    found = [example]
    for kind in kinds:
        changed = perturbed(text, kind, f"{example.task}/{example.example_id}", (*example.answers, *keep))
        if changed == text:
            continue
        prompt = encode(changed)
        target = (
            encode_target(tokenizer, prompt, example.answers[0], spaced=True) if example.target_ids else ()
        )
        found.append(
            replace(
                example,
                input_ids=prompt.input_ids,
                target_ids=target,
                truncated=prompt.truncated,
                example_id=f"{example.example_id}~{kind}",
                cluster=example.cluster or example.example_id,
                perturb=kind,
            )
        )
    return found


def check_changed(examples: Sequence[Example], kinds: Sequence[str], most: int | None = None) -> None:
    """Raise UsageError for a kind that changes none of the prompts, or makes one of more than ``most`` tokens.

    And for a prompt whose own id is the one that another prompt gets by being changed.
    """
    kind_of: dict[tuple[str, str], str | None] = {}
    for example in examples:
        name, kind = example.example_id, example.perturb
        if (other := kind_of.setdefault((example.task, name), kind)) != kind:
            raise UsageError(
                f"{example.task}: the id {name} is a prompt's own, and what task.perturb={kind or other} makes of "
                f"another's; give that prompt an id that does not end in ~{kind or other}"
            )
    for kind in kinds:
        longest = max((len(e.input_ids) for e in examples if e.perturb == kind), default=0)
        if most is not None and longest > most:
            raise UsageError(
                f"task.perturb={kind} makes a prompt of {longest} tokens, more than max_prompt_tokens={most}: what is "
                "mistyped takes more of them; lower task.length, or raise max_prompt_tokens"
            )
        if not any(example.perturb == kind for example in examples):
            raise UsageError(
                f"task.perturb={kind} changes none of the prompts: they hold no words or marks that it could"
            )
