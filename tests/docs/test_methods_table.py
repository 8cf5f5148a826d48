"""The table of methods is that of the configuration."""

import importlib.util

from guides import ROOT

from semkv_bench.config.choices import names_of


def _script():
    spec = importlib.util.spec_from_file_location("methods_table", ROOT / "scripts" / "methods_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_every_method_with_its_bits_as_they_are():
    script = _script()
    page = script.PAGE.read_text()
    assert script.renewed(page) == page, "python scripts/methods_table.py writes it anew"
    for name in names_of("quantizer"):
        assert f"| `{name}` |" in page
        assert name in script.NOTES or "see below" in next(
            line for line in page.splitlines() if f"| `{name}` |" in line
        )
