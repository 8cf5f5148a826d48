"""Retrieval prompts made by code, in the manner of RULER (Hsieh et al., 2024), of any length in tokens."""

import random
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

from semkv_bench.checks import whole, wholes
from semkv_bench.errors import UsageError
from semkv_bench.tasks.base import Example, Task, check_draw, choose_names, text_hash
from semkv_bench.tasks.encoding import Encoded, encode_prompt, encode_target
from semkv_bench.tasks.haystack import FILLERS
from semkv_bench.tasks.needles import MAX_KEYS, Length, bury, draw_depths, draw_keys, draw_values, lengths_of
from semkv_bench.tasks.perturb import check_changed, kinds_of, with_variants

__all__ = ["DEFAULT_SUBTASKS", "SUBTASKS", "Synthetic", "share_of_values"]

DEFAULT_PER_TASK = 20


@dataclass(frozen=True)
class _Puzzle:
    """What is hidden and asked: needles in reading order, of which ``asked`` hold the answer."""

    intro: str
    needles: tuple[str, ...]
    asked: tuple[int, ...]
    question: str
    answer_prefix: str
    wanted: tuple[str, ...]


@dataclass(frozen=True)
class _SubTask:
    filler: str
    puzzles: Callable[[random.Random, int], list[_Puzzle]]
    # Room behind the answer's own length, in which a model that does not stop shows itself.
    spare_tokens: int = 8


def _one_of_many_keys(rng: random.Random, questions: int, n_keys: int) -> list[_Puzzle]:
    n_keys = max(n_keys, questions)
    keys, values = draw_keys(rng, n_keys), draw_values(rng, n_keys)
    asked = [rng.randrange(n_keys)] if questions == 1 else rng.sample(range(n_keys), questions)
    plural = "Secret numbers are" if n_keys > 1 else "A secret number is"
    return [
        _Puzzle(
            intro=f"{plural} hidden in the text below. Read it carefully, I will ask about it.",
            needles=tuple(f"The secret number of the {k} is {v}." for k, v in zip(keys, values, strict=True)),
            asked=(one,),
            question=f"What is the secret number of the {keys[one]} in the text above?",
            answer_prefix=f"The secret number of the {keys[one]} is",
            wanted=(values[one],),
        )
        for one in asked
    ]


def _alone(puzzle: Callable[[random.Random], _Puzzle], rng: random.Random, questions: int) -> list[_Puzzle]:
    """A puzzle that asks for all that it hides, so that there is but one question."""
    return [puzzle(rng)]


def _one_key_many_values(rng: random.Random, n_values: int) -> _Puzzle:
    (key,), values = draw_keys(rng, 1), draw_values(rng, n_values)
    return _Puzzle(
        intro="Secret numbers are hidden in the text below. Read it carefully, I will ask about them.",
        needles=tuple(f"One of the secret numbers of the {key} is {value}." for value in values),
        asked=tuple(range(n_values)),
        question=f"What are all the {n_values} secret numbers of the {key} in the text above?",
        answer_prefix=f"The secret numbers of the {key} are",
        wanted=tuple(values),
    )


def _variable_chain(rng: random.Random, hops: int) -> _Puzzle:
    """Two chains of ``hops`` + 1 variables in one text, one of them asked for."""
    letters = "ABCDEFGHJKLMNPQRSTUVWXYZ"
    names: list[str] = []
    while len(names) < 2 * (hops + 1):
        name = "".join(rng.sample(letters, 5))
        if name not in names:
            names.append(name)
    values = [value[:5] for value in draw_values(rng, 2)]
    while values[0] == values[1]:
        values = [value[:5] for value in draw_values(rng, 2)]
    chains = [names[: hops + 1], names[hops + 1 :]]
    order = [0] * (hops + 1) + [1] * (hops + 1)
    rng.shuffle(order)
    needles, asked, seen = [], [], [0, 0]
    for place, chain in enumerate(order):
        i = seen[chain]
        source = values[chain] if i == 0 else f"variable {chains[chain][i - 1]}"
        needles.append(f"Variable {chains[chain][i]} equals {source}.")
        seen[chain] += 1
        if chain == 0:
            asked.append(place)
    return _Puzzle(
        intro="The text below hides variables. Follow how a value passes from one to the next.",
        needles=tuple(needles),
        asked=tuple(asked),
        question=f"Which {hops + 1} variables equal {values[0]}, directly or through another variable?",
        answer_prefix=f"The {hops + 1} variables that equal {values[0]} are variable",
        wanted=tuple(chains[0]),
    )


