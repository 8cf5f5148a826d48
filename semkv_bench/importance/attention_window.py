"""Attention that a token gets from the end of the prompt."""

from dataclasses import dataclass

from semkv_bench.checks import whole
from semkv_bench.errors import UsageError
from semkv_bench.importance.attention import AttentionMetric

__all__ = ["AttentionWindow"]

_WINDOW = 32


@dataclass(frozen=True)
class AttentionWindow(AttentionMetric):
    """Attention weights that the last ``window`` scored tokens give to a token, summed.

    The observation window of SnapKV (Li et al., 2024), without its pooling over neighbours and without
    forcing the window's own tokens to the top. ``attention_window-64`` names a window of 64; 32 is the default.
    """

    name = "attention_window"
    window: int = _WINDOW

    def __post_init__(self) -> None:
        whole("attention_window's window", self.window, 1)

    @property
    def label(self) -> str:
        """See ``Metric``."""
        return self.name if self.window == _WINDOW else f"{self.name}-{self.window}"

    @classmethod
    def with_option(cls, option: str) -> "AttentionWindow":
        """See ``Metric``; the option is the window."""
        if not option.isdecimal():
            raise UsageError(f"importance metric {cls.name}-{option}: write the window as in {cls.name}-64")
        return cls(int(option))

    def check_block(self, block: int) -> None:
        """See ``Metric``."""
        if self.window < block:
            raise UsageError(
                f"{self.label} ranks a block of {block} generated tokens by its last {self.window} tokens alone; "
                f"use attention_window-{block} or protocol.block={self.window}"
            )

    def first_query(self, tokens: int) -> int:
        """See ``AttentionMetric``."""
        return max(0, tokens - self.window)
