"""The notebook runs; the page of fields is what the code has."""

import importlib.util
import json

import pytest
from guides import ROOT

from semkv_bench.records.folder import read_run
from semkv_bench.records.schema import COLUMNS, PLACE


def _cells():
    cells = json.loads((ROOT / "docs" / "python.ipynb").read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def _script():
    spec = importlib.util.spec_from_file_location("fields_page", ROOT / "scripts" / "fields_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_notebook_runs_and_its_records_are_on_the_page(
    tmp_path, local_folder, monkeypatch, without_figures, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SEMKV_CACHE", str(tmp_path / "cache"))
    first, *cells = _cells()
    assert first.startswith("MODEL = ")
    held = {"MODEL": str(local_folder), "EACH": 2, "__name__": "notebook"}
    module = type(importlib)("notebook")
    module.__dict__.update(held)
    monkeypatch.setitem(__import__("sys").modules, "notebook", module)
    for cell in cells:
        exec(compile(cell, "python.ipynb", "exec"), module.__dict__)
    said = capsys.readouterr().out
    assert "turboquant-L16" in said and "fine-L4" in said
    assert {pair.bits for pair in module.both.methods.pairs} <= set(module.both.methods.at_bits)
    named = {name for names in _script().RECORD for name in names.split(", ")}
    recorded = set(read_run(module.run)[0].columns) - set(PLACE)
    assert recorded - named == set()
    assert set(COLUMNS) - named == set()


def test_the_page_of_fields_is_up_to_date():
    script = _script()
    assert script.PAGE.read_text() == script.page(), "python scripts/fields_page.py writes it anew"
