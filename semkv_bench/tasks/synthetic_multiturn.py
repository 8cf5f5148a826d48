"""Conversations made by code: needles of one haystack asked for turn by turn, and questions back to answers."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar

from semkv_bench.errors import UsageError
from semkv_bench.tasks.base import Example, FollowUp, Task, check_draw, check_whole, choose_names
from semkv_bench.tasks.encoding import Encoded, encode_follow_up, encode_prompt, encode_target
from semkv_bench.tasks.haystack import FILLERS
from semkv_bench.tasks.needles import MAX_KEYS, bury, draw_depths, draw_keys, draw_values
from semkv_bench.tasks.synthetic import DEFAULT_PER_TASK, share_of_values

__all__ = ["SUBTASKS", "SyntheticMultiturn"]

SUBTASKS: Mapping[str, str] = {"multiturn_noise": "noise", "multiturn_prose": "prose"}
# Room behind the answer's own length, in which a model that does not stop shows itself.
_SPARE_TOKENS = 8
_INTRO = "Secret numbers are hidden in the text below. Read it carefully, I will ask about them."


@dataclass(frozen=True)
class _Turn:
    """A question and its begun answer; ``needle`` says which needle has the answer.

    ``back``: the question is for an earlier answer, not for a place in the text.
    """

    question: str
    answer_prefix: str
    needle: int
    back: bool = False


@dataclass(frozen=True)
class SyntheticMultiturn(Task):
    """Conversations over needles in a haystack that code writes; the same (seed, index) is the same anywhere.

    ``turns``: questions of a conversation. The first two, and every other one from there on, ask for a needle
    that was not asked for before; the third, fifth, ... ask which number was told first, so that their answer
    has to come out of the cache of earlier answers. ``subset``: sub-task names, ``all``, or a list; null for
    both. ``length``: tokens of the first turn's prompt, filled with whole sentences to just under it.
    ``chat=false`` leaves the model's chat template out.
    """

    subset: str | Sequence[str] | None = None
    length: int = 550
    turns: int = 4
    chat: bool = True

    name: ClassVar[str] = "synthetic_multiturn"
    prompt_source: ClassVar[str] = "generated"

    def __post_init__(self) -> None:
        _ = self.names
        check_whole("task.length", self.length, 1)
        check_whole("task.turns", self.turns, 1)
        if _needles(self.turns) > MAX_KEYS:
            most = max(n for n in range(1, 4 * MAX_KEYS) if _needles(n) <= MAX_KEYS)
            raise UsageError(f"task.turns={self.turns} asks for more needles than there are; at most {most}")

    @cached_property
    def names(self) -> tuple[str, ...]:
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
        n = _needles(self.turns)
        keys, values = draw_keys(rng, n), draw_values(rng, n)
        needles = [f"The secret number of the {k} is {v}." for k, v in zip(keys, values, strict=True)]
        turns = _script(keys, rng.sample(range(n), n), self.turns)
        depths = draw_depths(name, seed, index, n)
        filler = FILLERS[SUBTASKS[name]](random.Random(f"{name}/{seed}/{index}/filler"))

        def encode(text: str) -> Encoded:
            whole = f"{_INTRO}\n\n{text}\n\n{turns[0].question}"
            return encode_prompt(tokenizer, whole, chat=self.chat, answer_prefix=turns[0].answer_prefix)

        said = bury(name, needles, depths, filler, encode, limit)
        first, follow_ups = said, []
        for before, turn in pairwise(turns):
            said, ids = encode_follow_up(
                tokenizer,
                said,
                f"{values[before.needle]}.",
                turn.question,
                spaced=True,
                chat=self.chat,
                answer_prefix=turn.answer_prefix,
            )
            limits = _asked(tokenizer, said, values[turn.needle], max_new_tokens)
            follow_ups.append(
                FollowUp(input_ids=ids, depths=() if turn.back else (depths[turn.needle],), **limits)
            )
        return Example(
            task=name,
            example_id=f"{name}-s{seed}-{index:04d}",
            seed=seed,
            input_ids=first.input_ids,
            depths=(depths[turns[0].needle],),
            follow_ups=tuple(follow_ups),
            **_asked(tokenizer, first, values[turns[0].needle], max_new_tokens),
        )


def _needles(turns: int) -> int:
    """Turns that ask for a needle: 1, 2, 4, 6, ... in counting from 1."""
    return sum(_reads(turn) for turn in range(turns))


def _reads(turn: int) -> bool:
    """Does the turn, counted from 0, ask for a needle and not back to an answer?"""
    return turn < 2 or turn % 2 == 1


def _script(keys: Sequence[str], order: Sequence[int], turns: int) -> list[_Turn]:
    """The questions; ``order`` says which needle is asked for when."""
    asked = iter(order)
    out = []
    for turn in range(turns):
        if _reads(turn):
            needle = next(asked)
            out.append(
                _Turn(
                    f"What is the secret number of the {keys[needle]} in the text above?",
                    f"The secret number of the {keys[needle]} is",
                    needle,
                )
            )
        else:
            out.append(
                _Turn(
                    "Repeat the first secret number that you told me.",
                    "The first secret number that I told you is",
                    order[0],
                    back=True,
                )
            )
    return out


def _asked(tokenizer: Any, prompt: Encoded, value: str, max_new_tokens: int | None) -> dict[str, Any]:
    """What a turn wants after ``prompt``: the reference, also as tokens, and the limit."""
    target = encode_target(tokenizer, prompt, f"{value}.", spaced=True)
    return {
        "answers": (f"{value}.",),
        "target_ids": target,
        "max_new_tokens": max_new_tokens or len(target) + _SPARE_TOKENS,
    }
