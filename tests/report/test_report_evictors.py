"""Deletion and reading less in a report: curves of evictors, by task and by needle depth, and bits read a step."""

import math

import pandas as pd
import pytest

from semkv_bench.report.figures import draw_all
from semkv_bench.report.sections import sections
from semkv_bench.report.tables import settings_table
from semkv_bench.stats import StatsOptions, analyze

SETTINGS = {
    # kind, keep, metric, scope, cache bits, bits read a step, share of the right answers
    "full": ("full", None, None, None, 16.0, None, 1.0),
    "affine-L16": ("uniform", None, None, None, 4.5, None, 0.95),
    "affine-L5": ("uniform", None, None, None, 3.0, None, 0.6),
    "affine-L16/5@0.5:snapkv:layer": ("mixed", 0.5, "snapkv", "layer", 3.8, None, 0.7),
    "evict@0.5:snapkv:head:seen": ("prune", 0.5, "snapkv", "head:seen", 8.1, None, 0.8),
    "evict@0.25:snapkv:head:seen": ("prune", 0.25, "snapkv", "head:seen", 4.6, None, 0.4),
    "evict@0.25:knorm:adakv:unseen": ("prune", 0.25, "knorm", "adakv:unseen", 5.0, None, 0.1),
    "affine-L16-read@0.25:minmax:32": ("read", 0.25, "minmax", "32", 5.5, 2.2, 0.9),
}


@pytest.fixture(scope="module")
def report():
    rows = []
    for i in range(60):
        for name, (kind, keep, metric, scope, bits, read, right) in SETTINGS.items():
            # Deletion loses the needles that stand early first.
            depth = (i * 7 % 60) / 60
            lost = kind == "prune" and depth < 1 - right
            rows.append(
                {
                    "task": "needles" if i % 2 else "chains",
                    "example_id": str(i),
                    "setting": name,
                    "kind": kind,
                    "quantizer": "affine" if "affine" in name else None,
                    "family": "affine" if "affine" in name else None,
                    "levels": 16 if "L16" in name else 5 if "L5" in name else None,
                    "keep": keep if kind == "prune" else None,
                    **({"high": 16, "low": 5, "fraction": keep} if kind == "mixed" else {}),
                    "metric": metric,
                    "scope": scope,
                    "code_bits": {
                        "full": 16.0,
                        "uniform": math.log2(16 if "L16" in name else 5),
                        "mixed": (math.log2(16) + math.log2(5)) / 2,
                    }.get(kind),
                    "effective_bits": bits,
                    "cache_bits": bits,
                    "read_bits": read,
                    "depths": [depth],
                    "score": float(not lost and (kind == "prune" or (i * 13 % 60) / 60 < right)),
                }
            )
    return analyze(pd.DataFrame(rows), StatsOptions(margin=0.1, resamples=200))


@pytest.mark.slow
def test_scores_fall_where_the_needles_stand_that_are_lost(report):
    assert list(report.depths) == ["first third", "middle third", "last third"]
    lost = "evict@0.5:snapkv:head:seen"
    first, _, last = (found[lost] for found in report.depths.values())
    assert first.n_clusters == last.n_clusters == 20
    assert first.score == pytest.approx(8 / 20) and last.score == 1
    assert first.diff == pytest.approx(-12 / 20) and first.diff_ci[1] < 0
    (section,) = (each for each in sections(report) if each.name == "depths")
    assert "20 clusters in the first third" in section.finding
    (table,) = (table for _, table in section.tables)
    assert len(table.rows) == len(SETTINGS) and any(
        row[0] == lost and "0.400" in row[2] for row in table.rows
    )


def test_without_deletion_there_are_no_depths(report):
    rows = pd.DataFrame(
        [
            {
                "task": "t",
                "example_id": str(i),
                "setting": name,
                "code_bits": bits,
                "score": 1.0,
                "depths": [0.5],
            }
            for i in range(4)
            for name, bits in (("full", 16.0), ("L4", 2.0))
        ]
    )
    assert analyze(rows, StatsOptions(margin=0.1, resamples=200)).depths is None


def test_every_deletion_stands_beside_what_takes_no_more_of_the_whole_cache(report):
    found = {(row.setting, row.against_kind): row for row in report.deletion}
    assert len(found) == len(report.deletion) == 6
    mixed = found["evict@0.25:snapkv:head:seen", "mixed"]
    assert (mixed.against, mixed.against_cache_bits) == ("affine-L16/5@0.5:snapkv:layer", 3.8)
    row = found["evict@0.25:snapkv:head:seen", "uniform"]
    assert (row.against, row.cache_bits, row.against_cache_bits) == ("affine-L16", 4.6, 4.5)
    assert row.verdict == "deletion loses more" and row.diff_ci[1] < 0


@pytest.mark.slow
def test_each_evictor_has_a_curve_in_a_panel_for_each_task(report):
    drawn = {each.name: each for each in draw_all(report)}
    words = drawn["evictors_vs_cache_bits"].description
    assert "snapkv:head:seen: 4.6 bits" in words and "knorm:adakv:unseen: 5" in words
    assert "affine, all kept: 3.0 bits" in words and "snapkv:layer, all kept: 3.8 bits" in words
    svg = drawn["evictors_vs_cache_bits"].svg
    assert all(task in svg for task in ("all tasks", "needles", "chains"))


def test_bits_read_a_step_are_an_axis_of_their_own(report):
    row = next(row for row in report.settings if row.kind == "read")
    assert (row.cache_bits, row.read_bits) == (5.5, 2.2)
    assert report.operating_point is None or report.operating_point.kind != "read"
    drawn = {each.name: each for each in draw_all(report)}
    assert "affine L16, reads blocks: 2.2 bits" in drawn["score_vs_read_bits"].description
    table = settings_table(report)
    place = table.titles.index("bits read a step")
    assert [cells[place] for cells in table.rows if cells[0] == row.setting] == ["2.200"]
