"""How the engine runs: memory, batch, forced tokens, temperature."""

from dataclasses import dataclass

from semkv_bench.checks import is_number, whole
from semkv_bench.errors import UsageError

__all__ = ["EngineOptions"]


@dataclass(frozen=True)
class EngineOptions:
    """How settings are batched and tokens chosen.

    memory_fraction: share of the device's memory that rows of caches may fill.
    max_rows: at most so many settings in one batch; None leaves it to the memory.
    teacher_tokens: tokens of the reference answer that KL and agreement are measured on.
    temperature: 0 is greedy; above, all settings of an example draw with the same random numbers.
    prefill_chunk: prompt tokens per forward call; None feeds the prompt whole.
    noise_examples: examples on which ``full`` is also decoded alone, to show what batching by itself changes.
    """

    memory_fraction: float = 0.5
    max_rows: int | None = None
    teacher_tokens: int = 32
    temperature: float = 0.0
    prefill_chunk: int | None = None
    noise_examples: int = 8

    def __post_init__(self) -> None:
        for name in ("memory_fraction", "temperature"):
            value = getattr(self, name)
            if not is_number(value):
                raise UsageError(f"engine.{name}={value} must be a number")
            object.__setattr__(self, name, float(value))
        if not 0 < self.memory_fraction <= 1:
            raise UsageError(f"engine.memory_fraction={self.memory_fraction} must be above 0 and at most 1")
        if self.temperature < 0:
            raise UsageError(f"engine.temperature={self.temperature} must be 0 (greedy) or a positive number")
        for name, least, optional in (
            ("max_rows", 1, True),
            ("teacher_tokens", 1, False),
            ("prefill_chunk", 1, True),
            ("noise_examples", 0, False),
        ):
            whole(f"engine.{name}", getattr(self, name), least, or_null=optional)
