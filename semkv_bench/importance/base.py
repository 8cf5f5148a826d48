"""What an importance metric is: a name, and a recorder that follows one prefill."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

from semkv_bench.errors import SemkvError, UsageError
from semkv_bench.lazy import torch
from semkv_bench.models.load import LoadedModel

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["Metric", "Needs", "Prompt", "Recorder", "Source", "SourceRecorder", "read_stacked"]

Source = Callable[[LoadedModel, Callable[..., None]], AbstractContextManager[None]]


def read_stacked(scores: Sequence[Tensor]) -> Tensor:
    """Stacked on the CPU; read from a GPU in one go, unless a model is spread over several of them."""
    together = len({score.device for score in scores}) == 1
    return torch.stack(scores if together else [score.cpu() for score in scores]).cpu()


@dataclass
class Prompt:
    """The prompt under observation.

    tokens: how many of its first tokens are scored; start: position of the first token of the current
    forward call; seen: tokens of all calls so far, the current one included.
    """

    loaded: LoadedModel
    tokens: int
    seed: int = 0
    logits_dtype: torch.dtype | None = None
    start: int = 0
    seen: int = 0
    chunks: list[Tensor] = field(default_factory=list)

    def feed(self, ids: Tensor) -> None:
        """A forward call begins with token ids [1, new]."""
        if ids.shape[0] != 1:
            raise ValueError(f"one prompt is observed at a time, not a batch of {ids.shape[0]}")
        self.start, self.seen = self.seen, self.seen + ids.shape[1]
        self.chunks.append(ids[0, : self.fresh])

    @property
    def fresh(self) -> int:
        """Tokens of the current call that are scored; those after the first ``tokens`` are not."""
        return max(0, min(self.seen, self.tokens) - self.start)

    @property
    def draw(self) -> int:
        """Seed of what is drawn by chance, of this prompt alone."""
        text = f"{self.seed}:{','.join(map(str, self.ids.tolist()))}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")

    @property
    def ids(self) -> Tensor:
        """Token ids int64 of all scored tokens so far."""
        return torch.cat(self.chunks)


class Recorder(ABC):
    """Turns a prompt into the scores of the metrics of one family; of its ids alone, if it is nothing more."""

    def __init__(self, prompt: Prompt, metrics: Sequence[Any]):
        self.prompt = prompt
        self.metrics = metrics

    @abstractmethod
    def scores(self) -> list[Tensor]:
        """Scores of every metric, in their order: [quantized layers, tokens] or [1, tokens].

        [quantized layers, kv_heads, tokens] of metrics ``per_head``.
        """


class SourceRecorder(Recorder):
    """A recorder of what one source shows of the forward calls.

    source: context manager that lets ``hear`` be called while a model runs.
    """

    source: ClassVar[Source]

    @abstractmethod
    def hear(self, *event: Any) -> None:
        """Take in one event of the source."""


class Needs(StrEnum):
    """What scores come from; all but ``RECORDER`` can also rank tokens that follow the prompt."""

    IDS = "token ids"
    CACHE = "keys and values of the token"
    HIDDEN = "hidden states"
    OUTPUT = "next-token distributions"
    ATTENTION = "attention weights"
    RECORDER = "a recorder of its own"

    @property
    def in_cache(self) -> bool:
        """Is a cache alone enough to score a token?"""
        return self in (Needs.IDS, Needs.CACHE)


class Metric(ABC):
    """A model-internal score per token; larger is more important. Subclasses are frozen dataclasses.

    A subclass states the whole idea in one function of its family. A file of the group ``metric`` called by its
    ``name`` makes it a choice. needs: what it scores by; seeded: do its scores change with the seed? per_head: does it
    score every key-value head by itself, [quantized layers, kv_heads, tokens]? replays: is the prompt fed once more
    after its prefill, by ``replayed``? reads_keys: do scores of generated tokens need their keys too (``with_keys``)?
    unturned: does it undo the rotary embedding?
    """

    name: ClassVar[str]
    recorder: ClassVar[type[Recorder]]
    needs: ClassVar[Needs] = Needs.RECORDER
    seeded: ClassVar[bool] = False
    per_head: ClassVar[bool] = False
    replays: ClassVar[bool] = False
    reads_keys: ClassVar[bool] = False
    unturned: ClassVar[bool] = False

    @property
    def label(self) -> str:
        """The text that ``metric`` reads back."""
        return self.name

    def check_block(self, block: int) -> None:  # noqa: B027, most take any
        """Raise UsageError if blocks of ``block`` generated tokens are too many for it."""

    @property
    def least_tokens(self) -> int:
        """Tokens that a prompt must have for the scores to say anything."""
        return 1

    def always_kept(self, tokens: int, count: int) -> Tensor:
        """Of ``tokens`` tokens, bool [tokens], those that a method never deletes where it keeps ``count`` of them."""
        return torch.zeros(tokens, dtype=torch.bool)

    def with_keys(self, received: Tensor, keys: Sequence[Tensor]) -> Tensor:
        """Scores of generated tokens from their attention and keys; of metrics that ``reads_keys``.

        received: attention [quantized layers, tokens] that they got; keys: of each layer, [kv_heads, tokens, head_dim].
        """
        raise SemkvError(f"{self.label}: a metric that reads_keys needs with_keys")

    @classmethod
    def with_option(cls, option: str) -> Metric:
        """The metric with the option that follows a dash in its label; UsageError if it takes none."""
        raise UsageError(f"importance metric {cls.name}-{option}: {cls.name} has no option")
