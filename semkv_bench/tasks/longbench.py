"""LongBench (Bai et al., 2024): 21 long-context tasks with the benchmark's prompts, limits and metrics."""

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, TypeVar

from semkv_bench.checks import choice
from semkv_bench.errors import MissingError
from semkv_bench.tasks import longbench_metrics as metrics
from semkv_bench.tasks.base import Example, Task, check_draw, choose_names, text_hash
from semkv_bench.tasks.encoding import Encoded, encode_prompt, encode_target
from semkv_bench.tasks.longbench_data import HUB_REVISION, Item, Source, fetch_archive, open_source
from semkv_bench.tasks.longbench_prompts import PromptSet, fill, load_prompts

__all__ = ["GROUPS", "TASKS", "LongBench", "LongBenchTask", "draw_sample"]

Drawn = TypeVar("Drawn")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LongBenchTask:
    """What the benchmark lays down for one task.

    ``chance`` is the score of an answer of the right kind given without the prompt: the mean score of
    another item's reference as the prediction, or one over the number of classes or paragraphs.
    """

    group: str
    metric: metrics.Metric
    max_new_tokens: int
    chance: float
    chat: bool = True
    first_line: bool = False
    stops_at_newline: bool = False


TASKS: dict[str, LongBenchTask] = {
    "narrativeqa": LongBenchTask("en", metrics.word_f1, 128, 0.0),
    "qasper": LongBenchTask("en", metrics.word_f1, 128, 0.0),
    "multifieldqa_en": LongBenchTask("en", metrics.word_f1, 64, 0.06),
    "multifieldqa_zh": LongBenchTask("zh", metrics.chinese_f1, 64, 0.02),
    "hotpotqa": LongBenchTask("en", metrics.word_f1, 32, 0.0),
    "2wikimqa": LongBenchTask("en", metrics.word_f1, 32, 0.0),
    "musique": LongBenchTask("en", metrics.word_f1, 32, 0.03),
    "dureader": LongBenchTask("zh", metrics.chinese_rouge_l, 128, 0.11),
    "gov_report": LongBenchTask("en", metrics.rouge_l, 512, 0.24),
    "qmsum": LongBenchTask("en", metrics.rouge_l, 512, 0.11),
    "multi_news": LongBenchTask("en", metrics.rouge_l, 512, 0.13),
    "vcsum": LongBenchTask("zh", metrics.chinese_rouge_l, 512, 0.06),
    "trec": LongBenchTask("en", metrics.classification, 64, 1 / 50, chat=False, first_line=True),
    "triviaqa": LongBenchTask("en", metrics.word_f1, 32, 0.01, chat=False, first_line=True),
    "samsum": LongBenchTask(
        "en", metrics.rouge_l, 128, 0.10, chat=False, first_line=True, stops_at_newline=True
    ),
    "lsht": LongBenchTask("zh", metrics.classification, 64, 1 / 24, chat=False, first_line=True),
    "passage_count": LongBenchTask("en", metrics.number_share, 32, 0.0),
    "passage_retrieval_en": LongBenchTask("en", metrics.paragraph_share, 32, 1 / 30),
    "passage_retrieval_zh": LongBenchTask("zh", metrics.paragraph_share, 32, 1 / 30),
    "lcc": LongBenchTask("code", metrics.code_similarity, 64, 0.27, chat=False),
    "repobench-p": LongBenchTask("code", metrics.code_similarity, 64, 0.24, chat=False),
}
GROUPS: dict[str, tuple[str, ...]] = {
    "all": tuple(TASKS),
    **{group: tuple(n for n, t in TASKS.items() if t.group == group) for group in ("en", "zh", "code")},
}


