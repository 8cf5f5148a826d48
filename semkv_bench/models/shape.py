"""TODO-DOC"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
import torch
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.configuration_utils import PreTrainedConfig
import hashlib
import importlib.util
import io
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import Any
import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging
from semkv_bench.engine.engine.rows import full_attention_layers, layer_types
from semkv_bench.models.device_map import check_device_map, check_devices_present, check_modules, input_device
from semkv_bench.errors import MissingError, SemkvError, UsageError
from semkv_bench.models.hub import hub_reachable
from semkv_bench.files import cache_dir

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



@dataclass(frozen=True)
class ModelShape:
    """What the cache of a model looks like, read from its configuration without its weights."""

    layers: int
    quantized_layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    max_positions: int | None

    @classmethod
    def of(cls, config: Any) -> "ModelShape":
        """Shape of a transformers configuration (text part)."""
        text = config.get_text_config(decoder=True)
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return cls(
            layers=len(layer_types(config)),
            quantized_layers=full_attention_layers(config),
            kv_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
            head_dim=head_dim,
            max_positions=getattr(text, "max_position_embeddings", None),
        )

