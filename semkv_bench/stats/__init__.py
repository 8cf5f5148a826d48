"""Paired, clustered statistics: equivalence, the cliff and the operating point."""

from typing import TYPE_CHECKING

from semkv_bench.lazy import on_demand

if TYPE_CHECKING:
    from semkv_bench.stats.analysis import analyze
    from semkv_bench.stats.options import StatsOptions, stats_options
    from semkv_bench.stats.runaway import exact_mcnemar

__all__ = ["StatsOptions", "analyze", "exact_mcnemar", "stats_options"]

__getattr__ = on_demand(__name__)
