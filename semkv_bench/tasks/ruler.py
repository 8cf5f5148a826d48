"""RULER's thirteen tasks (Hsieh et al., 2024) by their names and parameters, in words of our own, of any length.

Retrieval (``niah_*``), tracing (``vt``), aggregation (``cwe``, ``fwe``) and questions over documents (``qa_1`` on
SQuAD, ``qa_2`` on HotpotQA). RULER's haystacks of essays are generated prose here, so that nothing has to be fetched;
scores are comparable within a run, not with published tables.
"""

import itertools
import random
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from semkv_bench.checks import wholes
from semkv_bench.tasks.base import Example, Task, check_draw, choose_names, text_hash
from semkv_bench.tasks.encoding import Encoded, encode_prompt, encode_target
from semkv_bench.tasks.haystack import FILLERS, insert_at
from semkv_bench.tasks.needles import Length, draw_depths, filled, lengths_of
from semkv_bench.tasks.perturb import check_changed, kinds_of, with_variants
from semkv_bench.tasks.ruler_questions import HOTPOTQA, SQUAD, Question, open_questions
from semkv_bench.tasks.words import WORDS

__all__ = ["GENERATED", "QUESTIONS", "RULER_TASKS", "Ruler"]

DEFAULT_PER_TASK = 20


@dataclass(frozen=True)
class _Needles:
    """A retrieval task: what the haystack is of, what keys and values are, how many of each, and how many are asked."""

    haystack: str = "prose"
    key: str = "words"
    value: str = "number"
    keys: int = 1
    values: int = 1
    asked: int = 1
    limit: int = 128


_NIAH: Mapping[str, _Needles] = {
    "niah_single_1": _Needles(haystack="noise"),
    "niah_single_2": _Needles(),
    "niah_single_3": _Needles(value="uuid"),
    "niah_multikey_1": _Needles(keys=4),
    "niah_multikey_2": _Needles(haystack="needles"),
    "niah_multikey_3": _Needles(haystack="needles", key="uuid", value="uuid"),
    "niah_multivalue": _Needles(values=4),
    "niah_multiquery": _Needles(keys=4, asked=4),
}
QUESTIONS: Mapping[str, str] = {"qa_1": SQUAD, "qa_2": HOTPOTQA}
GENERATED = (*_NIAH, "vt", "cwe", "fwe")
RULER_TASKS = (*GENERATED, *QUESTIONS)
_LIMITS = {**{name: task.limit for name, task in _NIAH.items()}, "vt": 30, "cwe": 120, "fwe": 50}
_LIMITS |= dict.fromkeys(QUESTIONS, 32)

# RULER's: a chain of five variables; ten common words thirty times among words three times; frequencies as 1 / rank^2.
_HOPS = 4
_COMMON, _COMMON_TIMES, _OTHER_TIMES = 10, 30, 3
_ALPHA, _MOST_FREQUENT = 2.0, 3


@dataclass(frozen=True)
class _Made:
    """A prompt but for its length: ``text(n)`` with ``n`` pieces of filler, the question and what answers it.

    document: what questions may share; empty: the text. most: pieces of filler that there are.
    """

    text: Callable[[int], str]
    question: str
    answer_prefix: str
    wanted: tuple[str, ...]
    depths: tuple[float, ...] = ()
    document: str = ""
    most: int | None = None


