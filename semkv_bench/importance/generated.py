"""Scores of the tokens that follow a prompt, noted while rows of a batch are fed: generated tokens, later questions.

A token's block is ranked when it is complete, with what is known then: keys and values from the cache itself,
hidden states, surprisal and entropy from the calls that fed the tokens, and the attention that a token got from
the tokens fed while it was open. What comes later never counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from semkv_bench.errors import UsageError
from semkv_bench.importance.attention import attention_weights
from semkv_bench.importance.base import Needs
from semkv_bench.importance.choice import metric
from semkv_bench.importance.hooks import AttentionCall, watch_attention, watch_layers, watch_output
from semkv_bench.importance.logits import Head, next_token_statistics
from semkv_bench.lazy import torch
from semkv_bench.models.load import LoadedModel

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["Feed", "GeneratedScores", "check_tail"]


def check_tail(label: str, block: int) -> None:
    """Raise UsageError if tokens that follow a prompt cannot be ranked by the metric in blocks of ``block``."""
    found = metric(label)
    found.check_block(block)
    if found.needs is Needs.RECORDER:
        raise UsageError(f"generated tokens cannot be ranked by {label}; use protocol.parts=prompt")


@dataclass(frozen=True)
class Feed:
    """What one row is fed by a call.

    index: the row's name; position: of the first token; opened: open tokens before it; ids: the tokens.
    """

    index: int
    position: int
    opened: int
    ids: Sequence[int]


class GeneratedScores:
    """Notes for some metrics, by row and position.

    hidden: final hidden state [hidden] of the last token before the tail, which all rows share.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        labels: Sequence[str],
        rows: int,
        positions: int,
        start: int,
        hidden: Tensor,
    ):
        self.loaded = loaded
        self._metrics = {label: metric(label) for label in labels}
        self._layers = {layer: place for place, layer in enumerate(loaded.shape.quantized_layers)}
        shape = loaded.shape
        self._noted: dict[str, Tensor] = {}
        for label, found in self._metrics.items():
            if found.needs is Needs.HIDDEN:
                self._noted[label] = torch.zeros(shape.layers, rows, positions)
            elif found.needs is Needs.ATTENTION:
                self._noted[label] = torch.zeros(len(self._layers), rows, positions)
            elif found.needs is Needs.OUTPUT:
                self._noted[label] = torch.zeros(1, rows, positions)
        # Few tokens at a time, so the product in the weights' own type costs little and rounds least.
        self._head = Head.of(loaded, loaded.dtype) if self._of(Needs.OUTPUT) else None
        self._recent = dict.fromkeys(range(rows), (start, hidden[None]))
        self._call: list[Feed] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While this lasts, every forward call is to be announced by ``begin``."""
        with ExitStack() as stack:
            for needed, watch, hear in (
                (Needs.HIDDEN, watch_layers, self._hear_layer),
                (Needs.ATTENTION, watch_attention, self._hear_attention),
                (Needs.OUTPUT, watch_output, self._hear_output),
            ):
                if self._of(needed):
                    stack.enter_context(watch(self.loaded, hear, batch=True))
            yield

    def begin(self, call: Sequence[Feed]) -> None:
        """A forward call begins, its rows in this order."""
        self._call = list(call)
        for label in self._of(Needs.ATTENTION):
            for row in call:
                self._noted[label][:, row.index, row.position : row.position + len(row.ids)] = 0

    def scores(self, label: str, index: int, here: slice) -> Tensor:
        """Scores of the tokens at positions ``here`` of row ``index``: [quantized layers, tokens] or [1, tokens]."""
        noted, found = self._noted[label][:, index, here], self._metrics[label]
        if found.needs is not Needs.HIDDEN:
            return noted.clone()
        return noted.mean(0, keepdim=True) if found.averaged else noted[list(self._layers)]

    def save(self) -> Callable[[], None]:
        """Returns a function that undoes what is noted from now on."""
        noted = {label: self._noted[label].clone() for label in self._of(Needs.ATTENTION)}
        recent = dict(self._recent)

        def restore() -> None:
            self._noted.update({label: kept.clone() for label, kept in noted.items()})
            self._recent = dict(recent)

        return restore

    def _of(self, needed: Needs) -> list[str]:
        return [label for label, found in self._metrics.items() if found.needs is needed]

    def _hear_layer(self, layer: int, before: Tensor, after: Tensor) -> None:
        for label in self._of(Needs.HIDDEN):
            found = self._metrics[label].score(before, after).cpu()  # [rows, new]
            for row, scores in zip(self._call, found, strict=True):
                self._write(label, layer, row, scores[: len(row.ids)])

    def _hear_output(self, hidden: Tensor) -> None:
        for row, states in zip(self._call, hidden, strict=True):
            count = len(row.ids)
            start, known = self._recent[row.index]
            before = known[row.position - 1 - start]
            # The last target stands in for a successor that is not known yet; only its entropy is used.
            states = torch.cat([before[None].to(states), states[:count]])
            targets = torch.tensor([*row.ids, 0], device=states.device)
            surprisal, entropy = next_token_statistics(self._head, states, targets)
            for label in self._of(Needs.OUTPUT):
                scores = self._metrics[label].score(surprisal[:-1].cpu(), entropy[1:].cpu())
                self._write(label, 0, row, scores)
            self._recent[row.index] = (row.position, states[1:])

    def _hear_attention(self, layer: int, call: AttentionCall) -> None:
        labels = self._of(Needs.ATTENTION)
        if call.unmodelled:
            raise UsageError(
                f"{', '.join(labels)}: attention with {', '.join(call.unmodelled)} is not supported"
            )
        for number, row in enumerate(self._call):
            received = _received(call, number, row)
            columns = slice(row.position - row.opened, row.position + len(row.ids))
            for label in labels:
                self._noted[label][self._layers[layer], row.index, columns] += received

    def _write(self, label: str, layer: int, row: Feed, scores: Tensor) -> None:
        self._noted[label][layer, row.index, row.position : row.position + len(row.ids)] = scores


def _received(call: AttentionCall, number: int, row: Feed) -> Tensor:
    """Attention that a row's open tokens and new ones get from the new ones, float32 [opened + new] on the CPU.

    Summed over queries, averaged over heads.
    """
    count, end = len(row.ids), row.position + len(row.ids)
    queries = call.queries[number, :, :count].float() * call.scaling
    deleted = None if call.deleted is None else call.deleted[number, :, :end]
    weights = attention_weights(queries, call.keys[number, :, :end].float(), call.softcap, deleted)
    return (weights[..., row.position - row.opened :].sum((0, 1)) / len(weights)).cpu()
