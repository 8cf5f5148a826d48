"""Method against method on the page, as CSV and LaTeX, and over several runs."""

import csv
import io

import numpy as np
import pandas as pd
import pytest

from semkv_bench.cli import main
from semkv_bench.errors import UsageError
from semkv_bench.report.compare import check_comparable, joined
from semkv_bench.report.formatting import DASH
from semkv_bench.report.method_figure import draw_methods
from semkv_bench.report.methods import method_files
from semkv_bench.report.sections import sections
from semkv_bench.stats import StatsOptions, analyze

pytestmark = pytest.mark.usefixtures("without_figures")

OPTIONS = StatsOptions(margin=0.1, resamples=200)


def _frame(**methods: list[float]) -> pd.DataFrame:
    """Records of 60 examples: of each method a share of right answers at 4, 3 and 2 bits, another sample each."""
    rng = np.random.default_rng(5)
    rows = []
    points = [("full", None, 16.0, 1.0)]
    points += [
        (f"{name}-L{2**bits}", name, float(bits), share)
        for name, shares in methods.items()
        for bits, share in zip((4, 3, 2), shares, strict=True)
    ]
    for setting, method, bits, share in points:
        for example, hit in enumerate(rng.random(60) < share):
            rows.append(
                {
                    "task": "qa", "example_id": example, "seed": 0, "setting": setting, "score": float(hit),
                    "kind": "uniform" if method else "full", "quantizer": method, "code_bits": bits,
                    "effective_bits": bits, "cache_bits": bits, "kl": 16.0 - bits,
                }
            )  # fmt: skip
    return pd.DataFrame(rows)


@pytest.fixture(scope="module")
def report():
    return analyze(_frame(one_two=[1.0, 1.0, 0.2], b=[1.0, 0.3, 0.0]), OPTIONS)


def test_the_page_has_every_method_with_its_own_cliff(report):
    (section,) = [each for each in sections(report) if each.name == "methods"]
    cliffs, scores, pairs = (table for _, table in section.tables)
    assert sorted(row[0] for row in cliffs.rows) == ["b", "one_two"]
    by_name = {row[0]: row for row in cliffs.rows}
    assert "b-L8 at 3.0 bits" in by_name["b"][3] and "one_two-L4 at 2.0 bits" in by_name["one_two"][3]
    assert scores.titles[1:5] == ("2.5", "3.0", "3.5", "4.5")
    assert [row[4] for row in scores.rows] == [DASH, DASH]
    assert len(pairs.rows) == 3


def test_csv_holds_the_numbers_of_the_report(report):
    rows = list(csv.DictReader(io.StringIO(method_files(report)["methods.csv"].decode())))
    assert [float(row["bits"]) for row in rows] == [2.5, 3.0, 3.5]
    for row, pair in zip(rows, report.methods.pairs, strict=True):
        assert float(row["diff"]) == pair.diff and float(row["diff_low"]) == pair.diff_ci[0]
        assert row["verdict"] == pair.verdict


def test_latex_is_a_table_with_its_signs_escaped(report):
    text = method_files(report)["methods.tex"].decode()
    assert r"one\_two" in text and "one_two" not in text.replace(r"one\_two", "")
    body = text.split(r"\midrule", 1)[1].split(r"\bottomrule")[0]
    rows = [line for line in body.splitlines() if line.endswith(r"\\")]
    assert len(rows) == 3 and all(line.count(" & ") == 7 for line in rows)


def test_one_method_has_no_section_no_figure_and_no_files():
    alone = analyze(_frame(b=[1.0, 0.3, 0.0]), OPTIONS)
    assert not [each for each in sections(alone) if each.name == "methods"]
    assert draw_methods(alone) is None and method_files(alone) == {}


def test_the_figure_tells_every_method_in_words(report):
    drawn = draw_methods(report)
    assert "one_two: 2.0 bits" in drawn.description and "b: 2.0 bits 0.0" in drawn.description
    assert drawn.png.startswith(b"\x89PNG")


