"""semkv-bench: where an LLM's quality falls off a cliff as its KV cache loses bits."""

__version__ = "0.1.0"
