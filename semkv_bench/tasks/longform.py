"""Long answers made of items that can be checked one by one: counting, copying lists and tables, in order."""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, ClassVar

from semkv_bench.checks import whole
from semkv_bench.errors import UsageError
from semkv_bench.tasks.base import Example, Task, check_draw, choose_names, text_hash
from semkv_bench.tasks.encoding import encode_prompt, encode_target
from semkv_bench.tasks.words import WORDS

__all__ = ["SUBTASKS", "Longform", "overlap_in_order"]

DEFAULT_PER_TASK = 20
# Room behind the answer's own length, in which a model that does not stop shows itself: a share, and at least so many.
_SPARE_SHARE, _SPARE_TOKENS = 0.15, 8
# The begun answer holds so many items, so that the model sees how to go on.
_BEGUN = 12


@dataclass(frozen=True)
class _Assignment:
    """What is asked, how the answer is begun, and the rest of it."""

    request: str
    answer_prefix: str
    answer: str


@dataclass(frozen=True)
class _SubTask:
    """``write`` makes an assignment of some items; ``item`` finds the items in an answer."""

    write: Callable[[random.Random, int], _Assignment]
    item: re.Pattern[str]


def _count(rng: random.Random, items: int, steps: Sequence[int]) -> _Assignment:
    """Numbers from a random start: each new one follows from those written before, and from nothing else."""
    step = rng.choice(steps)
    start = rng.randrange(100, 1000) + max(0, -step * (items + _BEGUN))
    # Small models lose their way between numbers that are no multiples of the step.
    start -= start % step
    numbers = [str(start + step * i) for i in range(items + _BEGUN)]
    way = ("up" if step > 0 else "down") + f" from {numbers[0]} to {numbers[-1]}"
    by = "by ones" if abs(step) == 1 else f"in steps of {abs(step)}"
    return _Assignment(
        request=f"Count {way} {by}. Write down every number, separated by commas.",
        answer_prefix=", ".join(numbers[:_BEGUN]) + ",",
        answer=", ".join(numbers[_BEGUN:]) + ".",
    )


def _list(rng: random.Random, items: int) -> _Assignment:
    """A numbered list of random words, to be copied."""
    lines = "\n".join(f"{i}. {word}" for i, word in enumerate(rng.sample(WORDS, items), 1))
    return _Assignment(
        request=f"Here is a list of words.\n\n{lines}\n\nWrite the list once more, in the same order.",
        answer_prefix="Here is the list in the same order.\n\n1.",
        answer=lines.removeprefix("1. "),
    )


_NUMBER, _WORD = re.compile(r"\d+"), re.compile(r"[A-Za-z]+")
SUBTASKS: Mapping[str, _SubTask] = {
    "longform_count": _SubTask(partial(_count, steps=(1,)), _NUMBER),
    "longform_countdown": _SubTask(partial(_count, steps=(-1,)), _NUMBER),
    "longform_steps": _SubTask(partial(_count, steps=(2, 5, 10)), _NUMBER),
    "longform_list": _SubTask(_list, _WORD),
}


@dataclass(frozen=True)
class Longform(Task):
    """Answers of some hundred tokens over prompts that code writes; the same (seed, index) is the same anywhere.

    ``subset``: sub-task names, ``all``, or a list of them; null for all. ``items``: how many numbers, words or
    lines an answer holds. ``chat=false`` leaves the model's chat template out.

    The score is that of ``overlap_in_order`` between the reference's items and those of the prediction.
    """

    subset: str | Sequence[str] | None = None
    items: int = 30
    chat: bool = True

    name: ClassVar[str] = "longform"
    prompt_source: ClassVar[str] = "generated"

    def __post_init__(self) -> None:
        _ = self.names
        whole("task.items", self.items, 2, len(WORDS))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """See Task.names."""
        chosen = "all" if self.subset is None else self.subset
        return choose_names("subset", chosen, tuple(SUBTASKS), {"all": tuple(SUBTASKS)})[0]

    @cached_property
    def chance(self) -> dict[str, float]:
        """Mean score of another example's reference as the prediction."""
        return {name: self._guess(name) for name in self.names}

    def examples(
        self,
        tokenizer: Any,
        seeds: Sequence[int],
        per_task: int | None = None,
        max_prompt_tokens: int | None = None,
        max_new_tokens: int | None = None,
    ) -> list[Example]:
        """See Task.examples; nothing is cut, a ``max_prompt_tokens`` below a prompt raises UsageError.

        ``per_task`` counts examples per sub-task and seed (20 if null).
        """
        check_draw(seeds, per_task, max_prompt_tokens, max_new_tokens)
        return [
            self._example(tokenizer, name, seed, index, max_prompt_tokens, max_new_tokens)
            for name in self.names
            for seed in seeds
            for index in range(per_task or DEFAULT_PER_TASK)
        ]

    def score(self, example: Example, prediction: str) -> float:
        """Items that prediction and reference share in order, against the items of both."""
        item = SUBTASKS[example.task].item
        return overlap_in_order(*(item.findall(text.lower()) for text in (example.answers[0], prediction)))

    def _example(
        self,
        tokenizer: Any,
        name: str,
        seed: int,
        index: int,
        max_prompt_tokens: int | None,
        max_new_tokens: int | None,
    ) -> Example:
        assignment = SUBTASKS[name].write(random.Random(f"{name}/{seed}/{index}"), self.items)
        prompt = encode_prompt(
            tokenizer, assignment.request, chat=self.chat, answer_prefix=assignment.answer_prefix
        )
        if max_prompt_tokens is not None and len(prompt.input_ids) > max_prompt_tokens:
            raise UsageError(
                f"{name} with task.items={self.items} takes prompts of {len(prompt.input_ids)} tokens, above "
                f"max_prompt_tokens={max_prompt_tokens}; lower task.items"
            )
        target = encode_target(tokenizer, prompt, assignment.answer, spaced=True)
        return Example(
            task=name,
            example_id=f"{name}-s{seed}-{index:04d}",
            seed=seed,
            input_ids=prompt.input_ids,
            answers=(assignment.answer,),
            max_new_tokens=max_new_tokens
            or len(target) + max(_SPARE_TOKENS, round(_SPARE_SHARE * len(target))),
            target_ids=target,
            cluster=text_hash(assignment.request),
            question=assignment.request,
        )

    def _guess(self, name: str, draws: int = 40) -> float:
        subtask = SUBTASKS[name]
        answers = [
            subtask.item.findall(subtask.write(random.Random(f"{name}/guess/{i}"), self.items).answer)
            for i in range(draws)
        ]
        return sum(overlap_in_order(a, b) for a, b in pairwise(answers)) / (draws - 1)


def overlap_in_order(reference: Sequence[str], prediction: Sequence[str]) -> float:
    """Twice the longest common subsequence over the items of both, 0 where there are none.

    1 for all items in order and nothing else; an item left out costs itself and not those after it, and what
    is written besides, before, between or after, lowers the score as much as what is missing.
    """
    total = len(reference) + len(prediction)
    row = [0] * (len(prediction) + 1)
    for wanted in reference:
        before, row = row, [0]
        for j, found in enumerate(prediction):
            row.append(before[j] + 1 if wanted == found else max(row[j], before[j + 1]))
    return 2 * row[-1] / total if total else 0.0
