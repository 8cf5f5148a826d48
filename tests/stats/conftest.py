"""What the statistics tests share."""

import gc

import pytest

from semkv_bench.stats import StatsOptions


@pytest.fixture(autouse=True, scope="module")
def _quick_collections():
    """multipletests collects garbage on every call, which is slow with torch's modules in memory."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def quick() -> StatsOptions:
    """Options with few resamples."""
    return StatsOptions(resamples=300)
