"""What is compared: grid points, mixes, deletions."""

from semkv_bench.settings.allocation import Allocation, Prune, TwoLevel, Uniform
from semkv_bench.settings.setting import FULL, GridOnly, Pruned, Setting, TwoLevelMixes, uniform_settings

__all__ = [
    "FULL",
    "Allocation",
    "GridOnly",
    "Prune",
    "Pruned",
    "Setting",
    "TwoLevel",
    "TwoLevelMixes",
    "Uniform",
    "uniform_settings",
]
