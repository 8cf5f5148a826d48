"""The one place where the attention of a running model is intercepted.

A model looks its attention function up by a name in its configuration. While anything of ours takes part, that is
the name of one function of ours. For each call it asks who computes the output: a reader that came with the keys
(``attach``), else who replaces the module's attention (``replaced``), else the model's own function. Then it tells
the call once to everyone who listens to the module (``heard``). Whoever comes second finds the name in place and
joins in, so attention is never wrapped twice. The model itself is not changed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from torch import Tensor, nn


__all__ = [
    "DELETED",
    "Call",
    "Listener",
    "Reader",
    "attach",
    "attention_modules",
    "heard",
    "intercept_next",
    "model_attention",
    "replaced",
]

_INTERCEPTED = "+semkv"
_READER = "_semkv_reader"
# Arguments of an attention call that change its weights in ways that only the model's own function knows.
_UNMODELLED = ("position_bias", "s_aux")

DELETED: ContextVar[Callable[[int], Tensor | None]] = ContextVar("DELETED", default=lambda layer: None)
"""Gives the places of a layer's cache that attention must not see: bool [rows, kv_heads, places], None for none."""


@dataclass(frozen=True)
class Call:
    """One layer's attention call, after rotary embedding and cache.

    query [rows, heads, new, head_dim]; key and value [rows, kv_heads, stored, head_dim], the new tokens last, or what
    the cache returned instead; mask: as the model made it; arguments: all others that it gave by name.
    attend: the model's own attention, query, key, value, mask -> output [rows, new, heads, head_dim], weights.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Any
    arguments: dict[str, Any]
    attend: Callable[[Tensor, Tensor, Tensor, Any], tuple[Tensor, Any]]

    @property
    def scaling(self) -> float:
        """What scores are multiplied by."""
        scaling = self.arguments.get("scaling")
        return self.query.shape[-1] ** -0.5 if scaling is None else scaling

    @property
    def softcap(self) -> float | None:
        """Bound of scores by a hyperbolic tangent; None for none."""
        return self.arguments.get("softcap")

    @property
    def unmodelled(self) -> tuple[str, ...]:
        """Arguments that change attention weights beyond scaling and soft-capping."""
        return tuple(name for name in _UNMODELLED if self.arguments.get(name) is not None)

    @property
    def is_plain(self) -> bool:
        """Is it the softmax of scaled dot products, and nothing else?"""
        return self.softcap is None and not self.unmodelled

    @property
    def deleted(self) -> Tensor | None:
        """Places that must not be seen, see ``DELETED``."""
        return DELETED.get()(self.module.layer_idx)


Reader = Callable[[Call], tuple["Tensor", Any]]
"""What computes a call in the place of the model's own function: output, and attention weights or None."""
Listener = Callable[[Call], None]

_readers: WeakKeyDictionary[nn.Module, list[Reader]] = WeakKeyDictionary()
_listeners: WeakKeyDictionary[nn.Module, list[Listener]] = WeakKeyDictionary()


def model_attention(config: Any) -> str:
    """The attention that a model's configuration asks for, whoever takes part in it."""
    return (config._attn_implementation or "eager").removesuffix(_INTERCEPTED)


def attention_modules(decoder: nn.Module) -> list[nn.Module]:
    """Modules of a decoder that belong to a numbered layer; its attention modules are among them."""
    return [module for module in decoder.modules() if getattr(module, "layer_idx", None) is not None]


@contextmanager
def replaced(decoder: nn.Module, reader: Reader) -> Iterator[None]:
    """While this lasts, ``reader`` computes the attention of all layers of a decoder."""
    with _joined(_readers, attention_modules(decoder), reader), _intercepting(decoder):
        yield


@contextmanager
def heard(decoder: nn.Module, modules: Sequence[nn.Module], listener: Listener) -> Iterator[bool]:
    """While this lasts, ``listener`` is told every attention call of some modules after its output is known.

    Gives whether the model's attention can be listened to; it must use transformers' interface.
    """
    with _joined(_listeners, modules, listener), _intercepting(decoder) as intercepted:
        yield intercepted


def attach(key: Tensor, reader: Reader) -> Tensor:
    """A view of a cache's keys; the attention call that gets it is computed by ``reader``."""
    view = key.view_as(key)
    setattr(view, _READER, reader)
    return view


def intercept_next(config: Any) -> Callable[[], None]:
    """Intercept attention of the model of a configuration; the function returned calls that off.

    For a cache, which meets its model's configuration alone, and for one attention call after another.
    """
    before = config._attn_implementation
    name = _register(before or "eager")
    if name == before:
        return lambda: None
    config._attn_implementation = name
    return partial(setattr, config, "_attn_implementation", before)


@contextmanager
def _intercepting(decoder: nn.Module) -> Iterator[bool]:
    before = decoder.config._attn_implementation
    name = _register(before or "eager")
    try:
        decoder.set_attn_implementation(name)
        yield decoder.config._attn_implementation == name
    finally:
        decoder.set_attn_implementation(before)


@contextmanager
def _joined(table: WeakKeyDictionary, modules: Sequence[nn.Module], member: Callable) -> Iterator[None]:
    with ExitStack() as stack:
        for module in modules:
            members = table.setdefault(module, [])
            members.append(member)
            stack.callback(members.remove, member)
        yield


def _register(attention: str) -> str:
    """The name under which transformers knows our function around an attention; once ours, always that."""
    if attention.endswith(_INTERCEPTED):
        return attention
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    name = attention + _INTERCEPTED
    if name not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(name, partial(_intercepted, attention))
        if attention in ALL_MASK_ATTENTION_FUNCTIONS:
            AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[attention])
    return name


def _intercepted(
    attention: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,  # some models give it by transformers' name
    **arguments: Any,
) -> tuple[Tensor, Any]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # Each modeling file has an eager function of its own.
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    own = ALL_ATTENTION_FUNCTIONS.get_interface(attention, eager)

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Any) -> tuple[Tensor, Any]:
        return own(module, query, key, value, mask, **arguments)

    call = Call(module, query, key, value, attention_mask, arguments, attend)
    reader = getattr(key, _READER, None)
    if reader is None and (readers := _readers.get(module)):
        reader = readers[-1]
    output = attend(query, key, value, attention_mask) if reader is None else reader(call)
    for listener in tuple(_listeners.get(module, ())):
        listener(call)
    return output