@dataclass(frozen=True)
class Ruler(Task):
    """RULER's tasks; the same (seed, index) is the same example anywhere.

    subset: task names, ``generated`` (the eleven that need no data), ``all``, or a list of them; null: ``generated``.
    length: tokens of the whole prompt, filled to just under it; a list: ``per_task`` examples of each. squad,
    hotpotqa: files of ``qa_1`` and ``qa_2`` (``dev-v2.0.json``, ``hotpot_dev_distractor_v1.json``); null takes them
    from the hub. chat: ask in the model's chat template. perturb: kinds of ``semkv_bench.tasks.perturb``; each adds
    every prompt once more, changed so.
    """

    subset: str | Sequence[str] | None = None
    length: int | Sequence[int] = 4096
    squad: str | None = None
    hotpotqa: str | None = None
    chat: bool = True
    perturb: str | Sequence[str] | None = None

    name: ClassVar[str] = "ruler"
    prompt_source: ClassVar[str] = "generated"

    def __post_init__(self) -> None:
        _ = kinds_of(self.perturb)
        _ = self.names
        _ = self.lengths

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of prompts, in tokens."""
        return wholes("task.length", self.length, 1)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The chosen tasks."""
        groups = {"all": RULER_TASKS, "generated": GENERATED}
        return choose_names(
            "subset", "generated" if self.subset is None else self.subset, RULER_TASKS, groups
        )[0]

    @property
    def chance(self) -> dict[str, float]:
        """0 everywhere: nothing can be guessed."""
        return dict.fromkeys(self.names, 0.0)

    def examples(
        self,
        tokenizer: Any,
        seeds: Sequence[int],
        per_task: int | None = None,
        max_prompt_tokens: int | None = None,
        max_new_tokens: int | None = None,
    ) -> list[Example]:
        """See Task.examples; ``per_task`` counts examples per task and seed (20 if null).

        Raises:
            UsageError: a length at which a task has no room.
            MissingError: the questions of ``qa_1`` or ``qa_2`` cannot be had.
        """
        check_draw(seeds, per_task, max_prompt_tokens, max_new_tokens)
        paths = {"qa_1": self.squad, "qa_2": self.hotpotqa}
        pools = {
            name: open_questions(
                QUESTIONS[name], None if paths[name] is None else Path(paths[name]).expanduser()
            )
            for name in self.names
            if name in QUESTIONS
        }
        made = [
            example
            for name in self.names
            for at in lengths_of(self.lengths, max_prompt_tokens)
            for seed in seeds
            for index in range(per_task or DEFAULT_PER_TASK)
            for example in self._examples(
                tokenizer, name, seed, index, at, max_new_tokens, pools.get(name, ())
            )
        ]
        check_changed(made, kinds_of(self.perturb), max_prompt_tokens)
        return made

    def _examples(
        self,
        tokenizer: Any,
        name: str,
        seed: int,
        index: int,
        at: Length,
        max_new_tokens: int | None,
        pool: Sequence[Question],
    ) -> list[Example]:
        rng = random.Random(f"ruler/{name}{at.mark}/{seed}/{index}")
        depths = draw_depths(f"ruler/{name}{at.mark}", seed, index, _count(name))
        made = _questions(rng, pool, depths) if name in QUESTIONS else _make(name, rng, depths)

        def whole(text: str) -> str:
            return f"{text}\n\n{made.question}"

        def encode(text: str) -> Encoded:
            return encode_prompt(tokenizer, text, chat=self.chat, answer_prefix=made.answer_prefix)

        prompt, text = filled(name, made.text, lambda text: encode(whole(text)), at.limit, made.most)
        answers = made.wanted if name in QUESTIONS else (", ".join(made.wanted),)
        example = Example(
            task=name,
            example_id=f"{name}{at.mark}-s{seed}-{index:04d}",
            seed=seed,
            input_ids=prompt.input_ids,
            answers=answers,
            max_new_tokens=max_new_tokens or _LIMITS[name],
            target_ids=encode_target(tokenizer, prompt, answers[0], spaced=True),
            depths=made.depths,
            cluster=text_hash(made.document or text),
            question=made.question,
            length=at.limit if at.mark else None,
        )
        return with_variants(tokenizer, example, whole(text), kinds_of(self.perturb), encode, made.wanted)

    def score(self, example: Example, prediction: str) -> float:
        """RULER's: of questions, whether any reference stands in the prediction; else the share of them that does."""
        said = prediction.casefold()
        if example.task in QUESTIONS:
            return float(any(answer.casefold() in said for answer in example.answers))
        wanted = example.answers[0].casefold().split(", ")
        return sum(each in said for each in wanted) / len(wanted)


