"""The report of what the statistics really give."""

import io
import json

import pandas as pd
import pytest
from rich.console import Console
from typed import analyze, headline, limits, show, write

from semkv_bench.stats import StatsOptions


@pytest.fixture(scope="module")
def records(make_run):
    frame, _ = make_run(per_task=40)
    frame["quantizer"] = frame["setting"].str.extract(r"^(affine|turboquant)-", expand=False)
    return frame


def analysed(frame, **options):
    chance = options.pop("chance", {})
    return analyze(
        frame, StatsOptions(margin=0.1, resamples=500, **options), chance=chance, preregistered=True
    )


def written(report, frame, context, folder):
    """Text of report.md, after checking that everything is written and shown."""
    paths = write(report, frame, context, folder)
    assert json.loads(paths["report.json"].read_text()) == report
    console = Console(width=80, file=io.StringIO())
    show(report, context, console)
    assert console.file.getvalue().startswith(headline(report))
    assert headline(report) in paths["report.html"].read_text(encoding="utf-8")
    return paths["report.md"].read_text(encoding="utf-8")


def test_a_whole_run(records, context, tmp_path):
    report = analysed(records)
    text = written(report, records, context, tmp_path)
    assert headline(report) == (
        "SmolLM2-135M-Instruct with affine quantization holds down to 2.807 bits (L=7) and collapses "
        "at 2.322 (L=5); cheapest safe cache: affine-L7, coded part 3.333 effective bits per value, "
        "4.8x smaller than 16-bit."
    )
    assert "intervals have level 95%." in text and "percentile bootstrap" in text and "worse / better" in text
    assert "half of the examples (60)" in text and "Not measured in these records: cache bits." in text


@pytest.mark.slow
def test_two_quantizers_repeats_and_a_second_reference(records, context, tmp_path, without_figures):
    other = records[records["kind"] == "uniform"].replace({"quantizer": {"affine": "turboquant"}})
    other["setting"] = other["setting"].str.replace("affine", "turboquant")
    again = records[records["setting"] == "full"].assign(setting="full-again")
    frame = pd.concat([records, other, again], ignore_index=True)
    frame = pd.concat([frame, frame.assign(seed=1)], ignore_index=True)
    report = analysed(frame)
    report["planned_examples"] = 300
    text = written(report, frame, context, tmp_path)
    assert "; with turboquant it holds down to 2.807 bits (L=7)" in headline(report)
    assert "- Cliff of affine: (2.322, 2.807] bits" in text and "- Cliff of turboquant: (2.322," in text
    assert "120 of 240 recorded examples repeat others" in text
    assert "Full precision run again (full-again) differs from itself by 0.000" in text
    assert "240 of 300 planned examples" in text
    assert "full-again" not in limits(report)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("levels", "chance", "words"),
    [
        ((16, 8, 7), 0.0, "down to 2.807 bits, is shown to lose quality (no positive control)"),
        ((4, 3, 2), 0.0, "collapses already at 2.0 bits (L=4, int2), the most bits tested"),
        ((16, 8, 7, 6, 5, 4, 3, 2), 0.95, "is not shown to be above the chance level of 0.950"),
    ],
    ids=["no positive control", "above the grid", "at chance"],
)
def test_runs_that_find_no_safe_setting(records, context, tmp_path, levels, chance, words, without_figures):
    names = ["full", *(f"affine-L{level}" for level in levels)]
    frame = records[records["setting"].isin(names)]
    report = analysed(frame, chance=dict.fromkeys(frame["task"].unique(), chance))
    assert words in headline(report) and report["operating_point"] is None
    assert words in written(report, frame, context, tmp_path)


@pytest.mark.slow
def test_scores_of_another_engine(records, tmp_path):
    frame = records.loc[
        records["kind"].isin(["full", "uniform"]), ["task", "example_id", "setting", "code_bits", "score"]
    ]
    report = analysed(frame)
    text = written(report, frame, {"source": "scores.csv"}, tmp_path)
    assert headline(report).endswith(
        "cheapest safe cache: affine-L7, 2.807 code bits (effective bits not recorded)."
    )
    assert "Not measured in these records: effective bits, cache bits, coded part, runaway, KL." in text
    assert not (tmp_path / "figures/kl_vs_bits.svg").exists()
