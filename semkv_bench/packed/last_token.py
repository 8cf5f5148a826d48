"""The prompt's last token, fed a second time where the first time came too early.

Where tokens are ranked over all layers together, no layer can be coded before the model has run through, so
the last prompt token attends to a full-precision cache. Then the decoder is run once more for this token
alone, and what it says replaces what it said. The cache meets the decoder by a hook on all modules, which
is there from the cache's construction until its prompt is in.
"""

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle
from transformers.cache_utils import Cache

__all__ = ["feed_last_again", "stop"]


def feed_last_again(
    cache: Cache, ready: Callable[[Cache], bool], code: Callable[[Cache], None]
) -> RemovableHandle:
    """Arrange for the last token of the prompt to see the coded cache; ``stop`` calls it off.

    ready: has the prompt gone through all layers without being coded? code: code it now.
    A decoder that is given masks in another form than [rows, tokens] is not run again.
    """
    cache.activate_past_recording()
    reference = weakref.ref(cache)
    handle: list[RemovableHandle] = []

    def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        """After the decoder's call with the prompt: code the cache, and run the last token once more."""
        cache = reference()
        if cache is None:
            handle[0].remove()
            return None
        if not hasattr(output, "last_hidden_state") or not ready(cache):
            return None
        inputs = dict(zip(inspect.signature(module.forward).parameters, args, strict=False)) | kwargs
        if all(value is not cache for value in inputs.values()):
            return None
        again = _last(inputs)
        if again is None:
            stop(cache, handle[0])
            return None
        code(cache)
        cache.crop(-1)
        stop(cache, handle[0])
        last = module(**again).last_hidden_state
        output.last_hidden_state = torch.cat([output.last_hidden_state[:, :-1], last], dim=1)
        return output

    handle.append(register_module_forward_hook(hook, with_kwargs=True))
    weakref.finalize(cache, handle[0].remove)
    return handle[0]


def stop(cache: Cache, handle: RemovableHandle) -> None:
    """Remove the hook, and let sliding layers keep no more than their window again."""
    handle.remove()
    for layer in cache.layers:
        if getattr(layer, "record_past", False):
            if layer.get_seq_length():
                layer.crop(0)
            layer.record_past = False


def _last(inputs: dict[str, Any]) -> dict[str, Any] | None:
    """The same inputs for the last token alone."""
    mask = inputs.get("attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):
        return None
    again = dict(inputs)
    for name in ("input_ids", "inputs_embeds"):
        if again.get(name) is not None:
            again[name] = again[name][:, -1:]
    if again.get("position_ids") is not None:
        again["position_ids"] = again["position_ids"][..., -1:]
    return again