def _count(name: str) -> int:
    """Places that a prompt's needles take."""
    if name in _NIAH:
        return _NIAH[name].keys * _NIAH[name].values
    return _HOPS + 1 if name == "vt" else 1


def _make(name: str, rng: random.Random, depths: Sequence[float]) -> _Made:
    if name in _NIAH:
        return _retrieval(_NIAH[name], rng, depths)
    return {"vt": _tracing, "cwe": _common_words, "fwe": _frequent_words}[name](rng, depths)


def _retrieval(task: _Needles, rng: random.Random, depths: Sequence[float]) -> _Made:
    draw_key, draw_value = _distinct(rng, task.key), _distinct(rng, task.value)
    keys = [draw_key() for _ in range(task.keys)]
    values = [[draw_value() for _ in range(task.values)] for _ in keys]
    pairs = [(key, value) for key, each in zip(keys, values, strict=True) for value in each]
    rng.shuffle(pairs)
    kind = "code" if task.value == "uuid" else "number"
    needles = [_needle(kind, key, value) for key, value in pairs]
    asked = sorted(rng.sample(range(len(keys)), task.asked))
    if task.haystack == "needles":
        sentence: Callable[[], str] = lambda: _needle(kind, draw_key(), draw_value())  # noqa: E731
    else:
        sentence = FILLERS[task.haystack](rng)
    wanted = tuple(value for i in asked for value in values[i])
    named = _listed([keys[i] for i in asked])
    many = len(wanted) > 1
    return _Made(
        text=_around(
            f"Special {kind}s are hidden in the text below. Memorize them, I will ask about them afterwards.",
            needles,
            depths,
            sentence,
        ),
        question=f"What {f'are all the special {kind}s' if many else f'is the special {kind}'} of {named} in the text "
        "above?",
        answer_prefix=f"The special {f'{kind}s' if many else kind} of {named} in the text "
        f"{'are' if many else 'is'}",
        wanted=wanted,
        depths=tuple(
            depth for depth, (key, _) in zip(depths, pairs, strict=True) if key in [keys[i] for i in asked]
        ),
    )


def _needle(kind: str, key: str, value: str) -> str:
    return f"One of the special {kind}s of {key} is {value}."


def _tracing(rng: random.Random, depths: Sequence[float]) -> _Made:
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    names: list[str] = []
    while len(names) < _HOPS + 1:
        name = "".join(rng.choices(letters, k=5))
        if name not in names:
            names.append(name)
    value = str(rng.randrange(10_000, 100_000))
    sources = [value, *(f"VAR {name}" for name in names[:-1])]
    needles = [f"VAR {name} = {source}." for name, source in zip(names, sources, strict=True)]
    return _Made(
        text=_around(
            "The text below assigns variables. Follow how the value passes from one to the next.",
            needles,
            depths,
            FILLERS["noise"](rng),
        ),
        question=f"Which {_HOPS + 1} variables hold the value {value}, directly or through others, in the text above?",
        answer_prefix=f"The {_HOPS + 1} variables that hold the value {value} are:",
        wanted=tuple(names),
        depths=tuple(depths),
    )


def _common_words(rng: random.Random, depths: Sequence[float]) -> _Made:
    drawn = _distinct(rng, "word")
    common = [drawn() for _ in range(_COMMON)]
    order = rng.random()

    def text(n: int) -> str:
        others = rarely[:n] if len(rarely) >= n else _extended(rarely, drawn, n)
        listed = [*common * _COMMON_TIMES, *others * _OTHER_TIMES]
        random.Random(order).shuffle(listed)
        return f"{intro}\n\n{' '.join(f'{i}. {word}' for i, word in enumerate(listed, start=1))}"

    rarely: list[str] = []
    intro = (
        "Below is a numbered list of words. Some of them appear more often than the others. Memorize those."
    )
    return _Made(
        text=text,
        question=f"What are the {_COMMON} most common words in the list above?",
        answer_prefix=f"The {_COMMON} most common words are:",
        wanted=tuple(common),
    )


