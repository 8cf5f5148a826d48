"""What settings cost: bits per value, and the bytes of a whole cache."""

from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from semkv_bench.config.compose import build
from semkv_bench.errors import MissingError, UsageError
from semkv_bench.models.load.shape import ModelShape
from semkv_bench.plan.plan.settings import quantizers
from semkv_bench.models.known import published
from semkv_bench.settings.setting import FULL, Setting, uniform_settings
from semkv_bench.console import human_bytes
from semkv_bench.models.known import CONFIGURATION, PUBLICATION
from semkv_bench.plan.storage import published_words, show_storage, storage_rows

__all__ = [
    "cache_bytes",
]




def cache_bytes(setting: Setting, shape: ModelShape, tokens: int) -> int:
    """Bytes of one sequence's cache of ``tokens`` tokens; layers that are not quantized stay in 16 bits."""
    per_token = shape.kv_heads * shape.head_dim * 2
    quantized = len(shape.quantized_layers)
    bits = per_token * (
        quantized * setting.storage(shape.head_dim).effective_bits + (shape.layers - quantized) * 16
    )
    return round(bits * tokens / 8)
















