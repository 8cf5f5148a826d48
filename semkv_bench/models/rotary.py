"""The rotary embedding of a model's keys, and its inverse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from semkv_bench.errors import UsageError
from semkv_bench.lazy import torch
from semkv_bench.models.architecture import length_dependent
from semkv_bench.models.load import LoadedModel

if TYPE_CHECKING:
    from torch import Tensor, nn


__all__ = ["Rotary", "check_rotary", "rotary_of"]

_INSTEAD = "choose a quantizer of the keys as they are"
_PROBED = 9
_CLOSE, _CLOSE_16_BITS = {4: 1e-4, 8: 1e-6}, 3e-2  # by bytes of a value


@dataclass(frozen=True, eq=False)
class Rotary:
    """The rotation of one layer's keys: ``y = x C + rot(x) S``, on the first channels that the tables have.

    tables: cosines and sines of positions, as the model has them, rounding and attention factor included.
    pairs: channels that turn together: ``half``, c and c + d/2 (Llama); ``halves``, the same with every angle once in
    the tables; ``next``, 2c and 2c + 1 (GPT-J); ``none``, a layer without the embedding.
    """

    tables: Callable[[Tensor], tuple[Tensor, Tensor]]
    pairs: str = "half"

    def apply(self, x: Tensor, positions: Tensor) -> Tensor:
        """Keys [..., tokens, head_dim] before the embedding as they are after it; positions int64 [tokens]."""
        if self.pairs == "none":
            return x
        cosine, sine = (part.to(x) for part in self._spread(positions))
        part, rest = x[..., : cosine.shape[-1]], x[..., cosine.shape[-1] :]
        return torch.cat([part * cosine + self._turned(part) * sine, rest], dim=-1)

    def undo(self, y: Tensor, positions: Tensor) -> Tensor:
        """The way back, by C^2 + S^2: a model hands its tables out rounded, so that this is not one number."""
        if self.pairs == "none":
            return y
        cosine, sine = (part.to(y) for part in self._spread(positions))
        part, rest = y[..., : cosine.shape[-1]], y[..., cosine.shape[-1] :]
        back = (part * cosine - self._turned(part) * sine) / (cosine.square() + sine.square())
        return torch.cat([back, rest], dim=-1)

    def _spread(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """A cosine and a sine for every channel that turns, [tokens, channels]."""
        cosine, sine = self.tables(positions)
        if self.pairs == "half":
            return cosine, sine
        if self.pairs == "halves":
            return torch.cat([cosine, cosine], -1), torch.cat([sine, sine], -1)
        half = cosine.shape[-1] // 2
        # Models of neighbouring pairs hold every angle once, twice over, or twice in a row.
        if torch.equal(cosine[..., :half], cosine[..., half:]):
            cosine, sine = (table[..., :half].repeat_interleave(2, dim=-1) for table in (cosine, sine))
        return cosine, sine

    def _turned(self, x: Tensor) -> Tensor:
        if self.pairs in ("half", "halves"):
            first, second = x.chunk(2, dim=-1)
            return torch.cat([-second, first], dim=-1)
        first, second = x[..., 0::2], x[..., 1::2]
        return torch.stack([-second, first], dim=-1).flatten(-2)


def check_rotary(config: Any, name: str, who: str, instead: str = _INSTEAD) -> None:
    """Raise UsageError where ``who`` cannot undo the rotary embedding of a model's keys, by its configuration.

    instead: what the user may do.
    """
    kind = length_dependent(config)
    if kind is not None:
        raise UsageError(
            f"{who} needs keys before the rotary embedding, but {name} scales it by the prompt's length "
            f"(rope_type={kind}), so that it cannot be undone; {instead}"
        )


_known: WeakKeyDictionary[nn.Module, dict[int, Rotary]] = WeakKeyDictionary()


def rotary_of(loaded: LoadedModel, who: str = "this method", instead: str = _INSTEAD) -> dict[int, Rotary]:
    """The rotation of every coded layer's keys, found by what a few tokens' keys are before and after it.

    who: needs it; instead: what the user may do where it is not known.

    Raises UsageError for a model whose keys before the embedding are not seen, or are turned in an unknown way.
    """
    if loaded.model not in _known:
        check_rotary(loaded.model.config, loaded.label, who, instead)
        with torch.inference_mode():
            _known[loaded.model] = _found(loaded, instead)
    return _known[loaded.model]


def _found(loaded: LoadedModel, instead: str) -> dict[int, Rotary]:
    from transformers import DynamicCache

    cache, before = DynamicCache(config=loaded.model.config), {}
    ids = torch.arange(3, 3 + _PROBED, device=loaded.device)[None] % loaded.model.config.vocab_size
    with _keys_before(loaded, before):
        loaded.decoder(input_ids=ids, use_cache=True, **{loaded.cache_keyword: cache})
    positions = torch.arange(_PROBED)
    found = {}
    for layer in loaded.shape.quantized_layers:
        after = cache.layers[layer].keys[0]
        if layer not in before or before[layer].numel() != after.numel():
            raise UsageError(
                f"{loaded.label}: keys before the rotary embedding are not to be seen in its layer {layer} (there is "
                f"no k_norm or k_proj of their size); {instead}"
            )
        plain = before[layer]
        if plain.shape != after.shape:
            plain = plain.reshape(_PROBED, *after.shape[::2]).transpose(0, 1)
        found[layer] = _matching(loaded, plain.to(after.device), after, positions, instead)
    return found


def _matching(loaded: LoadedModel, plain: Tensor, after: Tensor, positions: Tensor, instead: str) -> Rotary:
    limit = _CLOSE.get(after.itemsize, _CLOSE_16_BITS) * float(after.abs().max())
    tables = _tables(loaded)
    for pairs in ("half", "next", "halves", "none") if tables is not None else ("none",):
        rotary = Rotary(tables, pairs)
        if pairs == "halves" and 2 * tables(positions)[0].shape[-1] > after.shape[-1]:
            continue
        if bool((rotary.apply(plain.double(), positions) - after.double()).abs().max() <= limit):
            return rotary
    raise UsageError(
        f"{loaded.label}: how its keys are turned by the rotary embedding is not known here; {instead}"
    )


def _tables(loaded: LoadedModel) -> Callable[[Tensor], tuple[Tensor, Tensor]] | None:
    """Cosines and sines [tokens, channels] as the decoder computes them in its own type; None: it has no such part."""
    embedding = getattr(loaded.decoder, "rotary_emb", None)
    if embedding is None:
        return None
    kinds = (
        {"layer_type": "full_attention"} if "layer_type" in signature(embedding.forward).parameters else {}
    )

    @torch.inference_mode()
    def tables(positions: Tensor) -> tuple[Tensor, Tensor]:
        like = torch.empty(1, 1, 1, dtype=loaded.dtype, device=loaded.device)
        found = embedding(like, positions.to(loaded.device)[None], **kinds)
        return found[0][0], found[1][0]

    return tables


@contextmanager
def _keys_before(loaded: LoadedModel, found: dict[int, Tensor]) -> Iterator[None]:
    """While this lasts, ``found`` gets the keys before the rotary embedding of the first sequence, by layer."""

    def keeper(layer: int) -> Callable[..., None]:
        def keep(module: nn.Module, args: tuple, output: Any) -> None:
            # [tokens, heads * channels] of a whole layer, or by head with tokens or heads first.
            if isinstance(output, torch.Tensor):
                found[layer] = output[0].detach()

        return keep

    handles = []
    try:
        for number, layer in enumerate(getattr(loaded.decoder, "layers", ())):
            parts = dict(layer.named_modules())
            named = {path.rpartition(".")[2]: part for path, part in parts.items()}
            for name in ("k_norm", "k_layernorm", "key_layernorm", "k_proj"):
                if name in named:
                    handles.append(named[name].register_forward_hook(keeper(number)))
                    break
        yield
    finally:
        for handle in handles:
            handle.remove()
