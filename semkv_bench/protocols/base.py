"""What all protocols share: a rule for what is coded, and the turns that are played under it."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from semkv_bench.errors import UsageError
from semkv_bench.importance import metric
from semkv_bench.importance.generated import check_tail
from semkv_bench.importance.hidden import HiddenMetric
from semkv_bench.importance.logits import LogitMetric
from semkv_bench.protocols.rule import PREFILL, CodingRule, window
from semkv_bench.settings.setting import Setting
from semkv_bench.tasks import Example

__all__ = ["Protocol", "check_rule"]

log = logging.getLogger(__name__)


def check_rule(parts: str, block: int) -> None:
    """Raise UsageError, naming the key, for a rule that there is not."""
    try:
        CodingRule(parts, block)
    except UsageError as error:
        raise UsageError(f"protocol.{error}") from None


class Protocol(ABC):
    """What is quantized, and when; subclasses are frozen dataclasses built by Hydra."""

    own_history: bool = True
    one_pass: bool = False

    @property
    @abstractmethod
    def name(self) -> str:
        """``protocol`` in the records; variants that must not be pooled have names of their own."""

    @property
    @abstractmethod
    def rule(self) -> CodingRule:
        """Which tokens become coded, and when."""

    @property
    @abstractmethod
    def stores(self) -> str:
        """What is stored how, in one sentence for the dry run."""

    @property
    def variant(self) -> dict[str, Any]:
        """What else the records say of the protocol; empty for ``prefill``."""
        return {}

    def check(self, settings: Sequence[Setting], examples: Sequence[Example]) -> None:
        """Raise UsageError if the examples cannot be run so, or tokens not be ranked as the settings ask."""
        self._check_ranking(settings)
        self._say_uncoded(settings, examples)
        several = next((example for example in examples if example.turns > 1), None)
        if several is not None:
            raise UsageError(
                f"{several.task} asks {several.turns} questions in a conversation; use protocol=multiturn"
            )

    def check_evictions(self, settings: Sequence[Setting], examples: Sequence[Example]) -> None:
        """Raise UsageError where a method that evicts tokens cannot be run, or would do nothing.

        Nor may a prompt be too short for a metric that ranks its tokens.
        """
        for setting in settings:
            if self.rule.codes_prompt and not (setting.prune and setting.prune.per_head):
                _check_ranked(setting, min(len(example.input_ids) - 1 for example in examples))
            if setting.prune is None or not setting.prune.per_head:
                continue
            if self.rule.codes_tail:
                raise UsageError(
                    f"{setting.name} deletes tokens of the prompt alone; use protocol=prefill or protocol.parts=prompt"
                )
            seen = setting.prune.question == "seen"
            for tokens in sorted({len(e.input_ids) - 1 if seen else e.context_tokens for e in examples}):
                setting.prune.check(tokens)

    def check_reads(self, settings: Sequence[Setting], examples: Sequence[Example]) -> None:
        """Raise UsageError where steps cannot read a part of the cache, or would read all of it."""
        for setting in settings:
            if setting.read is None:
                continue
            if self.rule != PREFILL or self.one_pass:
                raise UsageError(f"{setting.name} reads blocks of the prompt alone; use protocol=prefill")
            for tokens in sorted({len(example.input_ids) - 1 for example in examples}):
                setting.read.check(tokens)

    def _check_ranking(self, settings: Sequence[Setting]) -> None:
        if self.rule.codes_tail:
            for label in sorted(set().union(*(setting.metrics for setting in settings))):
                check_tail(label, self.rule.block)
            for setting in settings:
                _check_window_ranks(setting)

    def _say_uncoded(self, settings: Sequence[Setting], examples: Sequence[Example]) -> None:
        """Warn of settings whose 16-bit window no example outgrows."""
        longest = 0
        for example in examples:
            tail = sum(example.at(turn).max_new_tokens for turn in range(example.turns))
            later = sum(len(asked.input_ids) for asked in example.follow_ups)
            longest = max(longest, len(example.input_ids) - 1 + (tail + later) * self.rule.codes_tail)
        whole = [
            setting.name
            for setting in settings
            if (setting.keys or setting.values)
            and not any(window(self.rule, setting, side, longest).coded(longest) for side in range(2))
            and self.rule.codes_prompt
        ]
        if whole:
            log.warning(
                "%s: no example is long enough for a token to leave the window (keep): all stays in 16 bits, and is "
                "priced so",
                ", ".join(whole),
            )


def _check_ranked(setting: Setting, tokens: int) -> None:
    for label in sorted(setting.metrics):
        least = metric(label).least_tokens
        if tokens < least:
            raise UsageError(
                f"{setting.name}: {label} needs prompts of at least {least} tokens to rank, and one has {tokens}: "
                "choose another metric or longer prompts"
            )


def _check_window_ranks(setting: Setting) -> None:
    """Tokens that a prompt leaves open are ranked with the tail, which knows neither their hidden states nor logits."""
    sides = [side for side in (setting.keys, setting.values) if side is not None]
    if not any(side.quantizer.keep.windowed for side in sides):
        return
    for label in sorted(setting.metrics):
        if isinstance(metric(label), HiddenMetric | LogitMetric):
            raise UsageError(
                f"{setting.name}: tokens that leave a 16-bit window are not ranked by {label}; use key_norm, "
                "value_norm, attention_received, random or recency, or protocol.parts=prompt"
            )
