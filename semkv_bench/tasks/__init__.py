"""Tasks: encoded examples with references, and the score of a prediction."""

from semkv_bench.tasks.base import Example, FollowUp, Task
from semkv_bench.tasks.longbench import LongBench
from semkv_bench.tasks.synthetic import Synthetic

__all__ = ["Example", "FollowUp", "LongBench", "Synthetic", "Task"]
