"""Attention that later queries are expected to give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from semkv_bench.checks import whole
from semkv_bench.errors import UsageError
from semkv_bench.importance.base import SourceRecorder
from semkv_bench.importance.heads import HeadMetric, check_modelled, lifted, stacked
from semkv_bench.importance.hooks import AttentionCall, watch_attention
from semkv_bench.lazy import torch
from semkv_bench.models.rotary import rotary_of

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["ExpectedAttention"]

_FUTURE, _SINKS = 512, 4


class QueryRecorder(SourceRecorder):
    """Adds up, for every query head, the queries before the rotary embedding and their products."""

    source = staticmethod(watch_attention)

    def __init__(self, prompt, metrics):
        super().__init__(prompt, metrics)
        if prompt.tokens < metrics[0].least_tokens:
            raise UsageError(f"{metrics[0].label} says nothing of {prompt.tokens} tokens")
        self._rotary = rotary_of(prompt.loaded, metrics[0].label, "choose another score")
        self._sums: dict[int, tuple[Tensor, Tensor]] = {}
        self._found: list[dict[int, Tensor]] = [{} for _ in metrics]

    def hear(self, layer: int, call: AttentionCall) -> None:
        """One layer's attention call."""
        check_modelled(self.metrics, call)
        prompt, rotary = self.prompt, self._rotary[layer]
        first = max(0, _SINKS - prompt.start)
        positions = torch.arange(prompt.start + first, prompt.start + max(first, prompt.fresh))
        queries = rotary.undo(call.queries[:, first : max(first, prompt.fresh)].float(), positions).double()
        added = (queries.sum(1), queries.transpose(1, 2) @ queries)
        before = self._sums.get(layer, (0, 0))
        self._sums[layer] = tuple(old + new for old, new in zip(before, added, strict=True))
        if prompt.seen < prompt.tokens or layer in self._found[0]:
            return
        count = prompt.tokens - _SINKS
        mean, products = (total / count for total in self._sums.pop(layer))
        spread = products - mean[:, :, None] * mean[:, None]
        for metric, found in zip(self.metrics, self._found, strict=True):
            later = torch.arange(prompt.tokens, prompt.tokens + metric.future)
            unit = torch.eye(mean.shape[-1], device=mean.device)
            # The mean of the rotations at the positions to come: a row of it is where a unit vector goes.
            turned = rotary.apply(unit[:, None].expand(-1, len(later), -1), later).mean(1).double()
            queries = mean @ turned, turned.T @ spread @ turned
            found[layer] = metric.score(*queries, call, prompt.tokens).cpu()

    def scores(self) -> list[Tensor]:
        """See ``Recorder``: [quantized layers, kv_heads, tokens]."""
        return stacked(self.prompt.loaded, self._found)


@dataclass(frozen=True)
class ExpectedAttention(HeadMetric):
    """Expected attention times the norm of the value (Devoto et al., 2025, arXiv 2510.00636).

    Queries to come are taken for normal, with mean and covariance of the prompt's own before the rotary embedding,
    sinks left out, turned by the mean rotation of the next ``future`` positions. Four sinks always stay.
    ``expected_attention-128`` names the positions; 512 is the default.
    """

    name = "expected_attention"
    recorder = QueryRecorder
    unturned = True
    future: int = _FUTURE

    def __post_init__(self) -> None:
        whole(f"{self.name}'s future", self.future, 1)

    @property
    def label(self) -> str:
        """See ``Metric``."""
        return self.name if self.future == _FUTURE else f"{self.name}-{self.future}"

    @classmethod
    def with_option(cls, option: str) -> ExpectedAttention:
        """See ``Metric``; the option is the number of positions to come."""
        if not option.isdecimal():
            raise UsageError(
                f"importance metric {cls.name}-{option}: write the positions to come as in {cls.name}-128"
            )
        return cls(int(option))

    @property
    def least_tokens(self) -> int:
        """See ``Metric``."""
        return _SINKS + 2

    def always_kept(self, tokens: int, count: int) -> Tensor:
        """See ``Metric``."""
        return torch.arange(tokens) < _SINKS

    def score(self, mean: Tensor, spread: Tensor, call: AttentionCall, tokens: int) -> Tensor:
        """Mean [query heads, head_dim] and covariance [query heads, head_dim, head_dim] of later queries -> scores.

        call: holds the keys and values of ``tokens`` tokens. Scores are float32 [kv_heads, tokens].
        """
        keys, values = (states[:, _SINKS:tokens].double() for states in (call.keys, call.values))
        kv_heads = len(keys)
        mean, spread = mean.unflatten(0, (kv_heads, -1)), spread.unflatten(0, (kv_heads, -1))
        logits = call.scaling * mean @ keys.transpose(1, 2)
        logits += call.scaling**2 / 2 * ((keys[:, None] @ spread) * keys[:, None]).sum(-1)
        expected = logits.softmax(-1).mean(1) * values.norm(dim=-1)
        scores = torch.nn.functional.pad(expected.float(), (_SINKS, 0))
        return lifted(scores, self.always_kept(tokens, 0).to(scores.device))
