"""What an engine does by itself: it codes while it prefills, and codes what it generates."""

from collections.abc import Sequence
from dataclasses import dataclass

from semkv_bench.protocols.base import Protocol
from semkv_bench.protocols.rule import CodingRule
from semkv_bench.settings.setting import Setting
from semkv_bench.tasks import Example

__all__ = ["EngineProtocol"]


@dataclass(frozen=True)
class EngineProtocol(Protocol):
    """An engine that serves: every token is written coded and read back coded, by the prompt's later tokens too.

    Not to be compared with ``prefill``, whose prompt is computed in full precision, without saying so.
    """

    @property
    def name(self) -> str:
        """See ``Protocol``."""
        return "engine"

    @property
    def rule(self) -> CodingRule:
        """See ``Protocol``."""
        return CodingRule("both", block=1)

    @property
    def stores(self) -> str:
        """See ``Protocol``."""
        return "the engine codes every token as it comes, of the prompt and of the answer"

    def check(self, settings: Sequence[Setting], examples: Sequence[Example]) -> None:
        """See ``Protocol``: conversations are asked turn by turn, over a row's own answers."""
