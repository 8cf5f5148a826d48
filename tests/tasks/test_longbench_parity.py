"""Every recorded score of the benchmark's own scorer, to 1e-9."""

import json
from collections import Counter

import pytest

from semkv_bench.tasks import Example, LongBench
from semkv_bench.tasks.longbench import TASKS


@pytest.fixture(scope="module")
def cases(longbench_data):
    file = longbench_data / "metric_parity.jsonl"
    if not file.is_file():
        pytest.skip("no metric_parity.jsonl")
    return [json.loads(line) for line in file.read_bytes().split(b"\n") if line]


@pytest.mark.quick_cases(10)
# ROUGE-L of long reports takes its time.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "gov_report" else name for name in TASKS]
)
def test_scores_equal_the_benchmarks(cases, name):
    mine = [case for case in cases if case["task"] == name]
    assert mine
    for case in mine:
        classes = case["all_classes"]
        example = Example(
            name, "x", 0, (1,), tuple(case["answers"]), 1, all_classes=classes and tuple(classes)
        )
        score = LongBench().score(example, case["prediction"])
        assert score == pytest.approx(case["official_score"], abs=1e-9, rel=0), (name, case["case"])


def test_all_cases_are_covered(cases):
    assert len(cases) == 1141
    assert set(Counter(case["task"] for case in cases)) == set(TASKS)
