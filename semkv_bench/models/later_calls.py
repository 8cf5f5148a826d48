"""What a loaded model needs where it is called again with its cache. Tried out, since no configuration tells it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

__all__ = ["LaterCalls", "later_calls"]

_IDS = (3, 7, 5, 4, 6, 3, 5, 7)
# Relative, in the Euclidean norm. Rounding in bfloat16 stays below, lost positions do not.
_SAME = 0.1
# A state so many times as large changes what reads it by more than this.
_LARGER, _UNREAD = 1000.0, 1e-3
_STATES = ("conv_states", "recurrent_states")


@dataclass(frozen=True)
class LaterCalls:
    """positions: does the model begin at position 0 again unless positions are given? parts: may a later call have
    several tokens, or would the model's recurrent states begin anew?
    """

    positions: bool = False
    parts: bool = True


class _Trial:
    """Feeds a few tokens to a decoder, in one call or several."""

    def __init__(self, decoder: Any, cache_keyword: str, config: Any, device: torch.device):
        self._decoder, self._keyword, self._config = decoder, cache_keyword, config
        self._ids = torch.tensor([_IDS], device=device)
        self.takes_positions = "position_ids" in signature(decoder.forward).parameters

    def seen(
        self, *lengths: int, positions: bool = False, between: Callable[[Any], None] | None = None
    ) -> list[Tensor]:
        """The final hidden state and all keys of the last token. between: changes the layers of the cache."""
        cache, begin = DynamicCache(config=self._config), 0
        for length in lengths:
            if begin and between is not None:
                for layer in cache.layers:
                    between(layer)
            here = slice(begin, begin + length)
            given = {"input_ids": self._ids[:, here], "use_cache": True, self._keyword: cache}
            if positions:
                given["position_ids"] = torch.arange(here.start, here.stop, device=self._ids.device)[None]
            hidden = self._decoder(**given).last_hidden_state
            begin += length
        keys = [getattr(layer, "keys", None) for layer in cache.layers]
        return [hidden[0, -1], *(side[0, :, -1] for side in keys if side is not None and side.numel())]


@torch.inference_mode()
def later_calls(decoder: Any, cache_keyword: str, config: Any, device: torch.device) -> LaterCalls:
    """Compare what ``decoder`` makes of a few tokens at once with what it makes of them in two calls."""
    trial, count = _Trial(decoder, cache_keyword, config, device), len(_IDS)
    whole, positions = trial.seen(count), False
    away = _distance(trial.seen(count - 1, 1), whole)
    if away > _SAME and trial.takes_positions:
        positions = 2 * _distance(trial.seen(count - 1, 1, positions=True), whole) < away
    held: set[str] = set()
    parts = (count - 3, 3)
    again = trial.seen(*parts, positions=positions, between=lambda layer: held.update(_states(layer)))
    changed = (
        trial.seen(*parts, positions=positions, between=partial(_enlarge, name=name)) for name in sorted(held)
    )
    return LaterCalls(positions, all(_distance(other, again) > _UNREAD for other in changed))


def _states(layer: Any) -> dict[str, dict[int, Tensor]]:
    """A layer's convolution and recurrent states, those that it holds."""
    named = {name: getattr(layer, name, None) or {} for name in _STATES}
    return {name: held for name, held in named.items() if any(state is not None for state in held.values())}


def _enlarge(layer: Any, name: str) -> None:
    for number, state in _states(layer).get(name, {}).items():
        getattr(layer, name)[number] = state * _LARGER


def _distance(states: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest relative difference of any pair."""
    pairs = zip(states, expected, strict=True)
    return max(float((one.float() - two.float()).norm() / two.float().norm()) for one, two in pairs)
