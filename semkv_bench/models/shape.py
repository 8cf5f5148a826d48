"""TODO-DOC"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
import torch
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.configuration_utils import PreTrainedConfig

__all__ = ["full_attention_layers", "layer_types"]


def layer_types(config: PreTrainedConfig) -> tuple[str, ...]:
    """Attention type of every decoder layer, ``full_attention`` where the configuration names none."""
    text = config.get_text_config(decoder=True)
    named = getattr(text, "layer_types", None)
    if named is not None:
        return tuple(named)
    window = getattr(text, "sliding_window", None) is not None and getattr(text, "use_sliding_window", True)
    return ("sliding_attention" if window else "full_attention",) * text.num_hidden_layers



def full_attention_layers(config: PreTrainedConfig) -> tuple[int, ...]:
    """Indices of the layers whose cache grows with the prompt and is quantized."""
    return tuple(i for i, kind in enumerate(layer_types(config)) if kind == "full_attention")

