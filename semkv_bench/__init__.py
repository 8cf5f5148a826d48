"""semkv-bench: where an LLM's quality falls off a cliff as its KV cache loses bits."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from semkv_bench.packed import SemKVCache

__all__ = ["SemKVCache", "__version__"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # On demand, so that the version can be had without importing torch.
    if name == "SemKVCache":
        from semkv_bench.packed import SemKVCache

        return SemKVCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
