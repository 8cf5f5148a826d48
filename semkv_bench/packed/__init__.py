"""The packed cache: a transformers ``Cache`` that stores codes and metadata instead of 16-bit values."""

from semkv_bench.packed.cache import CacheBytes, SemKVCache

__all__ = ["CacheBytes", "SemKVCache"]
