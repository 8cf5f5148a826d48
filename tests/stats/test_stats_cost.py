"""Settings are compared by what their whole caches cost, where records say it."""

import numpy as np
import pandas as pd
import pytest

from semkv_bench.errors import UsageError
from semkv_bench.records.normalize import normalize
from semkv_bench.report.verdict import headline
from semkv_bench.stats import StatsOptions, analyze

# Name: code bits, effective bits, cache bits of even and of odd examples. B's price is less, its caches cost more.
SETTINGS = {
    "full": (16.0, 16.0, (16.0, 16.0)),
    "a-L5": (2.322, 2.6, (3.0, 5.0)),
    "b-L4": (2.0, 2.2, (6.0, 7.0)),
    "a-L2": (1.0, 1.3, (2.0, 4.0)),
}


def _frame(**changes) -> pd.DataFrame:
    right = np.random.default_rng(0).random(200) < 0.8
    rows = [
        {
            "task": "qa",
            "example_id": str(i),
            "setting": name,
            "quantizer": None if name == "full" else name[0],
            "code_bits": code,
            "packed_bits": code,
            "effective_bits": effective,
            "cache_bits": cache[i % 2],
            "score": float(right[i]) * (name != "a-L2"),
        }
        for name, (code, effective, cache) in SETTINGS.items()
        for i in range(200)
    ]
    return pd.DataFrame(rows).assign(**changes)


def _report(frame):
    return analyze(frame, StatsOptions(resamples=200))


def test_the_operating_point_has_the_cheapest_whole_cache():
    report = _report(_frame())
    assert report.operating_point.setting == "a-L5"
    assert report.operating_point.cache_bits == 4.0 and report.operating_point.compression == 4.0
    assert {row.setting: row.cache_bits for row in report.settings} == {
        "full": 16.0,
        "a-L5": 4.0,
        "b-L4": 6.5,
        "a-L2": 3.0,
    }


def test_without_the_cost_of_every_row_the_price_of_a_value_decides():
    frame = _frame()
    frame.loc[frame.index[frame["setting"] == "b-L4"][3], "cache_bits"] = np.nan
    for given in (frame, frame.drop(columns="cache_bits")):
        report = _report(given)
        assert report.operating_point.setting == "b-L4"
        assert report.operating_point.compression == pytest.approx(16 / 2.2)
        assert all(row.cache_bits is None for row in report.settings)


def test_the_full_cache_needs_no_cost_of_its_own():
    frame = _frame()
    frame.loc[frame["setting"] == "full", "cache_bits"] = np.nan
    report = _report(frame)
    assert report.operating_point.setting == "a-L5" and report.settings[0].cache_bits == 16.0


@pytest.mark.parametrize("bits", [-1.0, 40.0])
def test_bits_that_no_cache_has_are_refused(bits):
    with pytest.raises(UsageError, match=r"cache_bits .* from 0 to 32"):
        normalize(_frame(cache_bits=bits))


def _headline(kinds=None, **bits):
    """Headline where the cache bits of settings are ``bits``; a-L2 alone loses."""
    frame = _frame()
    frame["cache_bits"] = frame["setting"].str.replace("-", "_").map({"full": 16.0, "a_L2": 4.0, **bits})
    return headline(
        analyze(frame.assign(kind=frame["setting"].map(kinds or {})), StatsOptions(resamples=100))
    )


def test_a_cache_that_is_not_smaller_is_no_operating_point():
    """Metadata and a map of channels may outweigh what coding saves; 16 bits are cheaper then."""
    assert "cheapest safe cache: a-L5, whole cache 15.90 bits" in _headline(a_L5=15.9, b_L4=16.5)
    assert _headline(a_L5=16.0, b_L4=16.5).endswith(
        "; no setting as good as the 16-bit cache is smaller: a-L5 and b-L4 take as many bits or more."
    )


def test_a_deletion_that_holds_is_said_to():
    kinds = {"b-L4": "prune"}
    assert "cheapest safe cache: a-L5" in _headline(kinds, a_L5=5.0, b_L4=8.0)
    told = _headline(kinds, a_L5=5.0, b_L4=4.0)
    assert "cheapest safe quantized cache: a-L5" in told
    assert told.endswith("; b-L4 deletes tokens and is no worse in fewer bits.")
    told = _headline({"b-L4": "prune", "a-L5": "prune"}, a_L5=5.0, b_L4=4.0)
    assert told.endswith(
        "; no quantized setting is shown to be no worse than the 16-bit cache; "
        "a-L5 and b-L4 delete tokens and are no worse."
    )
