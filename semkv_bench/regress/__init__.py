"""Did anything move since the baseline? Checksums of the code, storage figures, KL, scores and the cliff."""

from semkv_bench.regress.comparison import Comparison, JudgeOptions, compare
from semkv_bench.regress.run import baseline_path, run_regress
from semkv_bench.regress.snapshot import Snapshot, from_run, read_baseline, write_baseline

__all__ = [
    "Comparison",
    "JudgeOptions",
    "Snapshot",
    "baseline_path",
    "compare",
    "from_run",
    "read_baseline",
    "run_regress",
    "write_baseline",
]
