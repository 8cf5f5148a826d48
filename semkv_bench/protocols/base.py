"""What all protocols share: a rule for what is coded, and the turns that are played under it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from semkv_bench.errors import UsageError
from semkv_bench.importance.tail import check_tail
from semkv_bench.protocols.rule import Blocks
from semkv_bench.settings.setting import Setting
from semkv_bench.tasks import Example

__all__ = ["Protocol", "check_rule"]


def check_rule(parts: str, block: int) -> None:
    """Raise UsageError, naming the key, for a rule that there is not."""
    try:
        Blocks(parts, block)
    except UsageError as error:
        raise UsageError(f"protocol.{error}") from None


class Protocol(ABC):
    """What is quantized, and when; subclasses are frozen dataclasses built by Hydra."""

    own_history: bool = True

    @property
    @abstractmethod
    def name(self) -> str:
        """``protocol`` in the records; variants that must not be pooled have names of their own."""

    @property
    @abstractmethod
    def rule(self) -> Blocks:
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
        several = next((example for example in examples if example.turns > 1), None)
        if several is not None:
            raise UsageError(
                f"{several.task} asks {several.turns} questions in a conversation; use protocol=multiturn"
            )

    def _check_ranking(self, settings: Sequence[Setting]) -> None:
        if self.rule.codes_tail:
            for label in sorted(set().union(*(setting.metrics for setting in settings))):
                check_tail(label, self.rule.block)
