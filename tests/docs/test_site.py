"""The documentation site: its pages are written from docs/ and from the code, and all that it names is there."""

import importlib
import importlib.util

import pytest
import yaml
from guides import ROOT

from semkv_bench.commands import COMMANDS


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "scripts" / "site_pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(script, tmp_path_factory):
    out = tmp_path_factory.mktemp("site") / "pages"
    script.write_site(out)
    return out


def _named(nav):
    for entry in nav:
        inner = next(iter(entry.values())) if isinstance(entry, dict) else entry
        yield from [inner] if isinstance(inner, str) else _named(inner)


def test_every_page_is_in_the_navigation(site):
    named = set(_named(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert named == {page.name for page in site.glob("*.md")}


def test_links_lead_to_pages_of_the_site(site, script):
    for page in site.glob("*.md"):
        for _, _, target, _ in script._LINK.findall(page.read_text()):
            assert (site / target).exists(), f"{page.name}: {target}"


def test_every_command_and_key_is_on_the_page_of_the_configuration(site):
    text = (site / "configuration.md").read_text()
    for name in COMMANDS:
        assert f"## semkv-bench {name}\n" in text
    for key in ("`grid.levels`", "`stats.margin`", "`engine.max_rows`", "`judge.false_alarm`"):
        assert key in text


def test_what_the_python_page_names_exists(script):
    for module, names in script.API.items():
        held = importlib.import_module(module)
        for name in names or ():
            assert getattr(held, name).__doc__
