"""Which architectures can be swept, told by what their configuration and class say, and the parts of a model."""

import copy
import inspect
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from semkv_bench.errors import UsageError
from semkv_bench.models.layers import cache_layers

__all__ = [
    "begins_anew",
    "causal_class",
    "check_architecture",
    "check_attention",
    "decoder_of",
    "length_dependent",
    "read_whole",
    "reads_in_parts",
    "supported_attention",
]

# Kinds known to begin with empty recurrent states in a later call of more than one token; of a loaded model
# ``later_calls`` finds it out.
_BEGIN_ANEW = ("jamba", "zamba")


def causal_class(config: Any) -> type[PreTrainedModel] | None:
    """The class that transformers' ``AutoModelForCausalLM`` makes of a configuration; None if it knows none."""
    known = AutoModelForCausalLM._model_mapping
    try:
        found = known[type(config)]
    except KeyError:
        return None
    return found[0] if isinstance(found, (tuple, list)) else found


def check_architecture(config: Any, name: str, remote: bool = False) -> None:
    """Raise UsageError, naming what stands in the way, unless a model of this configuration can be swept.

    remote: its class comes with the checkpoint, so that nothing is known of it here.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise UsageError(f"{name} ({config.model_type}) is an encoder-decoder; only decoders are swept")
    cls = causal_class(config)
    if cls is None:
        if remote:
            return
        raise UsageError(
            f"{name} ({config.model_type}) is no causal language model in transformers: an encoder, or a model of "
            "another kind; only decoders are swept"
        )
    _check_keyword(cls, config, name)
    try:
        layers = cache_layers(config)
    except UsageError as error:
        raise UsageError(f"{name} ({config.model_type}): {error}") from error
    if not any(layer.stores_all for layer in layers):
        kinds = sorted({layer.kind for layer in layers})
        raise UsageError(
            f"{name} ({config.model_type}) has no full-attention layer to quantize: its layers are {', '.join(kinds)}"
        )
    if _looks_ahead(config, cls):
        raise UsageError(
            f"{name} ({config.model_type}) is an encoder: its configuration lets tokens attend to later "
            "ones; only decoders are swept"
        )


def _check_keyword(cls: type, config: Any, name: str) -> None:
    taken = inspect.signature(cls.forward).parameters
    if not {"cache", "past_key_values"} & set(taken) or not getattr(cls, "_supports_cache_class", True):
        raise UsageError(f"{name} ({config.model_type}) has no key-value cache in transformers")


def _looks_ahead(config: Any, cls: type) -> bool:
    """Would a model of ``config`` let tokens attend to later ones? Configurations of encoders say if they may not."""
    text = config.get_text_config(decoder=True)
    if getattr(text, "is_decoder", True) and getattr(text, "causal", True):
        return False
    with torch.device("meta"):
        skeleton = cls(config)
    said = [module.is_causal for module in skeleton.modules() if hasattr(module, "is_causal")]
    return not any(said) if said else _seen_to_look_ahead(config, cls)


@torch.inference_mode()
def _seen_to_look_ahead(config: Any, cls: type) -> bool:
    """Does another last token change what a random model of the kind, one layer deep, says after the earlier ones?"""
    small = copy.deepcopy(config)
    small.num_hidden_layers, small.vocab_size, small.pad_token_id = 1, 16, 0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = cls(small).float().eval()
    ids = torch.arange(1, 8)[None]
    other = torch.cat([ids[:, :-1], torch.tensor([[9]])], dim=1)
    first, second = (model(input_ids=each).logits[:, :-1] for each in (ids, other))
    return not torch.allclose(first, second, atol=1e-4)


def reads_in_parts(config: Any) -> bool:
    """May a prompt be fed in several calls, as far as is known before weights are loaded?"""
    return config.get_text_config(decoder=True).model_type not in _BEGIN_ANEW


def begins_anew(name: str) -> str:
    """What to say of a model whose prompt cannot be fed in parts."""
    return (
        f"{name} begins with empty recurrent states in every call of several tokens, so its prompts cannot be read in "
        "parts; leave engine.prefill_chunk out"
    )


def read_whole(config: Any, name: str) -> str | None:
    """Why prompts of a model cannot be read in parts, as far as its configuration tells; None: they can."""
    if not reads_in_parts(config):
        return begins_anew(name)
    kind = length_dependent(config)
    if kind is None:
        return None
    return (
        f"{name} scales its rotary embedding by how much was read (rope_type={kind}), so its prompts cannot be read "
        "in parts; leave engine.prefill_chunk out"
    )


def length_dependent(config: Any) -> str | None:
    """The kind of rotary scaling of a configuration whose angles hang on the length of the prompt; None: no such."""
    text = config.get_text_config(decoder=True)
    told = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    several = [part for part in told.values() if isinstance(part, dict)] or [told]
    kinds = [part.get("rope_type", part.get("type")) for part in several]
    return next((kind for kind in kinds if kind in ("dynamic", "longrope", "su")), None)


def supported_attention(config: Any, asked: str | None) -> str:
    """The attention implementation to load with: the one asked for, else SDPA where the class has it, else eager."""
    if asked is not None:
        return asked
    cls = causal_class(config)
    return "sdpa" if cls is None or cls._supports_sdpa else "eager"


def check_attention(config: Any, asked: str | None) -> None:
    """Raise UsageError for an attention implementation that the model's class does not have."""
    cls = causal_class(config)
    if cls is None or asked in (None, "eager"):
        return
    kinds = {"sdpa": cls._supports_sdpa, "flex_attention": cls._supports_flex_attn}
    if not kinds.get(asked, cls._supports_flash_attn):
        raise UsageError(
            f"model.attention={asked}: {cls.__name__} does not have it; leave model.attention out to get what it has"
        )


def decoder_of(model: Any) -> Any:
    """What turns token ids into hidden states: the model without its head.

    Raises:
        UsageError: no part of the model does that.
    """
    decoder = model.get_decoder()
    # Some models call a part of their head so.
    if decoder is not model and isinstance(decoder, PreTrainedModel):
        return decoder
    inner = [part for part in model.children() if isinstance(part, PreTrainedModel)]
    if len(inner) != 1:
        raise UsageError(f"{type(model).__name__} does not tell which of its parts is the decoder")
    return inner[0]
