"""The typed result: its JSON is that of the schema, nothing is lost on the way, and what is wrong is named."""

import copy
import json
from pathlib import Path

import jsonschema
import pandas as pd
import pytest
from planted_records import planted

from semkv_bench.stats import StatsOptions, analyze
from semkv_bench.stats.result import Report

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "docs/report.schema.json").read_text())
WRITTEN = sorted((ROOT / "results/small").glob("*/report.json"))


@pytest.fixture(scope="module")
def report() -> Report:
    frame = planted(2, examples=90)
    turns = pd.concat([frame.assign(turn=0), frame.assign(turn=1)])
    turns["quantizer"] = "affine"
    return analyze(turns, StatsOptions(margin=0.1, resamples=200))


def test_the_json_of_a_report_is_that_of_the_schema(report):
    content = json.loads(json.dumps(report.to_json(), allow_nan=False))
    jsonschema.validate(content, SCHEMA)
    assert content["cliff"]["status"] == "located" and content["turns"]


@pytest.mark.parametrize("field", ["cache_bits", "p_no_worse", "verdict"])
def test_the_schema_asks_for_every_promised_field(report, field):
    content = json.loads(json.dumps(report.to_json()))
    del content["settings"][1][field]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(content, SCHEMA)


def test_a_report_comes_back_from_its_json(report):
    assert Report.from_json(json.loads(json.dumps(report.to_json()))) == report


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.parent.name)
def test_written_reports_lose_no_field(path):
    content = json.loads(path.read_text())
    if "overview" in content:
        pytest.skip("an overview, not a report")
    again = Report.from_json(content).to_json()
    _holds(again | {"schema": content["schema"]}, content)


def _holds(whole, part):
    """``whole`` has everything that ``part`` has, but for what schema 2 says by another name."""
    if isinstance(part, dict):
        if "clusters_to_choose" in part:
            part = {key: value for key, value in part.items() if key != "p_equivalence"}
        for key, value in part.items():
            if key != "n_needed_80":
                _holds(whole[key], value)
    elif isinstance(part, list):
        assert len(whole) == len(part)
        for one, other in zip(whole, part, strict=True):
            _holds(one, other)
    else:
        assert whole == part


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("schema",), 9, "not a report of schema 1 or 2"),
        (("margin",), "wide", "report.margin is not a number"),
        (("settings",), 3, "report.settings is not a list"),
        (("settings", 1, "diff_ci"), [0.0], "diff_ci is not a list of 2"),
        (("settings", 1, "n"), 1.5, "is not a whole number"),
        (("cliff",), {}, "report.cliff has no status"),
        (("tasks",), [], "report.tasks is not an object"),
    ],
)
def test_what_is_wrong_is_named(report, path, value, words):
    content = copy.deepcopy(report.to_json())
    place = content
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(ValueError, match=words):
        Report.from_json(content)