SUBTASKS: Mapping[str, _SubTask] = {
    "niah_noise": _SubTask("noise", partial(_one_of_many_keys, n_keys=1)),
    "niah_prose": _SubTask("prose", partial(_one_of_many_keys, n_keys=1)),
    "niah_multikey": _SubTask("prose", partial(_one_of_many_keys, n_keys=4)),
    "niah_multivalue": _SubTask("prose", partial(_alone, partial(_one_key_many_values, n_values=3))),
    "variable_tracking": _SubTask(
        "noise", partial(_alone, partial(_variable_chain, hops=2)), spare_tokens=16
    ),
}
DEFAULT_SUBTASKS = ("niah_noise", "niah_prose")
MANY_QUESTIONS = ("niah_noise", "niah_prose", "niah_multikey")


@dataclass(frozen=True)
class Synthetic(Task):
    """Needles in a haystack that code writes; the same (seed, index) is the same example anywhere.

    ``subset``: sub-task names, ``all``, or a list of them; null for the two that a model of 135M parameters
    solves. ``length``: tokens of the whole prompt, filled with whole sentences to just under it; a list:
    ``per_task`` examples of each length. ``chat=false`` leaves the model's chat template out.
    Each seed draws new keys, values, depths and filler, so every example is evidence of its own; ``questions`` asks so
    many needles of each haystack, one an example, which are one cluster and whose prompts begin alike. ``perturb``:
    kinds of ``semkv_bench.tasks.perturb``; each adds every prompt once more, changed so.
    """

    subset: str | Sequence[str] | None = None
    length: int | Sequence[int] = 650
    chat: bool = True
    questions: int = 1
    perturb: str | Sequence[str] | None = None

    name: ClassVar[str] = "synthetic"
    prompt_source: ClassVar[str] = "generated"

    def __post_init__(self) -> None:
        _ = kinds_of(self.perturb)
        _ = self.lengths
        whole("task.questions", self.questions, 1, MAX_KEYS)
        single = [name for name in self.names if name not in MANY_QUESTIONS]
        if self.questions > 1 and single:
            raise UsageError(
                f"task.questions={self.questions}: {single[0]} has one question a haystack; ask several of "
                f"{', '.join(MANY_QUESTIONS)} (subset=...)"
            )

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of prompts, in tokens."""
        return wholes("task.length", self.length, 1)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """See Task.names."""
        if self.subset is None:
            return DEFAULT_SUBTASKS
        return choose_names("subset", self.subset, tuple(SUBTASKS), {"all": tuple(SUBTASKS)})[0]

    @property
    def chance(self) -> dict[str, float]:
        """0 everywhere: a value cannot be guessed."""
        return dict.fromkeys(self.names, 0.0)

    def examples(
        self,
        tokenizer: Any,
        seeds: Sequence[int],
        per_task: int | None = None,
        max_prompt_tokens: int | None = None,
        max_new_tokens: int | None = None,
    ) -> list[Example]:
        """See Task.examples; a ``max_prompt_tokens`` below ``length`` shortens the haystack, nothing is cut.

        ``per_task`` counts examples per sub-task and seed (20 if null), ``questions`` of them a haystack.
        """
        check_draw(seeds, per_task, max_prompt_tokens, max_new_tokens)
        wanted = per_task or DEFAULT_PER_TASK
        haystacks = -(-wanted // self.questions)
        drawn = [
            [
                variants
                for index in range(haystacks)
                for variants in self._of_haystack(tokenizer, name, seed, index, at, max_new_tokens)
            ]
            for name in self.names
            for at in lengths_of(self.lengths, max_prompt_tokens)
            for seed in seeds
        ]
        made = [example for of_seed in drawn for variants in of_seed[:wanted] for example in variants]
        check_changed(made, kinds_of(self.perturb), max_prompt_tokens)
        return made

    def _of_haystack(
        self, tokenizer: Any, name: str, seed: int, index: int, at: Length, max_new_tokens: int | None
    ) -> list[list[Example]]:
        """The examples of one haystack, each with its variants; it leaves room for the longest of its questions."""
        subtask = SUBTASKS[name]
        puzzles = subtask.puzzles(random.Random(f"{name}{at.mark}/{seed}/{index}"), self.questions)
        depths = draw_depths(f"{name}{at.mark}", seed, index, len(puzzles[0].needles))
        filler = FILLERS[subtask.filler](random.Random(f"{name}{at.mark}/{seed}/{index}/filler"))

        def words(text: str, puzzle: _Puzzle) -> str:
            return f"{puzzle.intro}\n\n{text}\n\n{puzzle.question}"

        def encode(asked: str, puzzle: _Puzzle) -> Encoded:
            return encode_prompt(tokenizer, asked, chat=self.chat, answer_prefix=puzzle.answer_prefix)

        def longest(text: str) -> Encoded:
            return max((encode(words(text, one), one) for one in puzzles), key=lambda e: len(e.input_ids))

        _, haystack = bury(name, puzzles[0].needles, depths, filler, longest, at.limit)
        examples = []
        for number, puzzle in enumerate(puzzles):
            asked, answer = words(haystack, puzzle), ", ".join(puzzle.wanted)
            prompt = encode(asked, puzzle)
            target = encode_target(tokenizer, prompt, answer, spaced=True)
            example = Example(
                task=name,
                example_id=f"{name}{at.mark}-s{seed}-{index:04d}"
                + (f"-q{number}" if self.questions > 1 else ""),
                seed=seed,
                input_ids=prompt.input_ids,
                answers=(answer,),
                max_new_tokens=max_new_tokens or len(target) + subtask.spare_tokens,
                target_ids=target,
                depths=tuple(depths[i] for i in puzzle.asked),
                cluster=text_hash(haystack),
                question=puzzle.question,
                length=at.limit if at.mark else None,
            )
            again, kinds = partial(encode, puzzle=puzzle), kinds_of(self.perturb)
            examples.append(with_variants(tokenizer, example, asked, kinds, again, puzzle.wanted))
        return examples

    def score(self, example: Example, prediction: str) -> float:
        """Share of the reference's values that stand in the prediction as whole runs of digits or letters."""
        return share_of_values(example.answers[0], prediction)


def share_of_values(reference: str, prediction: str) -> float:
    """Share of the runs of digits or letters in ``reference`` that are whole runs of ``prediction`` too."""
    wanted = set(_runs(reference))
    return len(wanted & set(_runs(prediction))) / len(wanted)


# A number in groups, set apart as some country does it: 7,738,705 or 77,38,705 or 7 738 705.
_GROUPED = re.compile(r"(?<![0-9])[0-9]{1,3}(?:([,.'\u2019_ ])[0-9]{2,3})(?:\1[0-9]{2,3})*(?![0-9])")


def _runs(text: str) -> list[str]:
    """Runs of digits or letters, whatever their width or script; a number in groups is one run too."""
    text = "".join(
        str(unicodedata.decimal(each)) if each.isdecimal() else each
        for each in unicodedata.normalize("NFKC", text)
    )
    grouped = (re.sub("[^0-9]", "", each.group()) for each in _GROUPED.finditer(text))
    return [*re.findall(r"[0-9]+|[A-Za-z]+", text), *grouped]
