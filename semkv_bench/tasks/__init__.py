"""Tasks: encoded examples with references, and the score of a prediction."""

from typing import TYPE_CHECKING

from semkv_bench.lazy import on_demand

if TYPE_CHECKING:
    from semkv_bench.tasks.base import Example, FollowUp, Task
    from semkv_bench.tasks.jsonl import Jsonl
    from semkv_bench.tasks.longbench import LongBench
    from semkv_bench.tasks.longbench_multiturn import LongBenchMultiturn
    from semkv_bench.tasks.longform import Longform
    from semkv_bench.tasks.ruler import Ruler
    from semkv_bench.tasks.synthetic import Synthetic
    from semkv_bench.tasks.synthetic_multiturn import SyntheticMultiturn
    from semkv_bench.tasks.text import Text

__all__ = [
    "Example",
    "FollowUp",
    "Jsonl",
    "LongBench",
    "LongBenchMultiturn",
    "Longform",
    "Ruler",
    "Synthetic",
    "SyntheticMultiturn",
    "Task",
    "Text",
]

__getattr__ = on_demand(__name__)
