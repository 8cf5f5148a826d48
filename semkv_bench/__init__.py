"""semkv-bench: where an LLM's quality falls off a cliff as its KV cache loses bits.

From Python: ``sweep(model, tokenizer, methods=[...])`` runs, ``report(run)`` and ``compare(runs)`` analyse,
``read_records(path)`` gives the rows.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from semkv_bench.lazy import on_demand

if TYPE_CHECKING:
    from semkv_bench.packed import SemKVCache
    from semkv_bench.records.frames import read_records
    from semkv_bench.report.python import compare

__all__ = ["SemKVCache", "__version__", "compare", "read_records", "report", "sweep"]

__version__ = "0.1.0"

_on_demand = on_demand(__name__)


def __getattr__(name: str) -> Any:
    # Rooms that can be called; all on demand, so that the version can be had without importing torch.
    return import_module(f"{__name__}.{name}") if name in ("report", "sweep") else _on_demand(name)
