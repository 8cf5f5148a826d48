"""What settings cost: bits per value, and the bytes of a whole cache."""

from semkv_bench.models.shape import ModelShape
from semkv_bench.settings.setting import Setting

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
