"""report.json, report.md and report.html as files: numbers, escaping, determinism, failures."""

import html.parser
import io
import json
import math
import os
import re
import resource
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from thinned import thinned
from typed import as_report, headline, incomplete, limits, show, worst_examples, write

from semkv_bench.errors import SemkvError, UsageError
from semkv_bench.report import examples
from semkv_bench.report.examples import show_examples
from semkv_bench.report.files import write_all
from semkv_bench.report.notes import GLOSSARY
from semkv_bench.report.output import json_bytes
from semkv_bench.report.served import served_of
from semkv_bench.stats.plain import plain

FIGURES = (
    "score_vs_bits",
    "difference_vs_bits",
    "quality_vs_effective_bits",
    "runaway_vs_bits",
    "kl_vs_bits",
    "agreement_vs_bits",
)
HOSTILE = "<script>alert('x')</script> | [a](http://evil.example) `b` **c** \x1b[31m"


class Page(html.parser.HTMLParser):
    """Collects tags with their attributes, the text outside styles, and the cells of every table."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words, self.tables, self._open = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "br", "wbr", "input"):
            self._open.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        assert self._open.pop() == tag, f"{tag} closes out of order"

    def handle_data(self, data):
        if "style" in self._open:
            return
        self.words.append(data)
        if "td" in self._open or "th" in self._open:
            self.tables[-1][-1][-1] += data

    @property
    def text(self):
        return " ".join("".join(self.words).split())


@pytest.fixture(scope="module")
def written(base_report, base_frame, base_context, tmp_path_factory):
    return write(base_report, base_frame, base_context, tmp_path_factory.mktemp("run") / "report")


@pytest.fixture
def page(written):
    return Page(written["report.html"].read_text(encoding="utf-8"))


def test_every_promised_file_is_written(written):
    expected = {"report.json", "report.md", "report.html"}
    expected |= {f"figures/{name}.{suffix}" for name in FIGURES for suffix in ("svg", "png")}
    assert set(written) == expected
    folder = written["report.json"].parent
    assert all(path == folder / name and path.stat().st_size > 1000 for name, path in written.items())
    assert {path for path in folder.rglob("*") if path.is_file()} == set(written.values())


def test_json_is_the_report(written, report):
    assert json.loads(written["report.json"].read_text()) == as_report(report).to_json()


def test_json_bytes_depend_on_the_values_alone(report):
    turned = {key: report[key] for key in reversed(report)}
    turned["settings"] = [{key: row[key] for key in reversed(row)} for row in report["settings"]]
    assert json_bytes(turned) == json_bytes(report)
    assert json_bytes(report).endswith(b"}\n")


def test_json_has_null_for_what_is_no_number(report):
    report["settings"][1] |= {"kl": math.nan, "n": np.int64(60), "diff_ci": [-math.inf, np.float64(0.5)]}
    row = json.loads(json_bytes(report))["settings"][1]
    assert (row["kl"], row["n"], row["diff_ci"]) == (None, 60, [None, 0.5])
    assert b"NaN" not in json_bytes(report)


@pytest.mark.slow
def test_all_files_are_the_same_the_second_time(written, report, frame, context, tmp_path):
    again = write(report, frame, context, tmp_path)
    assert {name: path.read_bytes() for name, path in again.items()} == {
        name: path.read_bytes() for name, path in written.items()
    }


def test_verdict_and_limits_lead_both_documents(written, page, report):
    markdown = written["report.md"].read_text(encoding="utf-8")
    assert markdown.splitlines()[2] == f"**{headline(report)}**"
    assert markdown.splitlines()[4] == limits(report)
    assert page.text.index(headline(report)) < page.text.index(limits(report)) < page.text.index("Settings")


def test_html_tables_hold_the_numbers_of_the_report(page, report):
    settings = {row[0].split(" ★")[0]: row for row in page.tables[0][1:]}
    assert len(settings) == len(report["settings"]) == 13
    for row in report["settings"]:
        cells = settings[row["setting"]]
        assert row["verdict"] in cells[1]
        for cell, value in (
            (cells[2], row["score"]),
            (cells[4], row["code_bits"]),
            (cells[5], row["effective_bits"]),
        ):
            assert cell == ("–" if value is None else f"{value:.3f}")
        if row["diff"] is not None:
            low, high = row["diff_ci"]
            numbers = [float(number.replace("−", "-")) for number in re.findall(r"[−+]?\d\.\d+", cells[3])]
            assert numbers == pytest.approx([row["diff"], low, high], abs=0.00051)
        assert cells[6] == f"{16 / row['effective_bits']:.2f}x"
        assert cells[8] == f"{100 * row['runaway_rate']:.1f}%"


def test_html_task_table_holds_the_numbers_of_the_report(page, report):
    (table,) = [each for each in page.tables if "niah_noise" in each[0]]
    tasks = table[0][1:]
    assert set(tasks) == set(report["tasks"])
    for name, *cells in table[1:]:
        for task, cell in zip(tasks, cells, strict=True):
            result = report["tasks"][task][name.split(" ★")[0]]
            assert cell.startswith(f"{result['score']:.3f}")
            if name != "full":
                assert float(
                    re.match(r"\d\.\d{3} ([−+]?\d\.\d{3})", cell)[1].replace("−", "-")
                ) == pytest.approx(result["diff"], abs=0.00051)


def test_markdown_tables_hold_the_numbers_of_the_report(written, report):
    lines = written["report.md"].read_text(encoding="utf-8").splitlines()
    for row in report["settings"]:
        line = next(
            line for line in lines if line.startswith((f"| {row['setting']} |", f"| {row['setting']} ★ |"))
        )
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert row["verdict"] in cells[1] and cells[2] == f"{row['score']:.3f}"
        if row["diff"] is not None:
            assert float(cells[3].split()[0]) == pytest.approx(row["diff"], abs=0.00051)
    line = [line for line in lines if line.startswith("| affine-L5 |")][2]
    for results in report["tasks"].values():
        assert f"{results['affine-L5']['score']:.3f} {results['affine-L5']['diff']:+.3f} [" in line


def test_markdown_tables_are_rectangular(written):
    lines = written["report.md"].read_text(encoding="utf-8").splitlines()
    blocks = "\n".join(line if line.startswith("|") else "" for line in lines).split("\n\n")
    tables = [block.strip().splitlines() for block in blocks if block.strip()]
    assert len(tables) == 5
    for table in tables:
        assert set(table[1]) <= set("|-: ")
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1


def test_html_asks_nothing_of_the_network(written):
    text = written["report.html"].read_text(encoding="utf-8")
    assert "http://" not in text and "https://" not in text and "//www" not in text and "@import" not in text
    for tag, attributes in Page(text).tags:
        assert tag not in ("script", "img", "iframe", "object", "embed")
        assert attributes.get("src") is None
        assert attributes.get("href", "#").startswith(("#", "data:,"))


def test_identifiers_of_the_page_are_unique_and_lead_somewhere(written):
    text = written["report.html"].read_text(encoding="utf-8")
    names = [attributes["id"] for _, attributes in Page(text).tags if "id" in attributes]
    assert len(names) == len(set(names))
    wanted = set(re.findall(r'(?:href="|url\()#([^")]+)', text))
    wanted |= {name for group in re.findall(r'aria-labelledby="([^"]+)"', text) for name in group.split()}
    assert wanted and wanted <= set(names)


def test_page_is_readable_without_seeing_it(page):
    drawings = [attributes for tag, attributes in page.tags if tag == "svg"]
    assert len(drawings) == len(FIGURES) and all(drawing["role"] == "img" for drawing in drawings)
    assert "affine-L5 0.567" in page.text or "affine-L5 0." in page.text
    heads = [attributes for tag, attributes in page.tags if tag == "th"]
    assert heads and all(head.get("scope") in ("row", "col") for head in heads)


def test_figures_follow_the_theme(written):
    drawing = written["report.html"].read_text(encoding="utf-8").split("<svg", 1)[1].split("</svg>")[0]
    assert "var(--ink)" in drawing and "var(--surface)" in drawing
    assert not re.search(r"#[0-9a-f]{6}", drawing)
    assert "var(--" not in written["figures/score_vs_bits.svg"].read_text()


def hostile_run(frame, report, context):
    """The run with markup in every name that a user gives."""
    name = f"affine-{HOSTILE}"
    frame["setting"] = frame["setting"].replace("affine-L5", name)
    frame["task"] = frame["task"].replace("niah_noise", HOSTILE)
    frame["example_id"] = HOSTILE + frame["example_id"]
    frame["prediction"] = HOSTILE + "\n\n</pre></details>" + frame["prediction"]
    report |= {"model": HOSTILE, "quantizer": [HOSTILE, "affine"], "protocol": HOSTILE}
    report["settings"][5]["setting"] = report["cliff"]["lower_setting"] = name
    report["tasks"][HOSTILE] = report["tasks"].pop("niah_noise")
    for results in report["tasks"].values():
        results[name] = results.pop("affine-L5")
    context["environment"] |= {HOSTILE: {HOSTILE: HOSTILE}}
    context |= {"source": HOSTILE, "config": {HOSTILE: HOSTILE}, "protocol": {"x": [HOSTILE]}}


def test_names_and_predictions_are_escaped_everywhere(frame, report, context, tmp_path):
    hostile_run(frame, report, context)
    paths = write(report, frame, context, tmp_path)
    text = paths["report.html"].read_text(encoding="utf-8")
    page = Page(text)
    assert "<script" not in text and "\x1b" not in text
    assert "script" not in {tag for tag, _ in page.tags}
    assert page.text.count("<script>alert('x')</script>") > 20
    markdown = paths["report.md"].read_text(encoding="utf-8")
    outside_pre = re.sub(r"<pre>.*?</pre>", "", markdown, flags=re.S)
    assert "<script" not in markdown and "\x1b" not in markdown
    assert "\\[a](http" in outside_pre and not re.search(r"(?<!\\)\[a\]\(http", outside_pre)
    for tag in ("pre", "details"):
        assert markdown.count(f"<{tag}>") == markdown.count(f"</{tag}>")
    test_markdown_tables_are_rectangular({"report.md": paths["report.md"]})
    assert json.loads(paths["report.json"].read_text())["model"] == HOSTILE


def prompts_of(frame) -> dict:
    """What was asked and expected, as a run folder keeps it."""
    examples = frame[["task", "example_id"]].drop_duplicates().itertuples(index=False)
    return {
        (task, name, name, 0): {"question": f"What of {name}?", "answers": [f"expected {name}", "or this"]}
        for task, name in examples
    }


def test_examples_show_what_was_asked_expected_and_answered(report, frame, tmp_path, without_figures):
    frame["prompt_hash"] = frame["example_id"]
    paths = write(report, frame, {}, tmp_path, prompts_of(frame))
    text = paths["report.html"].read_text(encoding="utf-8")
    assert text.count('<article class="example') == 60
    assert "<pre>What of niah_noise-3?</pre>" in text and "Expected: expected niah_noise-3 | or this" in text
    assert "The number <mark>number number is" in text and "<em>the same</em>" in text
    linked = set(re.findall(r"href='#(example-\d+)'", text))
    assert linked and linked <= set(re.findall(r'id="(example-\d+)"', text))
    assert "<details><summary>Question" in text


def test_the_worst_come_first_and_the_rest_is_counted(report, frame):
    found, left_out = worst_examples(report, frame, {}, most=10)
    lost = [sum(answer.change for answer in each.lost) for each in found]
    assert (len(found), left_out) == (10, 50) and lost == sorted(lost) and lost[0] < -4
    first = found[0].answers[-1]
    full = frame[(frame["setting"] == "full") & (frame["example_id"] == found[0].name)]["prediction"].iloc[0]
    assert full.startswith(first.same) and not full[len(first.same) :].startswith(first.other[:1])


def test_an_answer_that_ends_early_differs(report, frame):
    frame["prediction"] = ["one two" if name == "full" else "one" for name in frame["setting"]]
    found, _ = worst_examples(report, frame, {})
    answer = found[0].answers[0]
    assert (answer.same, answer.other, answer.differs) == ("one", "", True)


def test_long_answers_are_cut_with_their_length(report, frame):
    frame["prediction"] = "a" * 1500
    found, _ = worst_examples(report, frame, {})
    assert {each.text for each in found} == {"a" * 600 + " … (900 more characters)"}
    assert not any(answer.differs for each in found for answer in each.answers)


def test_no_answers_no_examples(report, frame):
    assert worst_examples(report, frame.drop(columns="prediction"), {}) == ([], 0)
    assert worst_examples(report, frame.assign(prediction=None), {}) == ([], 0)


def test_what_was_run_is_told(page):
    for words in (
        "results/runs/2026-01-05-affine",
        "2.13.0",
        "2026-01-05T09:12:44Z",
        "hash: 9f2c51d0",
        "dtype: float32",
    ):
        assert words in page.text


def test_an_unfinished_run_says_so(report):
    assert incomplete(report | {"planned_examples": 90}).startswith(
        "The run is not finished: 60 of 90 planned examples are in it"
    )
    assert incomplete(report | {"planned_examples": 60}) == incomplete(report) == ""


def foreign(report):
    """The report as foreign records leave it: scores and code bits, nothing else."""
    for row in report["settings"]:
        row |= dict.fromkeys(
            (
                "packed_bits",
                "effective_bits",
                "compression",
                "runaway_rate",
                "runaway_p",
                "kl",
                "top1_agreement",
                "agreement",
            )
        )
    report |= {"model": None, "quantizer": None, "protocol": None, "operating_point": None}


@pytest.mark.slow
def test_what_was_not_measured_is_named_and_not_drawn(report, frame, tmp_path, monkeypatch):
    few = ("score_vs_bits", "difference_vs_bits", "kl_vs_bits")
    monkeypatch.setattr("semkv_bench.report.output.FIGURE_NAMES", few)
    monkeypatch.setattr("semkv_bench.report.figures.FIGURE_NAMES", few)
    write(report, frame, {}, tmp_path)
    foreign(report)
    paths = write(report, frame, {}, tmp_path)
    assert {name for name in paths if name.endswith("svg")} == {
        "figures/score_vs_bits.svg",
        "figures/difference_vs_bits.svg",
    }
    assert not (tmp_path / "figures/kl_vs_bits.svg").exists(), "a figure of the earlier report is left"
    text = Page(paths["report.html"].read_text(encoding="utf-8")).text
    assert "Not measured in these records: effective bits, cache bits, coded part, runaway, KL." in text


@pytest.mark.parametrize(
    "size", thinned(["one task, two settings", "many tasks, many settings"], "one task, two settings")
)
def test_small_and_large_runs(make_run, context, tmp_path, size):
    if size.startswith("one"):
        rows = [
            {"setting": name, "kind": kind, "lost": lost}
            for name, kind, lost in (("full", "full", 0), ("int4", "uniform", 0.3))
        ]
        for row, bits in zip(rows, (16.0, 4.0), strict=True):
            row |= {"code_bits": bits, "packed_bits": bits, "effective_bits": bits}
        frame, report = make_run(tasks=["gsm8k"], per_task=8, rows=rows)
    else:
        rows = [
            {
                "setting": "full" if levels == 1 else f"{'a-very-long-quantizer-name-' * 2}-L{levels}",
                "kind": "full" if levels == 1 else "uniform",
                "code_bits": 16.0 if levels == 1 else math.log2(levels),
                "packed_bits": 16.0 if levels == 1 else math.log2(levels),
                "effective_bits": 16.0 if levels == 1 else math.log2(levels) + 0.5,
                "lost": 0 if levels == 1 else 1 / levels,
            }
            for levels in range(1, 41)
        ]
        frame, report = make_run(tasks=[f"task_{index}" for index in range(21)], per_task=2, rows=rows)
    text = write(report, frame, context, tmp_path)["report.html"].read_text(encoding="utf-8")
    tables = Page(text).tables
    across = [each for each in tables if set(each[0][1:]) & set(report["tasks"])]
    assert all(len(each) == 1 + len(report["settings"]) for each in (tables[0], *across))
    assert [task for each in across for task in each[0][1:]] == sorted(report["tasks"])
    assert max(len(each[0]) for each in across) <= 8


@pytest.mark.parametrize("place", ["taken", "taken/deeper"])
def test_an_impossible_folder_is_one_clear_line(tmp_path, place):
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(SemkvError, match=r"^cannot write .*taken.*") as error:
        write_all(tmp_path / place, {"report.json": b"{}"})
    assert "\n" not in str(error.value)
    assert (tmp_path / "taken").read_text() == "mine"


def test_a_full_disk_leaves_the_earlier_report(report, tmp_path):
    first = {"report.json": json_bytes(report), "report.html": b"a" * 90_000}
    write_all(tmp_path, first)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limit[1]))
    try:
        with pytest.raises(SemkvError, match=r"cannot write .*report\.html: "):
            write_all(tmp_path, {"report.json": b"{}", "report.html": b"b" * 90_000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == first


def test_an_unwritable_report_is_told_by_write(report, frame, context, tmp_path, without_figures):
    (tmp_path / "report.html").mkdir()
    with pytest.raises(SemkvError, match=r"^cannot write .*report\.html: "):
        write(report, frame, context, tmp_path)
    assert not [path for path in tmp_path.rglob("*") if path.name.endswith(".tmp")]


def test_files_have_ordinary_permissions(written):
    mask = os.umask(0)
    os.umask(mask)
    assert written["report.json"].stat().st_mode & 0o777 == 0o666 & ~mask


def test_show_lists_the_answers_behind_a_verdict(frame, monkeypatch):
    frame["prompt_hash"] = frame["example_id"]
    monkeypatch.setattr(examples, "read_run", lambda path: (frame, {}))
    monkeypatch.setattr(examples, "read_prompts", lambda path: prompts_of(frame))
    console = Console(file=io.StringIO(), width=80)
    shown = show_examples(Path("run"), "affine-L5", "lost", console)
    text = console.file.getvalue()
    score = frame.pivot(index="example_id", columns="setting", values="score")
    assert shown == int((score["affine-L5"] < score["full"]).sum()) > 10
    assert text.count("affine-L5 0.000: The number »number number is") == shown
    assert text.endswith(f"{shown} examples lost under affine-L5\n") and "expected: expected niah" in text
    assert show_examples(Path("run"), "affine-L5", "all", console) == 60


@pytest.mark.parametrize(
    ("setting", "only", "words"),
    [
        ("affine-L99", "all", "run has no setting affine-L99; choose one of affine-L16"),
        ("full", "all", "run has no setting full"),
        ("affine-L5", "worst", "only=worst must be one of all, lost, won, changed"),
    ],
)
def test_show_says_what_it_cannot_show(frame, monkeypatch, setting, only, words):
    monkeypatch.setattr(examples, "read_run", lambda path: (frame, {}))
    with pytest.raises(UsageError, match=words):
        show_examples(Path("run"), setting, only, Console(file=io.StringIO()))


def test_the_page_has_contents_a_glossary_and_values_on_hover(written, page):
    text = written["report.html"].read_text(encoding="utf-8")
    assert '<li><a href="#settings">Settings</a></li>' in text
    assert '<abbr title="bits per value of the coded part' in text and len(GLOSSARY) == 10
    assert "<title>affine-L5: score 0." in text
    lead = text.split('<dl class="cards">')[0]
    assert lead.count('<p class="limits">') + lead.count('<p class="verdict">') <= 3
    assert '<span class="star" title="operating point">★</span>' in text


def test_the_whole_cache_leads_where_it_is_known(report):
    for row in report["settings"]:
        row["cache_bits"] = 16.0 if row["kind"] == "full" else 12.5
        row["cache_at"] = {
            tokens: {"cache_bits": 16 / times, "compression": times, "cache_bytes": 10, "full_bytes": 16}
            for tokens, times in (("8192", 1.3), ("32768", 1.5), ("131072", 1.6))
        }
    report["operating_point"] |= {"cache_bits": 12.5}
    report["layers"] = {"total": 6, "quantized": 1}
    assert (
        "whole cache 12.50 bits per value at these lengths, 1.3x smaller than 16-bit (coded part 3.158 effective bits "
        "per value); 1 of 6 layers is coded; at other lengths the whole cache is smaller by 1.3x at 8k, 1.5x at 32k "
        "and 1.6x at 128k tokens"
    ) in headline(report)


def test_every_cell_leads_to_its_worst_example(written, report, frame):
    """Scores by setting and by task lead to an example of that setting and task, the worst where it lost."""
    text = written["report.html"].read_text(encoding="utf-8")
    articles = dict(
        re.findall(r'<article class="example (task-\d+)[^>]*id="(example-\d+)">', text)[::-1]
    )  # the first example of every task
    assert len(articles) == 3
    for name in ("settings", "tasks"):
        table = text.split(f'<table aria-labelledby="{name}">')[1].split("</table>")[0]
        for row in table.split("<tr")[2:]:
            cells = re.findall(r'<td class="number[^"]*">(.*?)</td>', row)
            assert all("href='#example-" in cell for cell in (cells if name == "tasks" else cells[:1]))
    worst, _ = worst_examples(report, frame, {})
    first = next(each for each in worst if any(answer.setting == "affine-L5" for answer in each.lost))
    row = text.split('<span class="name">affine-L5</span>')[1].split("</tr>")[0]
    assert f"href='#{first.anchor}'" in row


@pytest.mark.slow
def test_dead_tasks_are_marked_by_task(report, frame, tmp_path):
    why = "affine-L2 is not shown to lower it by more than 0.2"
    report["assay"] = {
        "sensitive": True,
        "positive_control": "affine-L2",
        "reference_above_chance": True,
        "tasks": ["niah_essay", "variable_tracking"],
        "dead_tasks": {"niah_noise": why},
    }
    paths = write(report, frame, {}, tmp_path)
    told = f"† niah_noise cannot react and is left out of the verdicts: {why}."
    page, markdown = Page(paths["report.html"].read_text()), paths["report.md"].read_text()
    assert told in page.text and told in markdown
    assert "| setting | niah_essay | niah_noise † | variable_tracking |" in markdown
    console = Console(file=io.StringIO(), width=100)
    show(report, {}, console)
    assert told in console.file.getvalue() and "\nniah_noise †" in console.file.getvalue()


@pytest.mark.slow
def test_what_the_servers_said_stands_beside_what_was_asked(report, frame, tmp_path):
    servers = {
        "full": {"keys": "f16", "values": "f16", "mib": 45.0, "cells": 2048, "rotated": False, "build": "b1"},
        "q8_0/q4_0": {"keys": "q8_0", "values": "q4_0", "mib": 9.14, "cells": 1024, "rotated": True},
        "fp8": {"type": "fp8_e4m3", "capacity": 1000.0, "version": "0.32"},
    }
    served = served_of({"servers": servers})
    assert [(row.type, row.build) for row in served] == [
        ("f16", "b1"),
        ("q8_0/q4_0", None),
        ("fp8_e4m3", "0.32"),
    ]
    assert served[0].bits == 16 and served[1].bits == pytest.approx(6.5, abs=0.01) and served[2].bits is None
    report["served"] = plain(served)
    paths = write(report, frame, {"environment": {"servers": servers, "cpu": "x"}}, tmp_path)
    markdown = paths["report.md"].read_text()
    assert "## What the servers said" in markdown
    assert "| q8_0/q4_0 | q8_0/q4_0 | 9.14 | 1024 | 6.500 | yes |" in markdown and "Servers" not in markdown
    assert served_of({}) == ()


@pytest.mark.slow
def test_agreement_of_answers_is_in_table_and_figure(report, frame, tmp_path):
    for row in report["settings"]:
        lost = row["setting"] == "affine-L2"
        row |= {"agreement": 0.123 if lost else 0.987, "agreement_ci": [0.05, 0.2] if lost else [None, None]}
        parting = {"by_token": 0.75, "by_token_ci": [0.7, 0.8], "by_end": 0.2, "by_end_ci": [0.1, 0.3]}
        row["parting"] = parting | {"place": 3.25, "place_ci": [2.5, 4.0]} if lost else None
    paths = write(report, frame, {}, tmp_path)
    markdown = paths["report.md"].read_text()
    assert "| 12.3% |" in markdown and "| [5.0, 20.0] |" in markdown
    assert "| 75.0% [70.0, 80.0] | 20.0% [10.0, 30.0] | 3.2 [2.5, 4.0] |" in markdown
    told = "affine-L2 12.3% (part by a token 75.0%, by an end 20.0%)"
    assert told in Page(paths["report.html"].read_text()).text
    assert "figures/agreement_vs_bits.svg" in paths