def _frequent_words(rng: random.Random, depths: Sequence[float]) -> _Made:
    letters = "abcdefghijklmnopqrstuvwxyz"
    coded: list[str] = []
    while len(coded) < 2000:
        word = "".join(rng.choices(letters, k=6))
        if word not in coded:
            coded.append(word)
    order = rng.random()
    shares = [rank**-_ALPHA for rank in range(1, len(coded) + 1)]
    total = sum(shares)

    def text(n: int) -> str:
        # The most frequent one is noise, as in RULER; ranks 2 to 4 are asked for and never tie.
        times = [max(1, round(share / total * 20 * (n + 4))) for share in shares]
        listed = [word for word, count in zip(coded, times, strict=True) if count > 1 for _ in range(count)]
        random.Random(order).shuffle(listed)
        return f"{intro}\n\n{' '.join('...' if word == coded[0] else word for word in listed)}"

    intro = (
        "Read the coded text below and keep track of how often each coded word appears; the dots are no word."
    )
    return _Made(
        text=text,
        question=f"What are the {_MOST_FREQUENT} most frequent coded words in the text above?",
        answer_prefix=f"The {_MOST_FREQUENT} most frequent coded words are:",
        wanted=tuple(coded[1 : _MOST_FREQUENT + 1]),
    )


def _questions(rng: random.Random, pool: Sequence[Question], depths: Sequence[float]) -> _Made:
    asked = rng.choice(pool)
    own = set(asked.documents)
    others = [
        document
        for document in dict.fromkeys(itertools.chain(*(q.documents for q in pool)))
        if document not in own
    ]
    rng.shuffle(others)
    order = rng.random()

    def text(n: int) -> str:
        held = [*asked.documents, *others[:n]]
        random.Random(order).shuffle(held)
        told = "\n\n".join(f"Document {i}:\n{document}" for i, document in enumerate(held, start=1))
        return f"Answer the question from the documents below, with the answer alone.\n\n{told}"

    return _Made(
        text=text,
        question=f"Question: {asked.question}",
        answer_prefix="Answer:",
        wanted=asked.answers,
        document="\n".join(asked.documents),
        most=len(others),
    )


def _around(intro: str, needles: Sequence[str], depths: Sequence[float], sentence: Callable[[], str]):
    """Text with ``needles`` at their ``depths`` among so many sentences."""
    filler: list[str] = []

    def text(n: int) -> str:
        filler.extend(sentence() for _ in range(n - len(filler)))
        return f"{intro}\n\n{' '.join(insert_at(filler[:n], needles, depths))}"

    return text


def _extended(held: list[str], drawn: Callable[[], str], n: int) -> list[str]:
    held.extend(drawn() for _ in range(n - len(held)))
    return held[:n]


def _distinct(rng: random.Random, kind: str) -> Callable[[], str]:
    """Draws that never come twice: two nouns, a noun or two, a number of seven digits, or a UUID."""
    seen: set[str] = set()
    makers: dict[str, Callable[[], str]] = {
        "words": lambda: "-".join(rng.sample(WORDS, 2)),
        "word": lambda: rng.choice(WORDS) if len(seen) < len(WORDS) // 2 else "".join(rng.sample(WORDS, 2)),
        "number": lambda: str(rng.randrange(10**6, 10**7)),
        "uuid": lambda: str(uuid.UUID(int=rng.getrandbits(128), version=4)),
    }

    def draw() -> str:
        while (value := makers[kind]()) in seen:
            continue
        seen.add(value)
        return value

    return draw


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
