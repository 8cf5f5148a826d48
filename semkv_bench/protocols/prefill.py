"""The prompt's cache is quantized once after a full-precision prefill; generated tokens stay 16-bit."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from semkv_bench.engine import Engine, Outcome, Request
from semkv_bench.settings import Setting

__all__ = ["Prefill"]


@dataclass(frozen=True)
class Prefill:
    """All prompt tokens but the last are quantized; the last is fed again, so that already the first
    generated token sees the quantized cache."""

    name: ClassVar[str] = "prefill"

    def run(self, engine: Engine, request: Request, settings: Sequence[Setting]) -> list[Outcome]:
        """One outcome per setting, in their order."""
        return engine.run(request, settings)

    def run_alone(self, engine: Engine, request: Request, setting: Setting) -> Outcome:
        """The request that was just run, once more under one setting in a batch of its own."""
        return engine.run_alone(request, setting)
