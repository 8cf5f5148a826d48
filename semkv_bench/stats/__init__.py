"""Paired, clustered statistics: equivalence, the cliff and the operating point."""

from semkv_bench.stats.analysis import analyze
from semkv_bench.stats.options import StatsOptions
from semkv_bench.stats.runaway import exact_mcnemar

__all__ = ["StatsOptions", "analyze", "exact_mcnemar"]
