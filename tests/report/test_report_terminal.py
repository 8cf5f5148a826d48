"""The report in a terminal: verdict first, every number whole at any width."""

import io
import re

import pytest
from rich.cells import cell_len
from rich.console import Console
from typed import headline, limits, show


def shown(report, context, width=100, terminal=False, encoding="utf-8"):
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, newline="\n")
    console = Console(
        file=file, width=width, force_terminal=terminal, color_system="truecolor" if terminal else None
    )
    show(report, context, console)
    file.flush()
    return raw.getvalue().decode(encoding)


def test_the_verdict_comes_first_on_one_line(report, context):
    lines = shown(report, context, width=80).splitlines()
    assert lines[0] == headline(report) and lines[1] == limits(report)


def test_on_a_terminal_the_verdict_folds(report, context):
    text = shown(report, context, width=80, terminal=True)
    assert "\x1b[1m" in text
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert max(cell_len(line) for line in plain.splitlines()) <= 80
    assert " ".join(plain.split()).startswith(headline(report))


def test_no_terminal_no_colours(report, context):
    assert "\x1b" not in shown(report, context)


@pytest.mark.parametrize("width", [60, 80, 100, 140, 160])
def test_no_number_is_cut_at_any_width(report, context, width):
    text = shown(report, context, width)
    tables = text.split("\n\n", 1)[1]
    assert "…" not in text
    assert all(
        cell_len(line) <= width
        for line in tables.splitlines()
        if not line.startswith(("Settings", "Operating", "Cliff", "Every"))
    )
    for row in report["settings"]:
        assert f"{row['score']:.3f}" in tables and f"{row['compression']:.2f}x" in tables
        if row["diff"] is not None:
            low, high = row["diff_ci"]
            assert f"[{low:+.3f}, {high:+.3f}]" in tables


@pytest.mark.parametrize(("width", "parts"), [(80, 2), (160, 1)])
def test_wide_tables_are_continued(report, context, width, parts):
    lines = shown(report, context, width).splitlines()
    assert sum(line.startswith("affine-L16 ") for line in lines) == parts


def test_cliff_operating_point_and_tasks_are_told(report, context):
    text = shown(report, context, 160)
    assert "Cliff: (2.322, 2.807] bits, bootstrap probability 0.86" in text
    assert "(2.322, 2.585]" in text and "0.134" in text
    assert f"Operating point: {report['operating_point']['setting']}, coded part 3.158 effective bits" in text
    for task, results in report["tasks"].items():
        line = next(line for line in text.splitlines() if line.startswith(task))
        assert f"{results['full']['score']:.3f}" in line and f"{results['affine-L5']['diff']:+.3f}" in line


def test_narrow_task_tables_keep_the_ends_of_the_cliff(report, context):
    tasks = shown(report, context, 60).split("Tasks (")[1]
    assert "affine-L5" in tasks and "affine-L7" in tasks and "affine-L2" not in tasks
    assert "more settings per task: see report.md" in tasks


def task_columns(report, context, width=80):
    tasks = shown(report, context, width).split("Tasks (")[1]
    return next(line for line in tasks.splitlines() if line.startswith("task")).split()[2:]


def test_narrow_task_tables_keep_the_operating_point_and_what_is_open(report, context):
    report["cliff"] |= dict.fromkeys(("lower_bits", "upper_bits", "lower_setting", "upper_setting"))
    report["cliff"]["status"] = "undetermined"
    for row in report["settings"][1:]:
        row["verdict"] = "inconclusive" if row["setting"] in ("affine-L16", "affine-L8") else "degraded"
    report["operating_point"] = None
    assert task_columns(report, context)[:3] == ["affine-L16", "affine-L8", "affine-L7"]
    report["settings"][2]["verdict"] = "degraded"
    report["settings"][1]["verdict"] = "equivalent"
    report["operating_point"] = {
        key: report["settings"][1][key] for key in ("setting", "code_bits", "effective_bits", "verdict")
    }
    report["operating_point"]["compression"] = 3.56
    assert task_columns(report, context)[:3] == ["affine-L16", "affine-L8", "affine-L7"]


def test_columns_that_nobody_measured_are_named(report, context):
    for row in report["settings"]:
        row |= {"kl": None, "runaway_rate": None}
    text = shown(report, context, 160)
    assert "Not measured in these records: cache bits, runaway, KL." in text and "runaway  " not in text


def test_plain_ascii_where_the_output_knows_no_more(report, context):
    report["model"] = "模型"
    text = shown(report, context, 80, encoding="ascii")
    assert text.startswith("?? with affine quantization") and "affine-L5" in text


def test_names_are_shown_as_they_are(report, context):
    report["model"] = "[red]model[/red] \x1b[2J"
    report["settings"][1]["setting"] = "[bold]int4[/bold]:smile:"
    text = shown(report, context, 160, terminal=True)
    assert "[red]model[/red]" in text and "[bold]int4[/bold]:" in text and "smile" in text
    assert "\x1b[2J" not in text


def test_an_unfinished_run_says_so(report, context):
    assert "60 of 61 planned examples" in shown(report | {"planned_examples": 61}, context)
    assert "not finished" not in shown(report | {"planned_examples": 60}, context)
