"""What a running model shows of itself: hidden states of its layers, attention calls, final states.

Each source is a context manager that takes the model and a function to call; when it ends, also by an
exception, the model is as it was before.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from semkv_bench.errors import UsageError
from semkv_bench.models.load import LoadedModel

__all__ = ["DELETED", "AttentionCall", "watch_attention", "watch_layers", "watch_output"]

_OBSERVED = "+importance"
_UNMODELLED = ("position_bias", "s_aux")  # arguments that change the weights in ways not followed here

DELETED: ContextVar[Callable[[int], Tensor | None]] = ContextVar("DELETED", default=lambda layer: None)
"""Gives the places of a layer's cache that attention must not see: bool [rows, kv_heads, places], None for none."""

_hears: WeakKeyDictionary[nn.Module, list[Callable[[int, "AttentionCall"], None]]] = WeakKeyDictionary()


@dataclass(frozen=True)
class AttentionCall:
    """One layer's attention over one forward call, after rotary embedding and cache.

    queries [heads, new, head_dim]; keys and values [kv_heads, stored, head_dim], the new tokens last.
    unmodelled: arguments of the call that change attention weights beyond scaling and soft-capping. deleted: stored
    tokens that the queries do not see, bool [kv_heads, stored]; None for none.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    scaling: float
    softcap: float | None
    unmodelled: tuple[str, ...]
    deleted: Tensor | None = None


@contextmanager
def watch_layers(
    loaded: LoadedModel, hear: Callable[[int, Tensor, Tensor], None], batch: bool = False
) -> Iterator[None]:
    """``hear(layer, before, after)``: hidden states [new, hidden] that enter and leave each decoder layer.

    batch: of all rows, [rows, new, hidden], and not of the first.
    """

    def hook(index: int) -> Callable[..., None]:
        def heard(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            before = args[0] if args else kwargs["hidden_states"]
            after = output[0] if isinstance(output, tuple) else output
            # Where layers sit on several devices, what enters comes from the device of the layer before.
            before = before.to(after.device)
            hear(index, *((before, after) if batch else (before[0], after[0])))

        return heard

    handles = []
    try:
        for index, layer in enumerate(_decoder_layers(loaded)):
            handles.append(layer.register_forward_hook(hook(index), with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def watch_output(loaded: LoadedModel, hear: Callable[[Tensor], None], batch: bool = False) -> Iterator[None]:
    """``hear(hidden)``: final hidden states [new, hidden], after the last norm, as the head reads them.

    batch: of all rows, [rows, new, hidden], and not of the first.
    """
    handle = loaded.decoder.register_forward_hook(
        lambda module, args, output: hear(output[0] if batch else output[0][0])
    )
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def watch_attention(
    loaded: LoadedModel, hear: Callable[[int, AttentionCall], None], batch: bool = False
) -> Iterator[None]:
    """``hear(layer, call)`` after the attention of every layer that is quantized.

    batch: the call's tensors are those of all rows, with one dimension more in front. The model runs
    the attention function that it had; only the name it looks it up by is another. Several may watch at once.

    Raises:
        UsageError: the attention implementation is neither ``sdpa`` nor ``eager``.
    """
    decoder = loaded.decoder
    original = decoder.config._attn_implementation
    if original.partition("+")[0] not in ("sdpa", "eager"):
        raise UsageError(
            f"importance metrics of keys, values and attention need model.attention=sdpa or eager, not {original}"
        )
    quantized = set(loaded.shape.quantized_layers)
    modules = [module for module in decoder.modules() if getattr(module, "layer_idx", None) in quantized]
    observed = original if original.endswith(_OBSERVED) else _register(original)
    hearing = hear if batch else _first_row(hear)
    try:
        for module in modules:
            _hears.setdefault(module, []).append(hearing)
        decoder.set_attn_implementation(observed)
        if decoder.config._attn_implementation != observed:
            raise UsageError(
                f"attention of {type(decoder).__name__} cannot be observed: it does not use transformers' interface"
            )
        yield
    finally:
        decoder.set_attn_implementation(original)
        for module in modules:
            _hears[module].remove(hearing)


def _first_row(hear: Callable[[int, AttentionCall], None]) -> Callable[[int, AttentionCall], None]:
    def heard(layer: int, call: AttentionCall) -> None:
        first = {name: getattr(call, name)[0] for name in ("queries", "keys", "values")}
        if call.deleted is not None:
            first["deleted"] = call.deleted[0]
        hear(layer, replace(call, **first))

    return heard


def _register(original: str) -> str:
    """Make transformers know ``original`` under a second name that reports its calls; returns that name."""
    name = original + _OBSERVED
    if name not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(name, _reporting(original))
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[original])
    return name


def _reporting(original: str) -> Callable[..., Any]:
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        # Each modeling file has an eager function of its own.
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        output = ALL_ATTENTION_FUNCTIONS.get_interface(original, eager)(
            module, query, key, value, attention_mask, **kwargs
        )
        if hears := _hears.get(module):
            scaling = kwargs.get("scaling")
            call = AttentionCall(
                queries=query,
                keys=key,
                values=value,
                scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
                softcap=kwargs.get("softcap"),
                unmodelled=tuple(name for name in _UNMODELLED if kwargs.get(name) is not None),
                deleted=DELETED.get()(module.layer_idx),
            )
            for hear in hears:
                hear(module.layer_idx, call)
        return output

    return attention


def _decoder_layers(loaded: LoadedModel) -> nn.ModuleList:
    layers = getattr(loaded.decoder, "layers", None)
    if layers is None:
        raise UsageError(
            f"importance metrics of hidden states do not know where {type(loaded.model).__name__} keeps its layers"
        )
    return layers
