"""What is compared: grid points, mixes, deletions."""

from typing import TYPE_CHECKING

from semkv_bench.lazy import on_demand

if TYPE_CHECKING:
    from semkv_bench.settings.allocation import Allocation, Prune, TwoLevel, Uniform
    from semkv_bench.settings.budgets import BUDGETS, Budget, budget
    from semkv_bench.settings.eviction import Evict, Evictions
    from semkv_bench.settings.one_at_a_time import OneAtATime
    from semkv_bench.settings.reading import BlockReads, ReadAll, Reading
    from semkv_bench.settings.sets import GridOnly, Pruned, TwoLevelMixes, uniform_settings
    from semkv_bench.settings.setting import FULL, Setting

__all__ = [
    "BUDGETS",
    "FULL",
    "Allocation",
    "BlockReads",
    "Budget",
    "Evict",
    "Evictions",
    "GridOnly",
    "OneAtATime",
    "Prune",
    "Pruned",
    "ReadAll",
    "Reading",
    "Setting",
    "TwoLevel",
    "TwoLevelMixes",
    "Uniform",
    "budget",
    "uniform_settings",
]

__getattr__ = on_demand(__name__)
