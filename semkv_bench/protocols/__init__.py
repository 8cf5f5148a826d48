"""What is quantized, and when."""

from semkv_bench.protocols.prefill import Prefill

__all__ = ["Prefill"]
