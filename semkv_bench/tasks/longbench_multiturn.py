"""LongBench's documents asked about in several turns, each answer scored with its item's metric."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar

from semkv_bench.checks import whole
from semkv_bench.tasks.base import Example, FollowUp, check_draw, choose_names
from semkv_bench.tasks.encoding import encode_follow_up, encode_target
from semkv_bench.tasks.longbench import GROUPS, TASKS, LongBench, draw_sample
from semkv_bench.tasks.longbench_data import Item
from semkv_bench.tasks.longbench_prompts import FOLLOW_UPS, fill

__all__ = ["LongBenchMultiturn", "conversations"]

_GROUPS = {group: tuple(n for n in GROUPS[group] if n in FOLLOW_UPS) for group in ("all", "en", "zh")}


@dataclass(frozen=True)
class LongBenchMultiturn(LongBench):
    """Conversations over the documents of LongBench's question tasks.

    Items of a task that share their document make a conversation, ``turns`` questions at most; where they
    are fewer, the questions are asked again from the first on. The first turn is the item's own prompt,
    truncation included, as in ``LongBench``; the later turns put the question alone, in this project's
    wording. Other keys are those of ``LongBench``; ``per_task`` counts conversations.
    """

    turns: int = 2

    name: ClassVar[str] = "longbench_multiturn"

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("task.turns", self.turns, 1)

    @property
    def prompt_source(self) -> str:
        """As in LongBench, and whose wording the later turns have."""
        source = self._prompts.source
        return source if source == "own" or self.turns == 1 else f"{source}, later turns own"

    def examples(
        self,
        tokenizer: Any,
        seeds: Sequence[int],
        per_task: int | None = None,
        max_prompt_tokens: int | None = None,
        max_new_tokens: int | None = None,
    ) -> list[Example]:
        """See Task.examples; ``max_prompt_tokens`` caps the first turn, ``max_new_tokens`` each answer.

        The seed draws the sample of conversations, all of them if ``per_task`` is null. An example has the id
        of its first item.
        """
        check_draw(seeds, per_task, max_prompt_tokens, max_new_tokens)
        out = []
        for name in self.names:
            groups = conversations(self._source.items(name), self.turns)
            encoded: dict[str, Example] = {}
            for seed in seeds:
                for items in draw_sample(groups, name, seed, per_task):
                    key = items[0].item_id
                    if key not in encoded:
                        encoded[key] = self._converse(
                            tokenizer, name, items, max_prompt_tokens, max_new_tokens
                        )
                    out.append(replace(encoded[key], seed=seed))
        return out

    @cached_property
    def _chosen(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return choose_names(
            "subset", "all" if self.subset is None else self.subset, tuple(FOLLOW_UPS), _GROUPS
        )

    def _converse(
        self,
        tokenizer: Any,
        name: str,
        items: Sequence[Item],
        max_prompt_tokens: int | None,
        max_new_tokens: int | None,
    ) -> Example:
        spaced = TASKS[name].group == "en"
        said, first = self._encode(tokenizer, name, items[0], max_prompt_tokens, max_new_tokens)
        follow_ups = []
        for before, item in pairwise(items):
            question = fill(FOLLOW_UPS[name], "", item.input)
            said, ids = encode_follow_up(
                tokenizer, said, before.answers[0], question, spaced=spaced, chat=self.chat
            )
            follow_ups.append(
                FollowUp(
                    input_ids=ids,
                    answers=item.answers,
                    max_new_tokens=first.max_new_tokens,
                    target_ids=encode_target(tokenizer, said, item.answers[0], spaced=spaced),
                    all_classes=item.all_classes,
                    question=item.input,
                )
            )
        return replace(first, follow_ups=tuple(follow_ups))


def conversations(items: Sequence[Item], turns: int) -> list[tuple[Item, ...]]:
    """Items that share their context, in file order and ``turns`` at a time, repeated to fill the last turns."""
    by_context: dict[str, list[Item]] = {}
    for item in items:
        by_context.setdefault(item.context, []).append(item)
    out = []
    for shared in by_context.values():
        for start in range(0, len(shared), turns):
            asked = shared[start : start + turns]
            out.append(tuple(asked[turn % len(asked)] for turn in range(turns)))
    return out
