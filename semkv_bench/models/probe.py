"""Heads and dimensions of a model's cache, seen by one forward call without weights."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.cache_utils import DummyLayer
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import logging as transformers_logging

from semkv_bench.errors import UsageError
from semkv_bench.grid.cost import SideShape

__all__ = ["Probed", "first_position", "probe_layers"]

_TOKENS = 4
_MOST_BYTES = 2**31


@dataclass(frozen=True)
class Probed:
    """What one layer gave the cache for each token, None where it gave nothing, and the values of its states."""

    keys: SideShape | None = None
    values: SideShape | None = None
    state_values: int = 0


def probe_layers(config: PreTrainedConfig) -> tuple[Probed, ...]:
    """What every layer of the cache holds, from a forward call of a few tokens.

    On the meta device, where even the largest model takes no memory; a small model whose path depends on data is
    called on zeros instead. Layers that are alike are run once. Raises UsageError where the call ends before all
    layers were seen.
    """
    seen, failed, size = _called(config, "meta")
    if failed is not None and size <= _MOST_BYTES:
        seen, failed, _ = _called(config, "cpu")
    if failed is not None:
        told = str(failed).strip().partition("\n")[0]
        raise UsageError(
            f"what the cache of {config.model_type} holds could not be found out without its weights "
            f"({type(failed).__name__}: {told}); such a model cannot be swept"
        ) from failed
    return seen


def first_position(config: PreTrainedConfig) -> int:
    """Where the model's positions begin: behind that of padding in models like RoBERTa, else at 0."""
    # Only models like BERT tell kinds of tokens apart; nobody else's need be built.
    if not hasattr(config, "type_vocab_size") or config.pad_token_id is None:
        return 0
    with _quiet(), torch.device("meta"):
        modules = _skeleton(_decoder_config(config)).modules()
        behind = any(hasattr(module, "create_position_ids_from_input_ids") for module in modules)
    return config.pad_token_id + 1 if behind else 0


def _called(config: PreTrainedConfig, device: str) -> tuple[tuple[Probed, ...], Exception | None, int]:
    """What the layers hold, the error that ended the call too early if one did, and the bytes of what was run."""
    with _quiet(), torch.device("meta"), torch.no_grad():
        # Nobody looks for padding where there is no such token.
        model = _skeleton(_decoder_config(config))
        vars(model.config)["pad_token_id"] = None
        cache = DynamicCache(config=model.config)
        twins, repeated = _run_once(model, cache)
    skipped = {module for layer in repeated for module in layer.modules()}
    run = [module for module in model.modules() if module not in skipped]
    size = sum(p.nbytes for module in run for p in module.parameters(recurse=False))
    failed = None
    with _quiet(), torch.device(device), torch.no_grad():
        if device != "meta":
            for module in run:
                module._apply(lambda x: torch.zeros_like(x, device=device), recurse=False)
        try:
            ids = torch.zeros(1, _TOKENS, dtype=torch.long)
            model(input_ids=ids, use_cache=True, **{_cache_keyword(model): cache})
        except Exception as error:
            failed = error
    seen = tuple(_probed(cache.layers[twin]) for twin in twins)
    if not any(map(_unseen, seen, cache.layers)):
        failed = None  # what broke off came after the last layer's cache
    return seen, failed, size


def _skeleton(config: PreTrainedConfig) -> nn.Module:
    """The model on the default device, with eager attention: it looks into no mask."""
    how = {"dtype": torch.bfloat16, "attn_implementation": "eager"}
    try:
        decoder = _decoder_class(config)
        if decoder is None:
            model = AutoModelForCausalLM.from_config(config, **how)
        else:
            model = decoder._from_config(config, **how)
    except Exception as error:
        told = (str(error).strip() or type(error).__name__).partition("\n")[0]
        raise UsageError(
            f"transformers makes no model of kind {config.model_type} from this configuration "
            f"({type(error).__name__}: {told})"
        ) from error
    return model.eval()


def _decoder_config(config: PreTrainedConfig) -> PreTrainedConfig:
    text = config.get_text_config(decoder=True)
    # A copy: building a model writes its attention into the configuration, which a loaded model shares.
    return deepcopy(text if type(text) in MODEL_FOR_CAUSAL_LM_MAPPING else config)


def _decoder_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Of a configuration within another one, which no automatic class knows: the class that stands beside it."""
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    beside = sys.modules.get(type(config).__module__.replace(".configuration_", ".modeling_"))
    named = (value for name, value in vars(beside).items() if name.endswith("ForCausalLM")) if beside else ()
    return next((cls for cls in named if getattr(cls, "config_class", None) is type(config)), None)


def _cache_keyword(model: nn.Module) -> str:
    return "cache" if "cache" in signature(type(model).forward).parameters else "past_key_values"


def _run_once(model: nn.Module, cache: DynamicCache) -> tuple[list[int], list[nn.Module]]:
    """Let every layer that is like an earlier one give what that gave.

    Returns the number of each one's earlier twin, and the layers that are not run.
    """
    count = len(cache.layers)
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if not lists:
        return list(range(count)), []
    first: dict[Any, int] = {}
    twins, repeated = [], []
    for number, (layer, stored) in enumerate(zip(lists[0], cache.layers, strict=True)):
        parameters = tuple((name, parameter.shape) for name, parameter in layer.named_parameters())
        kind = (type(layer), type(stored), getattr(stored, "sliding_window", None), parameters)
        twins.append(first.setdefault(kind, number))
        if twins[-1] != number:
            layer.forward = _repeating(lists[0][twins[-1]])
            repeated.append(layer)
        else:
            layer.forward = _as_far_as_seen(layer.forward, stored)
    return twins, repeated


def _as_far_as_seen(forward: Callable[..., Any], stored: Any) -> Callable[..., Any]:
    """A layer's forward call; where experts behind attention need data to be chosen, its input is handed on."""

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except RuntimeError:
            if getattr(stored, "keys", None) is None:
                raise
            return args[0] if args else next(iter(kwargs.values()))

    return run


def _repeating(twin: nn.Module) -> Callable[..., Any]:
    """The forward call of a layer that gives what its twin gave: without data, one is as good as the other."""
    given = []
    twin.register_forward_hook(lambda module, inputs, output: given.append(output))
    return lambda *args, **kwargs: given[0]


def _probed(layer: Any) -> Probed:
    states = [getattr(layer, name, None) or {} for name in ("conv_states", "recurrent_states")]
    held = sum(s.numel() for kind in states for s in kind.values() if isinstance(s, Tensor))
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if keys is None or values is None or not keys.numel():
        return Probed(state_values=held)
    if keys.shape[2] > _TOKENS:
        raise UsageError(
            f"a layer's cache holds {keys.shape[2]} tokens after {_TOKENS}: the model puts tokens of its own before "
            "the prompt; such a cache cannot be swept"
        )
    sides = (SideShape(side.shape[1], side.shape[3]) for side in (keys, values))
    return Probed(*sides, state_values=held)


def _unseen(probed: Probed, layer: Any) -> bool:
    return probed == Probed() and not isinstance(layer, DummyLayer)


@contextmanager
def _quiet() -> Iterator[None]:
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
