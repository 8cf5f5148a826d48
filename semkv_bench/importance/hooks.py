"""What a running model shows of itself: hidden states of its layers, attention calls, final states.

Each source is a context manager that takes the model and a function to call; when it ends, also by an
exception, the model is as it was before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from semkv_bench.errors import UsageError
from semkv_bench.models.attention_hook import Call, attention_modules, heard, model_attention
from semkv_bench.models.load import LoadedModel

if TYPE_CHECKING:
    from torch import Tensor, nn


__all__ = ["AttentionCall", "watch_attention", "watch_layers", "watch_output"]


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
        """What tells ``hear`` of the layer ``index``."""

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
    the attention function that it had. Several may watch at once.

    Raises:
        UsageError: the attention implementation is neither ``sdpa`` nor ``eager``.
    """
    decoder = loaded.decoder
    attention = model_attention(decoder.config)
    if attention not in ("sdpa", "eager"):
        raise UsageError(
            f"importance metrics of keys, values and attention need model.attention=sdpa or eager, not {attention}"
        )
    quantized = set(loaded.shape.quantized_layers)
    modules = [module for module in attention_modules(decoder) if module.layer_idx in quantized]
    hearing = hear if batch else _first_row(hear)
    with heard(
        decoder, modules, lambda call: hearing(call.module.layer_idx, _attention_call(call))
    ) as intercepted:
        if not intercepted:
            raise UsageError(
                f"attention of {type(decoder).__name__} cannot be observed: it does not use transformers' interface"
            )
        yield


def _attention_call(call: Call) -> AttentionCall:
    return AttentionCall(
        queries=call.query,
        keys=call.key,
        values=call.value,
        scaling=call.scaling,
        softcap=call.softcap,
        unmodelled=call.unmodelled,
        deleted=call.deleted,
    )


def _first_row(hear: Callable[[int, AttentionCall], None]) -> Callable[[int, AttentionCall], None]:
    def heard(layer: int, call: AttentionCall) -> None:
        first = {name: getattr(call, name)[0] for name in ("queries", "keys", "values")}
        if call.deleted is not None:
            first["deleted"] = call.deleted[0]
        hear(layer, replace(call, **first))

    return heard


def _decoder_layers(loaded: LoadedModel) -> nn.ModuleList:
    layers = getattr(loaded.decoder, "layers", None)
    if layers is None:
        raise UsageError(
            f"importance metrics of hidden states do not know where {type(loaded.model).__name__} keeps its layers"
        )
    return layers
