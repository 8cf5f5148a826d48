"""Windows of a text file: how well the model still predicts what stands there (perplexity, KL, top-1 agreement)."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from semkv_bench.checks import whole
from semkv_bench.errors import UsageError
from semkv_bench.files import read_text
from semkv_bench.tasks.base import Answer, Example, Task, check_draw

__all__ = ["Text"]


@dataclass(frozen=True)
class Text(Task):
    """A text in windows of ``length`` tokens that do not overlap; a last, shorter one is left out.

    The first ``context`` tokens of a window (None: half of it) are read, the others are scored: the share of places at
    which a setting ranks the same token first as ``full`` does, so that ``full`` itself scores 1. KL divergence from
    ``full`` and the text's own negative log-likelihood are recorded beside it. Every window begins with the model's
    BOS token where it has one. The seed draws the windows where ``per_task`` is below their number.
    """

    path: str
    length: int = 512
    context: int | None = None

    name: ClassVar[str] = "text"
    prompt_source: ClassVar[str] = "own"

    def __post_init__(self) -> None:
        whole("task.length", self.length, 4)
        if self.context is not None:
            whole("task.context", self.context, 2, self.length - 1)

    @property
    def names(self) -> tuple[str, ...]:
        """The file's own name."""
        return (Path(self.path).stem or "text",)

    @property
    def chance(self) -> dict[str, float]:
        """0: what agrees by chance hangs on the text, and is not known."""
        return {self.names[0]: 0.0}

    def examples(
        self,
        tokenizer: Any,
        seeds: Sequence[int],
        per_task: int | None = None,
        max_prompt_tokens: int | None = None,
        max_new_tokens: int | None = None,
    ) -> list[Example]:
        """See ``Task.examples``; ``max_prompt_tokens`` caps the window.

        Raises:
            MissingError: there is no such file.
            UsageError: it is not UTF-8 text, or shorter than one window.
        """
        check_draw(seeds, per_task, max_prompt_tokens, max_new_tokens)
        length = min(self.length, max_prompt_tokens or self.length)
        context = length // 2 if self.context is None else self.context
        if context >= length:
            raise UsageError(
                f"task.context={context} leaves nothing of a window of {length} tokens to be scored"
            )
        windows = self._windows(tokenizer, length)
        made = []
        for seed in seeds:
            chosen = list(range(len(windows)))
            if per_task is not None and per_task < len(chosen):
                chosen = random.Random(f"{self.names[0]}/{seed}").sample(chosen, len(chosen))[:per_task]
            for number in chosen:
                ids = windows[number]
                made.append(
                    Example(
                        task=self.names[0],
                        example_id=f"{number:05d}",
                        seed=seed,
                        input_ids=ids[:context],
                        answers=(tokenizer.decode(list(ids[context:])),),
                        max_new_tokens=1,
                        target_ids=ids[context:],
                        forced=True,
                    )
                )
        return made

    def score(self, example: Example, prediction: str) -> float:
        """Raises UsageError: a text is scored by what the model thinks of it, and not by an answer."""
        raise UsageError("task=text scores no answers; its settings are run by engine=transformers")

    def score_answer(self, example: Example, answer: Answer) -> float:
        """Share of the places at which the same token is ranked first as under ``full``."""
        return 1.0 if answer.top1_agreement is None else answer.top1_agreement

    def _windows(self, tokenizer: Any, length: int) -> list[tuple[int, ...]]:
        text = read_text(Path(self.path).expanduser(), f"task.path={self.path}")
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        begin = _begins_with(tokenizer)
        size = length - len(begin)
        windows = [(*begin, *ids[start : start + size]) for start in range(0, len(ids) - size + 1, size)]
        if not windows:
            raise UsageError(
                f"task.path={self.path} has {len(ids)} tokens, fewer than one window of task.length={length}"
            )
        return windows


def _begins_with(tokenizer: Any) -> tuple[int, ...]:
    """The BOS token where the tokenizer itself puts one in front of a text."""
    bos = getattr(tokenizer, "bos_token_id", None)
    with_special = tokenizer("a")["input_ids"]
    return (bos,) if bos is not None and list(with_special[:1]) == [bos] else ()
