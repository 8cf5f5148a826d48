"""Attention that the prompt gets when the model is made to repeat it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from semkv_bench.checks import whole
from semkv_bench.errors import UsageError
from semkv_bench.importance.attention import weight_blocks
from semkv_bench.importance.heads import HeadMetric, check_modelled, stacked
from semkv_bench.importance.hooks import AttentionCall, watch_attention
from semkv_bench.lazy import torch
from semkv_bench.models.load import LoadedModel

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["KVzip"]

_CHUNK, _SINKS = 2048, 4
_AGAIN = "\n\nRepeat the previous context exactly."
_PART = "\n\nRepeat the part of the previous context exactly, starting with"
_BEGUN = 8
_MARK = "semkv"


@dataclass(frozen=True)
class KVzip(HeadMetric):
    """The most attention that a token gets while the prompt is repeated (Kim et al., 2025, arXiv 2505.23416).

    After the prefill the prompt is fed once more behind an order to repeat it, ``chunk`` tokens at a time, and
    forgotten again: as much work as the prefill, or more. Four sinks always stay. The paper's budget is ``global``.
    ``kvzip-512`` names the chunk; 2048 is the default.
    """

    name = "kvzip"
    replays = True
    chunk: int = _CHUNK

    def __post_init__(self) -> None:
        whole(f"{self.name}'s chunk", self.chunk, 1)

    @property
    def label(self) -> str:
        """See ``Metric``."""
        return self.name if self.chunk == _CHUNK else f"{self.name}-{self.chunk}"

    @classmethod
    def with_option(cls, option: str) -> KVzip:
        """See ``Metric``; the option is the number of tokens that are repeated at a time."""
        if not option.isdecimal():
            raise UsageError(f"importance metric {cls.name}-{option}: write the chunk as in {cls.name}-512")
        return cls(int(option))

    def always_kept(self, tokens: int, count: int) -> Tensor:
        """See ``Metric``."""
        return torch.arange(tokens) < _SINKS

    def orders(self, tokenizer: Any, ids: Sequence[int]) -> list[tuple[range, list[int]]]:
        """What is fed for every chunk of the prompt ``ids``: an order to repeat it, and the chunk itself."""
        closing = _closing(tokenizer)
        found = []
        for start in range(0, len(ids), self.chunk):
            here = range(start, min(start + self.chunk, len(ids)))
            asked = _encoded(tokenizer, _PART if start else _AGAIN)
            begun = ids[max(0, start - _BEGUN) : start]
            found.append((here, [*asked, *begun, *closing, *ids[here.start : here.stop]]))
        return found

    def replayed(
        self,
        loaded: LoadedModel,
        tokens: int,
        orders: Sequence[tuple[range, list[int]]],
        feed: Callable[[list[int]], None],
    ) -> Tensor:
        """Scores float32 [quantized layers, kv_heads, tokens].

        feed: a forward call behind the prompt's ``tokens`` tokens, which is forgotten when it ends.
        """
        parts: dict[int, list[Tensor]] = {}
        for here, asked in orders:

            def hear(layer: int, call: AttentionCall, here: range = here) -> None:
                check_modelled([self], call)
                with torch.inference_mode():
                    parts.setdefault(layer, []).append(_received(call, here))

            with watch_attention(loaded, hear):
                feed(asked)
        return stacked(loaded, [{layer: torch.cat(found, -1) for layer, found in parts.items()}])[0].float()


def _received(call: AttentionCall, here: range) -> Tensor:
    """The most attention that keys ``here`` get from any query of any head that shares them, [kv_heads, keys].

    Queries look at the sinks, at these keys and at each other, and at nothing else.
    """
    new, sinks = call.queries.shape[1], min(_SINKS, here.start)
    keys = torch.cat([call.keys[:, :sinks], call.keys[:, here.start : here.stop], call.keys[:, -new:]], dim=1)
    start = sinks + len(here)
    most = keys.new_zeros(len(keys), len(here), dtype=torch.float32)
    for _, weights in weight_blocks(replace(call, keys=keys), start, start + new, start):
        given = weights[..., sinks:start].amax(1).unflatten(0, (len(keys), -1)).amax(1)
        most = torch.maximum(most, given)
    return most.cpu()


def _encoded(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def _closing(tokenizer: Any) -> list[int]:
    """What stands between a user's words and the model's in its chat template; a line's end without one."""
    if getattr(tokenizer, "chat_template", None) is None:
        return _encoded(tokenizer, "\n")
    said = [{"role": "user", "content": _MARK}]
    text = tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
    return _encoded(tokenizer, text.rpartition(_MARK)[2])
