"""How the engine runs: memory, batch, forced tokens, temperature."""

from collections.abc import Callable
from dataclasses import dataclass

from semkv_bench.checks import choice, is_number, is_whole, whole
from semkv_bench.errors import UsageError

__all__ = ["AUTO", "PACKED", "ROWS", "EngineOptions"]

AUTO, ROWS, PACKED = "auto", "rows", "packed"
# Keeps the matrix units of a large GPU busy, and activations of an 8B model below a third of a gibibyte.
_GPU_CHUNK = 2048


@dataclass(frozen=True)
class EngineOptions:
    """How settings are batched and tokens chosen.

    memory_fraction: share of the device's memory that rows of caches may fill.
    max_rows: at most so many settings in one batch; None leaves it to the memory.
    store: how rows hold what is coded of a prompt: ``rows``, as values in the model's type; ``packed``, as codes, from
        which every step writes out one layer's values; ``auto``: packed where memory does not hold a single row.
    prompts: prompts of about one length that are prefilled together.
    teacher_tokens: tokens of the reference answer that KL and agreement are measured on.
    temperature: 0 is greedy; above, all settings of an example draw with the same random numbers.
    prefill_chunk: prompt tokens per forward call; None feeds the prompt whole, ``auto`` does so on a CPU alone.
    noise_examples: examples on which ``full`` is also decoded alone, to show what batching by itself changes.
    """

    memory_fraction: float = 0.5
    max_rows: int | None = None
    store: str = AUTO
    prompts: int = 1
    teacher_tokens: int = 32
    temperature: float = 0.0
    prefill_chunk: int | str | None = AUTO
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
        choice("engine.store", self.store, [AUTO, ROWS, PACKED])
        for name, least, optional in (
            ("max_rows", 1, True),
            ("prompts", 1, False),
            ("teacher_tokens", 1, False),
            ("noise_examples", 0, False),
        ):
            whole(f"engine.{name}", getattr(self, name), least, or_null=optional)
        chunk = self.prefill_chunk
        if not (chunk in (None, AUTO) or (is_whole(chunk) and chunk >= 1)):
            raise UsageError(
                f"engine.prefill_chunk={chunk} must be a whole number of at least 1, {AUTO}, or null to read whole"
            )

    def chunk_of(self, tokens: int, device: str, undivided: Callable[[], str | None]) -> int:
        """Tokens of each forward call over a prompt of ``tokens`` on a type of device.

        undivided: says why the model's prompts cannot be read in parts, None if they can; UsageError with its words
        where parts were asked for.
        """
        chunk = self.prefill_chunk
        if chunk == AUTO:
            chunk = None if device == "cpu" else _GPU_CHUNK
        if chunk is None or chunk >= tokens or (why := undivided()) is None:
            return min(tokens, chunk or tokens)
        if self.prefill_chunk != AUTO:
            raise UsageError(why)
        return tokens
