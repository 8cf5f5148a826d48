"""Conversations: everything that is stored is quantized between turns."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from semkv_bench.errors import UsageError
from semkv_bench.protocols.base import Protocol, check_rule
from semkv_bench.protocols.rule import CodingRule
from semkv_bench.settings.setting import Setting
from semkv_bench.tasks import Example

__all__ = ["MultiTurn"]

_HISTORIES = ("own", "reference")


@dataclass(frozen=True)
class MultiTurn(Protocol):
    """The prompt is coded as in ``prefill``; within a turn blocks of ``block`` tokens are coded as they complete,
    and between turns all that is still open: questions, answers, incomplete blocks, each token once.

    history: ``own``: a later turn sees the answers that its row gave itself. ``reference``: it sees the
    reference answers, so that turns differ by what is stored and not by what was said; a row's own answer is
    still what is scored. parts: as in ``generation``; all that follows the first prompt counts as generated.
    """

    history: str = "own"
    block: int = 32
    parts: str = "both"

    def __post_init__(self) -> None:
        check_rule(self.parts, self.block)
        if self.history not in _HISTORIES:
            raise UsageError(
                f"protocol.history={self.history} is not known; choose from {', '.join(_HISTORIES)}"
            )

    @property
    def name(self) -> str:
        """``multiturn``, with ``-reference`` for that history and ``-PARTS`` where only a part is coded."""
        history = "" if self.own_history else "-reference"
        return f"multiturn{history}" + ("" if self.parts == "both" else f"-{self.parts}")

    @property
    def own_history(self) -> bool:
        """See ``Protocol``."""
        return self.history == "own"

    @property
    def rule(self) -> CodingRule:
        """See ``Protocol``."""
        return CodingRule(self.parts, self.block)

    @property
    def stores(self) -> str:
        """See ``Protocol``."""
        history = "its own answers" if self.own_history else "the reference answers"
        prompt, later = "the prompt is coded", "what follows stays in 16 bits"
        if not self.rule.codes_prompt:
            prompt = "the first prompt stays in 16 bits"
        if self.rule.codes_tail:
            later = f"what follows is coded in blocks of {self.block} and, between turns, to the last token"
        return f"{prompt}; {later}; a later turn sees {history}"

    @property
    def variant(self) -> dict[str, Any]:
        """See ``Protocol``."""
        return {"history": self.history, "parts": self.parts, "block": self.block}

    def check(self, settings: Sequence[Setting], examples: Sequence[Example]) -> None:
        """See ``Protocol``."""
        self._check_ranking(settings)
        self._say_uncoded(settings, examples)
        if all(example.turns == 1 for example in examples):
            raise UsageError(
                "protocol=multiturn needs a task that asks several questions of one prompt; "
                "use protocol=generation for single answers"
            )
        if self.own_history:
            return
        for example in examples:
            for turn in range(example.turns - 1):
                if not example.at(turn).target_ids:
                    raise UsageError(
                        f"{example.task} {example.example_id} has no reference answer in turn {turn}; "
                        "use protocol.history=own"
                    )
