"""Statistics options refuse values that make no sense, by name."""

import pytest

from semkv_bench.errors import UsageError
from semkv_bench.stats import StatsOptions


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("margin", 0),
        ("margin", 1.0),
        ("margin", "0.03"),
        ("margin", float("nan")),
        ("alpha", 0.5),
        ("alpha", True),
        ("confidence", 1.0),
        ("resamples", 99),
        ("resamples", 1e4),
        ("seed", -1),
        ("average", "mean"),
        ("unpaired", None),
        ("sensitivity", "tasks"),
    ],
)
def test_bad_values_are_named(name, value):
    with pytest.raises(UsageError, match=rf"stats\.{name}.* (must be|is not known)"):
        StatsOptions(**{name: value})


def test_defaults():
    assert StatsOptions() == StatsOptions(0.03, 0.05, "macro", 10_000, 0, 0.95, "error")
