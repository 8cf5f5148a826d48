"""What the packed cache asks of a quantizer before it stores anything."""

from semkv_bench.errors import UsageError
from semkv_bench.grid.levels import MAX_LEVELS
from semkv_bench.quantizers import Quantizer

__all__ = ["check_packable"]


def check_packable(quantizer: Quantizer, top: int) -> None:
    """Raise UsageError if a cache cannot store what ``quantizer`` codes at up to ``top`` levels."""
    if reason := quantizer.unpackable():
        raise UsageError(f"SemKVCache cannot pack {quantizer.name}: {reason}")
    stored = quantizer.stored_codes(top)
    if stored > MAX_LEVELS:
        raise UsageError(
            f"SemKVCache packs at most {MAX_LEVELS} codes a value; {quantizer.name} at L={top} takes {stored} codes"
        )
