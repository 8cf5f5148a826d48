"""A text goes through the model once, and every token attends to coded keys and values, its own among them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from semkv_bench.errors import UsageError
from semkv_bench.protocols.base import Protocol
from semkv_bench.protocols.rule import PREFILL, CodingRule
from semkv_bench.settings.setting import Setting
from semkv_bench.tasks import Example

__all__ = ["Through"]


@dataclass(frozen=True)
class Through(Protocol):
    """One teacher-forced pass over a whole text, as perplexities of quantized caches are published.

    In every layer the keys and values of all tokens are coded as soon as they are made, and attended to as they come
    back; so a layer's error enters the keys and values of the next one. Windows and unfilled blocks stay in 16 bits as
    at the end of a prompt of that length. Under ``prefill`` the cache is that of a full-precision pass: the two are
    never compared.
    """

    name: ClassVar[str] = "through"
    one_pass: ClassVar[bool] = True
    stores: ClassVar[str] = "one pass over the text, in which every token attends to coded keys and values"

    @property
    def rule(self) -> CodingRule:
        """See ``Protocol``; all that is fed is coded as a prompt."""
        return PREFILL

    def check(self, settings: Sequence[Setting], examples: Sequence[Example]) -> None:
        """See ``Protocol``: it takes texts, and settings that need no ranking of tokens."""
        if any(not example.forced for example in examples):
            raise UsageError(
                "protocol=through reads a given text and answers nothing; use task=text task.path=FILE"
            )
        for setting in settings:
            if setting.prune is not None or setting.metrics or setting.prompt_metrics:
                raise UsageError(
                    f"{setting.name} ranks tokens by what a whole prompt shows, which one pass does not have; use "
                    "allocation=uniform and methods without a mix or pivots, or protocol=prefill"
                )
        super().check(settings, examples)
