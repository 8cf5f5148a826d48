"""The line for a model card: what it claims is what the report shows."""

import json
from dataclasses import replace

import pytest
from typed import as_report

from semkv_bench.cli import main
from semkv_bench.report.badge import badge, badge_line


@pytest.fixture
def typed(report):
    return as_report(report)


def test_the_operating_point_with_its_evidence(typed):
    point, line = typed.operating_point, badge_line(typed)
    assert f"`{point.setting}` is no worse than 16 bits within {typed.margin:g}" in line
    assert f"{typed.n_clusters} example" in line and "\n" not in line
    assert badge(typed)["message"].startswith(point.setting)


def test_nothing_is_called_safe_without_an_operating_point(typed):
    bare = replace(typed, operating_point=None)
    assert "no setting is shown to be no worse than 16 bits" in badge_line(bare)
    assert badge(bare) == {
        "schemaVersion": 1,
        "label": "KV cache",
        "message": f"none shown safe within {typed.margin:g}",
        "color": "lightgrey",
    }


def test_exploratory_is_said_and_is_not_green(typed):
    later = replace(typed, preregistered=False)
    assert "exploratory" in badge_line(later) and badge(later)["color"] == "yellow"


@pytest.mark.parametrize(
    ("bits", "said"),
    [
        ({"cache_bits": 4.5}, "whole cache 4.5"),
        ({"cache_bits": None, "effective_bits": 4.25}, "coded part 4.25"),
        ({"cache_bits": None, "effective_bits": None, "code_bits": 4.0}, "4.00 code bits"),
    ],
)
def test_the_price_says_of_what(typed, bits, said):
    assert said in badge_line(replace(typed, operating_point=replace(typed.operating_point, **bits)))


def test_the_command(report, tmp_path, capsys):
    (tmp_path / "report.json").write_text(json.dumps(report))
    assert main(["badge", f"run={tmp_path}"]) == 0
    assert capsys.readouterr().out.startswith("**KV cache**")
    assert main(["badge", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["label"] == "KV cache"
    for given, code in ((["badge"], 2), (["badge", "a=b"], 2), (["badge", "run=nope"], 3)):
        assert main(given) == code
        assert capsys.readouterr().err.count("\n") == 1