@dataclass(frozen=True)
class LongBench(Task):
    """LongBench's tasks over the hub's data or local files.

    ``subset``: task names and the groups all, en, zh, code, or a list that mixes them; null for all.
    ``path``: a folder of ``<task>.jsonl`` files or a zip archive of them; null fetches the hub's data.zip at
    ``revision``. ``prompts``: official, own, or auto (official if it can be had); ``prompts_path``: the
    benchmark's dataset2prompt.json or its folder. ``chat=false`` leaves the model's chat template out of the
    tasks that have it.

    A task asked for by name must be there (MissingError); of a group those present are used, and a warning names
    the others.
    """

    subset: str | Sequence[str] | None = None
    prompts: str = "auto"
    path: str | None = None
    prompts_path: str | None = None
    revision: str = HUB_REVISION
    chat: bool = True

    name: ClassVar[str] = "longbench"

    def __post_init__(self) -> None:
        _ = self._chosen
        choice("prompts", self.prompts, ("auto", "official", "own"))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """See Task.names. Raises MissingError where ``path`` lacks a task that was chosen by name."""
        chosen, by_name = self._chosen
        # The hub's archive holds every task, so the names are known before anything is fetched.
        present = chosen if self.path is None else self._source.present(chosen)
        missing = [name for name in chosen if name not in present]
        if absent := [name for name in missing if name in by_name] or (missing if not present else []):
            files = ", ".join(f"{name}.jsonl" for name in absent)
            raise MissingError(
                f"task.path={self.path} lacks {files}; add the files, "
                "choose another subset, or leave task.path out to fetch the data from the hub"
            )
        if missing:
            _log.warning("task.path=%s lacks these tasks, left out: %s", self.path, ", ".join(missing))
        return tuple(present)

    @property
    def prompt_source(self) -> str:
        """``official``, ``own``, or ``custom`` for a local file that differs from the published one."""
        return self._prompts.source

    @property
    def chance(self) -> dict[str, float]:
        """See Task.chance."""
        return {name: TASKS[name].chance for name in self.names}

    def examples(
        self,
        tokenizer: Any,
        seeds: Sequence[int],
        per_task: int | None = None,
        max_prompt_tokens: int | None = None,
        max_new_tokens: int | None = None,
    ) -> list[Example]:
        """See Task.examples; the seed draws the sample of items, all of them if ``per_task`` is null."""
        check_draw(seeds, per_task, max_prompt_tokens, max_new_tokens)
        out = []
        for name in self.names:
            items = self._source.items(name)
            encoded: dict[str, Example] = {}
            for seed in seeds:
                for item in draw_sample(items, name, seed, per_task):
                    if item.item_id not in encoded:
                        _, encoded[item.item_id] = self._encode(
                            tokenizer, name, item, max_prompt_tokens, max_new_tokens
                        )
                    out.append(replace(encoded[item.item_id], seed=seed))
        return out

    def score(self, example: Example, prediction: str) -> float:
        """The task's metric, highest over the references; of some tasks only the first line counts."""
        task = TASKS[example.task]
        if task.first_line:
            prediction = prediction.lstrip("\n").split("\n")[0]
        return max(task.metric(prediction, answer, example.all_classes) for answer in example.answers)

    @cached_property
    def _chosen(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return choose_names("subset", "all" if self.subset is None else self.subset, tuple(TASKS), GROUPS)

    @cached_property
    def _source(self) -> Source:
        return fetch_archive(self.revision) if self.path is None else open_source(self.path)

    @cached_property
    def _prompts(self) -> PromptSet:
        return load_prompts(self.prompts, self.prompts_path, self.names)

    def _encode(
        self, tokenizer: Any, name: str, item: Item, max_prompt_tokens: int | None, max_new_tokens: int | None
    ) -> tuple[Encoded, Example]:
        task = TASKS[name]
        text = fill(self._prompts.templates[name], item.context, item.input)
        prompt = encode_prompt(tokenizer, text, chat=task.chat and self.chat, max_tokens=max_prompt_tokens)
        newline = tokenizer("\n", add_special_tokens=False)["input_ids"][-1:] if task.stops_at_newline else ()
        return prompt, Example(
            task=name,
            example_id=item.item_id,
            seed=0,
            input_ids=prompt.input_ids,
            answers=item.answers,
            max_new_tokens=max_new_tokens or task.max_new_tokens,
            stop_token_ids=tuple(newline),
            min_new_tokens=int(task.stops_at_newline),
            truncated=prompt.truncated,
            all_classes=item.all_classes,
            cluster=text_hash(item.context),
            question=item.input,
            target_ids=encode_target(tokenizer, prompt, item.answers[0], spaced=task.group == "en"),
        )


def draw_sample(items: Sequence[Drawn], name: str, seed: int, per_task: int | None) -> Sequence[Drawn]:
    """``per_task`` of task ``name``'s items in their order; a larger sample of the same seed holds the smaller one."""
    if per_task is None or per_task >= len(items):
        return items
    order = list(range(len(items)))
    random.Random(f"{name}/{seed}").shuffle(order)
    return [items[i] for i in sorted(order[:per_task])]
