"""Which tests ``make check`` runs for a change."""

import runpy
from pathlib import Path

import pytest

picked = runpy.run_path(str(Path(__file__).parents[1] / "scripts/changed_tests.py"))["tests_of"]


@pytest.mark.parametrize(
    ("changed", "run"),
    [
        ([], []),
        (["semkv_bench/stats/cliff.py"], ["tests/stats"]),
        (["semkv_bench/cli.py"], ["tests/test_cli.py"]),
        (["semkv_bench/stats/cliff.py", "tests/stats/test_stats_cliff.py"], ["tests/stats"]),
        (["tests/config/test_keys.py"], ["tests/config/test_keys.py"]),
        (["tests/stats/planted_records.py"], ["tests/stats"]),
        (["conf/quantizer/affine.yaml"], ["tests/config", "tests/quantizers"]),
        (["conf/metric/mine.yaml"], ["tests/config", "tests/importance"]),
        (["conf/stats/default.yaml"], ["tests/config", "tests/stats"]),
        (["docs/tutorial.md"], ["tests/docs"]),
        (["semkv_bench/nothing_of_that_name.py", "LICENSE"], []),
    ],
)
def test_a_change_is_tested_by_the_tests_of_its_room(changed, run):
    assert picked(changed) == sorted([*run, "tests/test_rooms.py"])
