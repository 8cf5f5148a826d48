"""Loss by length of the prompt and depth of the needle."""

import numpy as np
import pandas as pd
import pytest

from semkv_bench.report.place_figure import draw_places
from semkv_bench.report.sections_places import places_section
from semkv_bench.stats import StatsOptions, analyze

OPTIONS = StatsOptions(margin=0.1, resamples=200)
LENGTHS = (1000, 4000)


def _frame(n=50):
    """affine-L4 loses what stands in the first fifth of a long prompt, and nothing else."""
    rows = []
    for length in LENGTHS:
        for index in range(n):
            depth = index / n
            common = {"task": "niah", "example_id": f"n{length}-{index}", "seed": 0, "task_length": length}
            for setting, bits in {"full": 16.0, "affine-L8": 3.0, "affine-L4": 2.0, "affine-L2": 1.0}.items():
                lost = setting == "affine-L2" or (setting == "affine-L4" and length == 4000 and depth < 0.2)
                rows.append(
                    {
                        **common,
                        "depths": [depth],
                        "setting": setting,
                        "code_bits": bits,
                        "score": float(not lost),
                    }
                )
    return pd.DataFrame(rows)


@pytest.fixture(scope="module")
def report():
    return analyze(_frame(), OPTIONS)


def test_every_cell_has_its_own_paired_loss(report):
    found = {(place.length, place.depth): place for place in report.places}
    assert len(found) == 10 and all(place.n_clusters == 10 for place in report.places)
    for (length, depth), place in found.items():
        lost = length == 4000 and depth == (0.0, 0.2)
        row = place.settings["affine-L4"]
        assert row.diff == (-1 if lost else 0)
        low, high = row.diff_ci
        assert (high < 0) == lost and low <= row.diff <= high
    assert sum(p.n_clusters for p in report.places) == report.n_clusters


def test_one_length_or_no_depth_is_no_map():
    frame = _frame()
    assert analyze(frame[frame["task_length"] == 1000], OPTIONS).places == ()
    assert analyze(frame.drop(columns="depths"), OPTIONS).places == ()


def test_needles_on_the_edges_fall_into_the_first_and_last_part():
    frame = _frame(10)
    frame["depths"] = [[0.0] if i % 2 else [1.0] for i in frame["example_id"].str[-1].astype(int)]
    assert {place.depth for place in analyze(frame, OPTIONS).places} == {(0.0, 0.2), (0.8, 1.0)}


def test_table_and_figure_say_it(report):
    section = places_section(report)
    assert section.finding == "10 clusters in a cell."
    ((_, table),) = section.tables
    assert len(table.rows) == 6 and table.titles[2:] == tuple(
        f"{low} to {low + 20} %" for low in range(0, 100, 20)
    )
    (row,) = [row for row in table.rows if row[:2] == ("affine-L4", "4,000")]
    assert row[2].startswith("-1.000 [") and row[3].startswith("0.000")
    drawn = draw_places(report)
    assert "affine-L4, 4,000 tokens, 0 to 20 %: -1.000" in drawn.svg
    assert "4,000 tokens, 0 to 20 % -1.000" in drawn.description
    assert np.all([word in drawn.svg for word in ("<title>", "</svg>")])