CHARTER = {
    "model": "m",
    "model_config": {"path": "a", "dtype": "float32"},
    "weights": {"bytes": 5},
    "protocol": "prefill",
    "task": {"length": 400},
    "seeds": [0],
    "examples": {"count": 9, "sha256": "x"},
    "engine": {"name": "transformers"},
    "stats": {"margin": 0.03, "alpha": 0.05},
    "quantizer": {"name": "affine"},
}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"weights": {"bytes": 6}}, "weights.bytes: 5 in A, 6 in B"),
        ({"task": {"length": 600}}, "task.length: 400 in A, 600 in B"),
        ({"protocol": "generation"}, "protocol: prefill in A, generation in B"),
        ({"protocol": "through"}, "protocol: prefill in A, through in B"),
        ({"seeds": [1]}, "seeds: [0] in A, [1] in B"),
        ({"examples": {"count": 9, "sha256": "y"}}, "examples.sha256: x in A, y in B"),
        ({"model_config": {"path": "a", "dtype": "bfloat16"}}, "model_config.dtype"),
        ({"stats": {"margin": 0.1, "alpha": 0.05}}, "give stats.margin=... to compare them by"),
        ({"looks": [{"examples": 4}, {"examples": 9}]}, "B is a sequential run, which ends"),
        (
            {"looks": [{"examples": 9}], "stats": {"margin": 0.03, "alpha": 0.05, "race": True}},
            "B is a sequential run, whose settings leave",
        ),
    ],
)
def test_runs_that_differ_in_more_than_methods_are_refused(change, told):
    with pytest.raises(UsageError) as raised:
        check_comparable({"A": CHARTER, "B": CHARTER | change}, {})
    assert told in str(raised.value) and "\n" not in str(raised.value)


def test_runs_that_differ_in_the_method_alone_are_compared():
    other = CHARTER | {"quantizer": {"name": "kivi"}, "model_config": {"path": "b", "dtype": "float32"}}
    check_comparable({"A": CHARTER, "B": other}, {})
    check_comparable({"A": CHARTER, "B": other | {"stats": {"margin": 0.1, "alpha": 0.05}}}, {"margin": 0.05})


def test_a_method_of_both_runs_stays_apart_and_full_is_repeated():
    frame = joined([("A", _frame(b=[1, 0.5, 0], c=[1, 1, 0])), ("B", _frame(b=[1, 0.5, 0]))])
    assert set(frame["quantizer"].dropna()) == {"b (A)", "c", "b (B)"}
    assert set(frame.loc[frame["kind"] == "full", "setting"]) == {"full", "full (B)"}
    assert not frame.duplicated(["task", "example_id", "seed", "setting"]).any()


def test_the_command_compares_two_runs_and_refuses_a_third(local_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sweep = ["sweep", "model=custom", f"model.path={local_folder}", "task.length=300", "subset=[niah_noise]"]
    sweep += ["max_new_tokens=2", "grid.levels=[16,2]", "stats.resamples=100", "engine.noise_examples=0"]
    assert main([*sweep, "per_task=2", "quantizer=affine", "out=a"]) == 0
    assert main([*sweep, "per_task=2", "quantizer=turboquant", "out=b"]) == 0
    assert main([*sweep, "per_task=3", "quantizer=turboquant", "out=c"]) == 0
    assert main(["compare", "runs=[a,b]", "out=versus"]) == 0
    shown = capsys.readouterr().out
    assert "Method against method" in shown
    rows = list(csv.DictReader((tmp_path / "versus/methods.csv").open()))
    assert {(row["first"], row["second"]) for row in rows} == {("affine", "turboquant")}
    assert (tmp_path / "versus/methods.tex").exists()
    assert main(["compare", "runs=[a,c]"]) == 2
    assert "not of the same protocol and examples" in capsys.readouterr().err
    assert main(["compare", "runs=[a]"]) == 2
    assert main(["compare"]) == 2
