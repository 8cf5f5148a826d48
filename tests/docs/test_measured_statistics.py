"""Every figure that docs/statistics.md quotes as measured stands in a committed file of the calibration."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MEASURED = ROOT / "results" / "calibration"
SETTLED = {"0.05", "0.046"}  # alpha, and the rate from which rates are measured again


def _numbers(tree):
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, list):
        for each in tree:
            yield from _numbers(each)
    elif isinstance(tree, (int, float)):
        yield float(tree)


def test_figures_of_the_documentation_were_measured():
    known = set(SETTLED)
    for page in MEASURED.glob("*.md"):
        known |= set(re.findall(r"\d+\.\d+", page.read_text()))
    for file in MEASURED.glob("*.json"):
        held = json.loads(file.read_text())
        for value in _numbers(held):
            known |= {
                f"{abs(value):.{digits}f}" for digits in ((2, 3, 4) if file.stem == "evalstats" else (3, 4))
            }
        for cell in held.get(file.stem.removesuffix("_300"), []) if isinstance(held, dict) else []:
            if "says_holds" in cell:
                known.add(f"{cell['says_holds'] + cell['says_degraded']:.3f}")
            if file.stem == "exact":
                known.add(f"{cell['false_equivalent'] + cell['false_degraded']:.3f}")
    quoted = (ROOT / "docs" / "statistics.md").read_text().partition("## What was measured")[2]
    figures = re.findall(r"\d+\.\d+", re.sub(r"evalstats` \(\d+\.\d+\.\d+", "", quoted))
    assert len(figures) > 200
    assert sorted({figure for figure in figures if figure not in known}) == []
