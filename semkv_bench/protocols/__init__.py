"""What is quantized, and when."""

from typing import TYPE_CHECKING

from semkv_bench.lazy import on_demand

if TYPE_CHECKING:
    from semkv_bench.protocols.base import Protocol
    from semkv_bench.protocols.generation import Generation
    from semkv_bench.protocols.multiturn import MultiTurn
    from semkv_bench.protocols.prefill import Prefill
    from semkv_bench.protocols.through import Through

__all__ = ["Generation", "MultiTurn", "Prefill", "Protocol", "Through"]

__getattr__ = on_demand(__name__)
