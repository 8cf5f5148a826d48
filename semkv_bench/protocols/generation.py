"""Generated tokens are quantized, too: block-exact and lazily."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from semkv_bench.errors import UsageError
from semkv_bench.protocols.base import Protocol, check_rule
from semkv_bench.protocols.rule import CodingRule
from semkv_bench.settings.setting import Setting
from semkv_bench.tasks import Example

__all__ = ["Generation"]

_STORES = {
    "prompt": "the prompt is coded after a full-precision prefill, generated tokens stay in 16 bits",
    "generated": "the prompt stays in 16 bits; generated tokens are coded in blocks of {block}",
    "both": "the prompt is coded after a full-precision prefill, generated tokens in blocks of {block}",
}


@dataclass(frozen=True)
class Generation(Protocol):
    """Generated tokens stay 16-bit until a block of ``block`` is complete; then it is ranked and coded once.

    parts: ``prompt`` codes what ``prefill`` does, ``generated`` only the blocks of generated tokens (the first
    of which begins with the prompt's last token), ``both`` all of it. See ``semkv_bench.protocols.rule``.
    """

    parts: str = "both"
    block: int = 32

    def __post_init__(self) -> None:
        check_rule(self.parts, self.block)

    @property
    def name(self) -> str:
        """``generation``, or ``generation-prompt`` and ``generation-generated`` where only a part is coded."""
        return "generation" if self.parts == "both" else f"generation-{self.parts}"

    @property
    def rule(self) -> CodingRule:
        """See ``Protocol``."""
        return CodingRule(self.parts, self.block)

    @property
    def stores(self) -> str:
        """See ``Protocol``."""
        return _STORES[self.parts].format(block=self.block)

    @property
    def variant(self) -> dict[str, Any]:
        """See ``Protocol``."""
        return {"parts": self.parts, "block": self.block}

    def check(self, settings: Sequence[Setting], examples: Sequence[Example]) -> None:
        """See ``Protocol``; also where no answer can be long enough for a coded block to be read."""
        super().check(settings, examples)
        longest = max(example.max_new_tokens for example in examples)
        if self.parts == "generated" and not self.rule.due(longest - 1):
            raise UsageError(
                f"answers of at most {longest} tokens never read a coded block of {self.block}, so nothing would be "
                f"measured; raise max_new_tokens above {self.block}, lower protocol.block, or use protocol.parts=both"
            )
