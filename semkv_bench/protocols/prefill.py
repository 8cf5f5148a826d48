"""The prompt's cache is quantized once after a full-precision prefill; generated tokens stay 16-bit."""

from dataclasses import dataclass
from typing import ClassVar

from semkv_bench.protocols.base import Protocol
from semkv_bench.protocols.rule import PREFILL, CodingRule

__all__ = ["Prefill"]


@dataclass(frozen=True)
class Prefill(Protocol):
    """All prompt tokens but the last are quantized; the last is fed again, so that already the first
    generated token sees the quantized cache."""

    name: ClassVar[str] = "prefill"
    stores: ClassVar[str] = (
        "the prompt is coded after a full-precision prefill, generated tokens stay in 16 bits"
    )

    @property
    def rule(self) -> CodingRule:
        """See ``Protocol``."""
        return PREFILL
