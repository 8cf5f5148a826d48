"""Conversations made by code: needles of one haystack asked for turn by turn, and questions back to answers."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar

from semkv_bench.checks import whole
from semkv_bench.errors import UsageError
from semkv_bench.tasks.base import Example, FollowUp, Task, check_draw, choose_names, text_hash
from semkv_bench.tasks.encoding import Encoded, encode_follow_up, encode_prompt, encode_target
from semkv_bench.tasks.haystack import FILLERS
from semkv_bench.tasks.needles import MAX_KEYS, bury, draw_depths, draw_keys, draw_values
from semkv_bench.tasks.synthetic import DEFAULT_PER_TASK, share_of_values

__all__ = ["SUBTASKS", "SyntheticMultiturn"]

SUBTASKS: Mapping[str, str] = {"multiturn_noise": "noise", "multiturn_prose": "prose"}
# Room behind the answer's own length, in which a model that does not stop shows itself.
_SPARE_TOKENS = 8
_INTRO = "Secret numbers are hidden in the text below. Read it carefully, I will ask about them."

_ROUND = ("read", "name", "read", "name", "recall", "recall")
_NAMES = (
    "Oscar", "Emma", "Victor", "Alice", "Hugo", "Nora", "Felix", "Clara", "Martin", "Julia", "Simon", "Laura",
    "Peter", "Helen", "Walter", "Irene",
)  # fmt: skip


@dataclass(frozen=True)
class _Turn:
    """A question, its begun answer and the value that completes it.

    ``needle`` is the place of the value's needle in reading order, None for a question back to an answer.
    """

    question: str
    answer_prefix: str
    value: str
    needle: int | None


@dataclass(frozen=True)
class SyntheticMultiturn(Task):
    """Conversations over needles in a haystack that code writes; the same (seed, index) is the same anywhere.

    Six turns make a round: twice a number in the text is asked for and then, in a turn of its own, given a
    name; the last two turns ask for numbers by their names, those of earlier rounds among them. The text
    does not hold the names, so the answers to the second, fourth, fifth and sixth question have to come out
    of the cache of earlier turns.

    ``turns``: questions of a conversation. ``subset``: sub-task names, ``all``, or a list; null for
    both. ``length``: tokens of the first turn's prompt, filled with whole sentences to just under it.
    ``chat=false`` leaves the model's chat template out.
    """

    subset: str | Sequence[str] | None = None
    length: int = 550
    turns: int = 6
    chat: bool = True

    name: ClassVar[str] = "synthetic_multiturn"
    prompt_source: ClassVar[str] = "generated"

    def __post_init__(self) -> None:
        _ = self.names
        whole("task.length", self.length, 1)
        whole("task.turns", self.turns, 1)
        if _needles(self.turns) > MAX_KEYS:
            most = max(n for n in range(1, 6 * MAX_KEYS) if _needles(n) <= MAX_KEYS)
            raise UsageError(f"task.turns={self.turns} asks for more needles than there are; at most {most}")

    @cached_property
    def names(self) -> tuple[str, ...]:
        """See Task.names."""
        chosen = "all" if self.subset is None else self.subset
        return choose_names("subset", chosen, tuple(SUBTASKS), {"all": tuple(SUBTASKS)})[0]

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
        """See Task.examples; both limits hold for every turn: the first prompt, and each answer.

        A ``max_prompt_tokens`` below ``length`` shortens the haystack, nothing is cut. ``per_task`` counts
        conversations per sub-task and seed (20 if null).
        """
        check_draw(seeds, per_task, max_prompt_tokens, max_new_tokens)
        limit = self.length if max_prompt_tokens is None else min(self.length, max_prompt_tokens)
        return [
            self._example(tokenizer, name, seed, index, limit, max_new_tokens)
            for name in self.names
            for seed in seeds
            for index in range(per_task or DEFAULT_PER_TASK)
        ]

    def score(self, example: Example, prediction: str) -> float:
        """1 where the turn's value stands in the prediction as a whole run of digits, else 0."""
        return share_of_values(example.answers[0], prediction)

    def _example(
        self, tokenizer: Any, name: str, seed: int, index: int, limit: int, max_new_tokens: int | None
    ) -> Example:
        rng = random.Random(f"{name}/{seed}/{index}")
        needles, turns = _script(rng, self.turns)
        depths = draw_depths(name, seed, index, len(needles))
        filler = FILLERS[SUBTASKS[name]](random.Random(f"{name}/{seed}/{index}/filler"))

        def encode(text: str) -> Encoded:
            whole = f"{_INTRO}\n\n{text}\n\n{turns[0].question}"
            return encode_prompt(tokenizer, whole, chat=self.chat, answer_prefix=turns[0].answer_prefix)

        said, haystack = bury(name, needles, depths, filler, encode, limit)
        first, follow_ups = said, []
        for before, turn in pairwise(turns):
            said, ids = encode_follow_up(
                tokenizer,
                said,
                f"{before.value}.",
                turn.question,
                spaced=True,
                chat=self.chat,
                answer_prefix=turn.answer_prefix,
            )
            wanted = _wanted(tokenizer, said, turn, depths, max_new_tokens)
            follow_ups.append(FollowUp(input_ids=ids, **wanted))
        return Example(
            task=name,
            example_id=f"{name}-s{seed}-{index:04d}",
            seed=seed,
            input_ids=first.input_ids,
            follow_ups=tuple(follow_ups),
            cluster=text_hash(haystack),
            **_wanted(tokenizer, first, turns[0], depths, max_new_tokens),
        )


def _needles(turns: int) -> int:
    """Turns that ask for a number in the text."""
    return sum(_ROUND[turn % len(_ROUND)] == "read" for turn in range(turns))


def _script(rng: random.Random, turns: int) -> tuple[list[str], list[_Turn]]:
    """The needles in reading order, and the questions."""
    n = _needles(turns)
    keys, values, names = draw_keys(rng, n), draw_values(rng, n), rng.sample(_NAMES, n)
    unread, named = rng.sample(range(n), n), []
    script: list[_Turn] = []
    i = -1
    for turn in range(turns):
        match _ROUND[turn % len(_ROUND)]:
            case "read":
                i = unread.pop()
                question = f"What is the secret number of the {keys[i]} in the text above?"
                script.append(_Turn(question, f"The secret number of the {keys[i]} is", values[i], needle=i))
                continue
            case "name":
                named.append(i)
                introduction = f"That is {names[i]}'s number. "
            case "recall":
                # Not the number that was told last, which a model that repeats itself would get right.
                i = rng.choice([j for j in named if j != i])
                introduction = ""
        question = f"{introduction}What is {names[i]}'s number?"
        script.append(_Turn(question, f"{names[i]}'s number is", values[i], needle=None))
    needles = [f"The secret number of the {k} is {v}." for k, v in zip(keys, values, strict=True)]
    return needles, script


def _wanted(
    tokenizer: Any, prompt: Encoded, turn: _Turn, depths: Sequence[float], max_new_tokens: int | None
) -> dict[str, Any]:
    """What a turn wants after ``prompt``: the reference, also as tokens, its limit and its needle's depth."""
    answer = f"{turn.value}."
    target = encode_target(tokenizer, prompt, answer, spaced=True)
    return {
        "answers": (answer,),
        "target_ids": target,
        "max_new_tokens": max_new_tokens or len(target) + _SPARE_TOKENS,
        "depths": () if turn.needle is None else (depths[turn.needle],),
        "question": turn.question,
    }
