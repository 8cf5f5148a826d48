"""Keys and values of a calibration text, and the loss's gradient by them, layer by layer."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from semkv_bench.errors import SemkvError
from semkv_bench.grid.cost import SIDES
from semkv_bench.models.load import LoadedModel
from semkv_bench.models.rotary import rotary_of

__all__ = ["Seen", "watch_texts"]


@dataclass
class Seen:
    """What a model made of the texts so far, on the CPU.

    values: [heads, tokens, head_dim] of every text, by (layer, side); weights: squared gradients, likewise.
    """

    values: dict[tuple[int, str], list[Tensor]] = field(default_factory=dict)
    weights: dict[tuple[int, str], list[Tensor]] = field(default_factory=dict)

    def of(self, layer: int, side: str) -> tuple[Tensor, Tensor | None]:
        """All texts one behind the other, and taken from the store."""
        found = torch.cat(self.values.pop((layer, side)), dim=1)
        weights = self.weights.pop((layer, side), None)
        return found, None if weights is None else torch.cat(weights, dim=1)


class _Tap(DynamicCache):
    """A cache that shows what it is given."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.given: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        """See ``Cache``."""
        self.given[layer_idx] = key_states, value_states
        for states in self.given[layer_idx]:
            if states.requires_grad:
                states.retain_grad()
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def watch_texts(
    loaded: LoadedModel, texts: Iterable[Sequence[int]], weighted: bool, plain_keys: bool, skip: int
) -> Seen:
    """Read ``texts`` (token ids), each from its first token on.

    weighted: also take the gradient of each text's loss. plain_keys: keys before the rotary embedding. skip: first
    tokens of each text that are left out, because the method keeps them.
    """
    seen = Seen()
    rotary = rotary_of(loaded) if plain_keys else {}
    for ids in texts:
        given = _read(loaded, ids, weighted)
        for layer in loaded.shape.quantized_layers:
            for side, states in zip(SIDES, given[layer], strict=True):
                values, gradient = states.detach()[0], states.grad
                if side == "keys" and plain_keys:
                    positions = torch.arange(values.shape[1], device=values.device)
                    values = rotary[layer].undo(values.double(), positions).float()
                    # The gradient turns with the keys: the rotation is orthogonal up to one factor.
                    gradient = gradient if gradient is None else rotary[layer].undo(gradient, positions)
                seen.values.setdefault((layer, side), []).append(values[:, skip:].cpu())
                if gradient is not None:
                    weight = gradient[0, :, skip:].float().square()
                    seen.weights.setdefault((layer, side), []).append(weight.cpu())
    return seen


def _read(loaded: LoadedModel, ids: Sequence[int], weighted: bool) -> dict[int, tuple[Tensor, Tensor]]:
    """Keys and values by layer, with their gradients where ``weighted``."""
    cache = _Tap(loaded.model.config)
    batch = torch.tensor([list(ids)], device=loaded.device)
    told = {"use_cache": True, loaded.cache_keyword: cache}
    if not weighted:
        with torch.no_grad():
            loaded.decoder(input_ids=batch, **told)
        return cache.given
    loaded.model.requires_grad_(False)
    with torch.enable_grad():
        embedded = loaded.model.get_input_embeddings()(batch).requires_grad_()
        logits = loaded.model(inputs_embeds=embedded, **told).logits[0, :-1]
        torch.nn.functional.cross_entropy(logits.float(), batch[0, 1:].to(logits.device)).backward()
    if any(part.grad is None for pair in cache.given.values() for part in pair):
        raise SemkvError(f"{loaded.label} gives no gradient of its loss by its keys and values")
    return cache.given
