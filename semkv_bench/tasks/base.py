"""What a task hands to the engine: encoded examples, and a score for each prediction."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from semkv_bench.checks import choice, is_whole, whole
from semkv_bench.errors import UsageError

__all__ = [
    "Answer",
    "Example",
    "FollowUp",
    "Task",
    "check_draw",
    "choose_names",
    "text_hash",
]


@dataclass(frozen=True)
class FollowUp:
    """A later turn of a conversation.

    ``input_ids`` are the tokens fed after the previous answer: what closes that answer, the question, what
    opens this turn's answer, begun answer included. The other fields are as in ``Example``.
    """

    input_ids: tuple[int, ...]
    answers: tuple[str, ...]
    max_new_tokens: int
    target_ids: tuple[int, ...]
    stop_token_ids: tuple[int, ...] = ()
    min_new_tokens: int = 0
    all_classes: tuple[str, ...] | None = None
    depths: tuple[float, ...] = ()
    question: str = ""


@dataclass(frozen=True)
class Example:
    """One prompt with its references, ready for the model; with ``follow_ups``, a conversation.

    ``input_ids`` is the whole prompt as it is fed, chat template and begun answer included, with exactly
    one BOS where the tokenizer uses one. ``target_ids`` is ``answers[0]`` as the tokens that would follow
    ``input_ids``, for teacher forcing. ``stop_token_ids`` end a generation besides the model's own EOS;
    they and EOS are suppressed before ``min_new_tokens`` new tokens. ``depths`` are the places of the
    needles asked for, 0 at the start of the haystack and 1 at its end. ``cluster`` is equal for the examples
    of a task that share a document, whose scores are no evidence apart; empty: the example stands alone.
    ``question`` is what is asked, in words, for people who look at an example. ``context_tokens``: tokens before it,
    where a setting scores them alone.
    ``length``: the tokens that were asked for, where the task has several lengths. ``perturb``: how the prompt was
    changed, None where it stands as it was written. ``forced``: all of ``target_ids`` is
    forced on the model and scored by what it thinks of it; nothing that it says itself counts.
    """

    task: str
    example_id: str
    seed: int
    input_ids: tuple[int, ...]
    answers: tuple[str, ...]
    max_new_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    min_new_tokens: int = 0
    truncated: bool = False
    all_classes: tuple[str, ...] | None = None
    turn: int = 0
    target_ids: tuple[int, ...] = ()
    depths: tuple[float, ...] = ()
    follow_ups: tuple[FollowUp, ...] = ()
    cluster: str = ""
    question: str = ""
    context_tokens: int | None = None
    forced: bool = False
    length: int | None = None
    perturb: str | None = None

    @property
    def unit(self) -> tuple[str, str, int]:
        """What is recorded together: task, id and seed."""
        return (self.task, self.example_id, self.seed)

    @property
    def turns(self) -> int:
        """Answers that are asked for."""
        return 1 + len(self.follow_ups)

    def at(self, turn: int) -> "Example":
        """The example as ``score`` sees it in ``turn``: with that turn's references and limits."""
        if turn == 0:
            return self
        later = self.follow_ups[turn - 1]
        return replace(
            self,
            turn=turn,
            answers=later.answers,
            max_new_tokens=later.max_new_tokens,
            target_ids=later.target_ids,
            stop_token_ids=later.stop_token_ids,
            min_new_tokens=later.min_new_tokens,
            all_classes=later.all_classes,
            depths=later.depths,
            question=later.question,
        )


class Answer(Protocol):
    """What a score may hang on: the answer's text, and how often it ranks first what ``full`` ranks first."""

    text: str
    top1_agreement: float | None


def text_hash(text: str) -> str:
    """Short SHA-256 of ``text``: names a document without holding it."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


class Task(ABC):
    """A family of sub-tasks that make examples and score predictions."""

    name: ClassVar[str]

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The sub-tasks, each of which is ``task`` in the records."""

    @property
    @abstractmethod
    def prompt_source(self) -> str:
        """Where the prompts' wording comes from, ``prompts`` in the records."""

    @property
    @abstractmethod
    def chance(self) -> Mapping[str, float]:
        """Per sub-task, the score (0 to 1) of an answer given without the prompt."""

    @abstractmethod
    def examples(
        self,
        tokenizer: Any,
        seeds: Sequence[int],
        per_task: int | None = None,
        max_prompt_tokens: int | None = None,
        max_new_tokens: int | None = None,
    ) -> list[Example]:
        """Examples of every sub-task for every seed, ``per_task`` of each, encoded with ``tokenizer``.

        ``max_prompt_tokens`` caps the whole prompt; ``max_new_tokens`` replaces the task's own limit.
        The same arguments give the same examples, and a larger ``per_task`` keeps those of a smaller one.
        """

    @abstractmethod
    def score(self, example: Example, prediction: str) -> float:
        """Score of the generated text, 0 to 1."""

    def score_answer(self, example: Example, answer: Answer) -> float:
        """Score of an answer, 0 to 1: that of its text, unless the task is about something else."""
        return self.score(example, answer.text)


def choose_names(
    key: str, value: Any, names: Sequence[str], groups: Mapping[str, Sequence[str]]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Resolve a name, a group or a list that mixes them.

    Returns all the chosen names and, of these, the ones given by name, both in the order of ``names``.
    Raises UsageError with the choices for an unknown, empty or mistyped value.
    """
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, Iterable) or isinstance(given, Mapping):
        raise UsageError(f"{key}={value} is not a name or a list of names")
    given = list(given)
    if not given:
        raise UsageError(f"{key} is empty; choose from {', '.join([*groups, *names])}")
    for entry in given:
        choice(key, entry, [*groups, *names])
    chosen = {name for entry in given for name in groups.get(entry, (entry,))}
    by_name = {entry for entry in given if entry not in groups}
    return tuple(n for n in names if n in chosen), tuple(n for n in names if n in by_name)


def check_draw(
    seeds: Sequence[int], per_task: int | None, max_prompt_tokens: int | None, max_new_tokens: int | None
) -> None:
    """Raise UsageError for seeds that are not distinct whole numbers and for limits below 1."""
    if not isinstance(seeds, Iterable) or isinstance(seeds, str):
        raise UsageError(f"seeds={seeds} is not a list of whole numbers, for example seeds=[0,1,2]")
    seeds = list(seeds)
    if not seeds or not all(is_whole(seed) and seed >= 0 for seed in seeds):
        raise UsageError(f"seeds={seeds} must be whole numbers of 0 and more, for example seeds=[0,1,2]")
    if len(set(seeds)) != len(seeds):
        raise UsageError(f"seeds={seeds} names a seed twice; a repeated seed is not new evidence")
    limits = {"per_task": per_task, "max_prompt_tokens": max_prompt_tokens, "max_new_tokens": max_new_tokens}
    for key, value in limits.items():
        whole(key, value, 1, or_null=True)
