"""Prompts of the user's own: a JSONL file of prompts and answers, scored by a stock scorer."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from semkv_bench.checks import choice, whole
from semkv_bench.errors import UsageError
from semkv_bench.files import json_lines
from semkv_bench.tasks.base import Example, Task, check_draw
from semkv_bench.tasks.encoding import Encoded, encode_prompt, encode_target
from semkv_bench.tasks.perturb import check_changed, kinds_of, with_variants
from semkv_bench.tasks.scorers import SCORERS, check_references

__all__ = ["Jsonl", "Prompt"]

_KNOWN = ("prompt", "answers", "answer", "id", "cluster", "choices", "max_new_tokens", "chat", "task")
# Room behind the longest reference, in which a model that does not stop shows itself.
_SPARE_TOKENS = 16
# Of a prompt that ends in its question, what people are shown.
_SHOWN = 400


@dataclass(frozen=True)
class Prompt:
    """One line of the file."""

    task: str
    item_id: str
    prompt: str
    answers: tuple[str, ...]
    cluster: str | None = None
    choices: tuple[str, ...] = ()
    max_new_tokens: int | None = None
    chat: bool | None = None


@dataclass(frozen=True)
class Jsonl(Task):
    """A file with one JSON object a line: ``prompt`` and ``answers`` (a text or a list, the best one counts), and
    perhaps ``id``, ``task``, ``cluster`` (what questions share a document), ``choices``, ``max_new_tokens``, ``chat``.

    scorer: of ``semkv_bench.tasks.scorers``; for lines with ``choices`` the default is ``choice``. chat: ask in the
    model's chat template. answer_prefix: begins the answer for the model. The seed draws the sample where
    ``per_task`` is below the number of lines. perturb: kinds of ``semkv_bench.tasks.perturb``; each adds every prompt
    once more, changed so.
    """

    path: str
    scorer: str = "contains"
    chat: bool = True
    answer_prefix: str = ""
    perturb: str | Sequence[str] | None = None

    name: ClassVar[str] = "jsonl"
    prompt_source: ClassVar[str] = "own"

    def __post_init__(self) -> None:
        choice("task.scorer", self.scorer, tuple(SCORERS))
        _ = kinds_of(self.perturb)

    @property
    def names(self) -> tuple[str, ...]:
        """The tasks that the lines name, or the file's own name."""
        return tuple(dict.fromkeys(item.task for item in self.items))

    @property
    def chance(self) -> dict[str, float]:
        """One over the number of choices where there are any, else 0."""
        shares: dict[str, list[float]] = {}
        for item in self.items:
            shares.setdefault(item.task, []).append(1 / len(item.choices) if item.choices else 0.0)
        return {task: sum(values) / len(values) for task, values in shares.items()}

    @cached_property
    def items(self) -> tuple[Prompt, ...]:
        """The lines, checked; MissingError for no such file, UsageError naming the line that is wrong."""
        path = Path(self.path).expanduser()
        rows = json_lines(path, f"task.path={self.path}")
        items = [self._item(row, number, path) for number, row in rows]
        if not items:
            raise UsageError(f"task.path={self.path} holds no prompt")
        seen: dict[tuple[str, str], int] = {}
        for number, item in enumerate(items, 1):
            key = (item.task, item.item_id)
            if key in seen:
                raise UsageError(
                    f"{path}: prompt {number} has the id {item.item_id} of prompt {seen[key]}; ids must differ"
                )
            seen[key] = number
        return tuple(items)

    def examples(
        self,
        tokenizer: Any,
        seeds: Sequence[int],
        per_task: int | None = None,
        max_prompt_tokens: int | None = None,
        max_new_tokens: int | None = None,
    ) -> list[Example]:
        """See ``Task.examples``."""
        check_draw(seeds, per_task, max_prompt_tokens, max_new_tokens)
        encoded: dict[tuple[str, str], list[Example]] = {}
        made = []
        for seed in seeds:
            for task in self.names:
                items = [item for item in self.items if item.task == task]
                if per_task is not None and per_task < len(items):
                    items = random.Random(f"{task}/{seed}").sample(items, len(items))[:per_task]
                for item in items:
                    key = (task, item.item_id)
                    if key not in encoded:
                        encoded[key] = self._encode(tokenizer, item, max_prompt_tokens, max_new_tokens)
                    made += [replace(example, seed=seed) for example in encoded[key]]
        check_changed(made, kinds_of(self.perturb), max_prompt_tokens)
        return made

    def score(self, example: Example, prediction: str) -> float:
        """The scorer's highest value over the references."""
        choices = example.all_classes or ()
        scorer = SCORERS["choice" if choices and self.scorer == "contains" else self.scorer]
        return max(scorer(prediction, answer, choices) for answer in example.answers)

    def _encode(
        self, tokenizer: Any, item: Prompt, max_prompt_tokens: int | None, max_new_tokens: int | None
    ) -> list[Example]:
        def encode(text: str) -> Encoded:
            return encode_prompt(
                tokenizer,
                text,
                chat=self.chat if item.chat is None else item.chat,
                answer_prefix=self.answer_prefix,
                max_tokens=max_prompt_tokens,
            )

        prompt = encode(item.prompt)
        targets = [encode_target(tokenizer, prompt, answer, spaced=True) for answer in item.answers]
        limit = max_new_tokens or item.max_new_tokens or max(map(len, targets)) + _SPARE_TOKENS
        example = Example(
            task=item.task,
            example_id=item.item_id,
            seed=0,
            input_ids=prompt.input_ids,
            answers=item.answers,
            max_new_tokens=limit,
            truncated=prompt.truncated,
            all_classes=item.choices or None,
            # A pattern is no text that the model could be made to say.
            target_ids=() if self.scorer == "regex" else targets[0],
            cluster=item.cluster or "",
            question=item.prompt[-_SHOWN:],
        )
        return with_variants(tokenizer, example, item.prompt, kinds_of(self.perturb), encode, item.choices)

    def _item(self, row: dict[str, Any], number: int, path: Path) -> Prompt:
        where = f"{path}, line {number}"
        if unknown := sorted(set(row) - set(_KNOWN)):
            raise UsageError(f"{where}: unknown field {unknown[0]}; known are {', '.join(_KNOWN)}")
        answers = _texts(row.get("answers", row.get("answer")), "answers", where)
        choices = _texts(row["choices"], "choices", where) if row.get("choices") is not None else ()
        if not isinstance(row.get("prompt"), str) or not row["prompt"].strip():
            raise UsageError(f"{where}: prompt must be a text")
        if not isinstance(row.get("chat", False), bool):
            raise UsageError(f"{where}: chat must be true or false")
        if row.get("max_new_tokens") is not None:
            whole(f"{where}: max_new_tokens", row["max_new_tokens"], 1)
        check_references(
            "choice" if choices and self.scorer == "contains" else self.scorer, answers, choices, where
        )
        cluster = row.get("cluster")
        return Prompt(
            task=str(row.get("task") or path.stem),
            item_id=str(row.get("id", f"{number:05d}")),
            prompt=row["prompt"],
            answers=answers,
            cluster=None if cluster is None else str(cluster),
            choices=choices,
            max_new_tokens=row.get("max_new_tokens"),
            chat=row.get("chat"),
        )


def _texts(value: Any, field: str, where: str) -> tuple[str, ...]:
    listed = value if isinstance(value, list) else [value]
    if not listed or any(
        isinstance(text, bool) or not isinstance(text, str | int | float) for text in listed
    ):
        raise UsageError(f"{where}: {field} must be a text or a list of texts")
    texts = tuple(str(text) for text in listed)
    if not all(text.strip() for text in texts):
        raise UsageError(f"{where}: {field} holds an empty text")
    return texts
