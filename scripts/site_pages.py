"""Writes the sources of the documentation site to build/site: the pages of docs/, and those that come from the code.

``make docs`` runs it and then mkdocs.
"""

import re
import shutil
from pathlib import Path

from semkv_bench.commands import COMMANDS
from semkv_bench.config.keys import Key, groups_of, own_keys

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "site"
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#:\s]+)(#[^)]*)?\)")

API = {
    "semkv_bench.sweep.python": ("sweep",),
    "semkv_bench.report.python": ("report", "compare"),
    "semkv_bench.records.frames": ("read_records",),
    "semkv_bench.packed.cache": ("SemKVCache",),
    "semkv_bench.quantizers.base": ("Quantizer", "Coder"),
    "semkv_bench.quantizers.pair": ("Pair", "read_quantizer"),
    "semkv_bench.importance.base": None,
    "semkv_bench.tasks.base": ("Task", "Example"),
    "semkv_bench.engine.backend": ("Backend", "Session", "Answers"),
    "semkv_bench.settings.setting": ("Setting",),
    "semkv_bench.stats.result": None,
}


def write_site(out: Path = OUT) -> None:
    """Write all pages anew."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(ROOT / "docs", out)
    readme = (ROOT / "README.md").read_text()
    index = (out / "README.md").read_text()
    (out / "README.md").unlink()
    (out / "index.md").write_text(_relinked(readme, ROOT, out))
    (out / "contents.md").write_text(_relinked(index, ROOT / "docs", out))
    for page in sorted(out.glob("*.md")):
        if page.name not in ("index.md", "contents.md"):
            page.write_text(_relinked(page.read_text(), ROOT / "docs", out))
    (out / "configuration.md").write_text(configuration_page())
    (out / "api.md").write_text(api_page())
    shutil.copy(ROOT / "CHANGELOG.md", out / "changelog.md")
    (out / "contributing.md").write_text(_relinked((ROOT / "CONTRIBUTING.md").read_text(), ROOT, out))


def configuration_page() -> str:
    """Every command with its keys, their defaults and meanings, from the configuration files."""
    lines, shown = ["# Commands and configuration", ""], {}
    for name, command in COMMANDS.items():
        lines += [f"## semkv-bench {name}", "", f"{command.about}.", ""]
        if command.example:
            lines += ["```", f"semkv-bench {name} {command.example}", "```", ""]
        if command.config is None:
            continue
        lines += _table(own_keys(command.config))
        for group in groups_of(command.config):
            head = f"**{group.name}** (`{group.default}`)"
            if (
                shown.setdefault(group.name, (name, group.keys))[1] == group.keys
                and shown[group.name][0] != name
            ):
                lines += [f"{head}: as in `{shown[group.name][0]}`.", ""]
                continue
            choices = ", ".join(f"`{choice}`" for choice in group.choices)
            lines += [f"{head}: {choices}", "", *_table(group.keys)]
    return "\n".join(lines) + "\n"


def api_page() -> str:
    """What mkdocstrings fills in from docstrings."""
    lines = ["# Python interface", ""]
    for module, names in API.items():
        for name in names or ("",):
            lines += [f"::: {module}{f'.{name}' if name else ''}", ""]
    return "\n".join(lines)


def _table(keys: "list[Key] | tuple[Key, ...]") -> list[str]:
    if not keys:
        return []
    rows = []
    for key in keys:
        only = f" ({', '.join(key.only)})" if key.only else ""
        rows.append(f"| `{key.name}` | `{_cell(key.default)}` | {_cell(key.meaning + only)} |")
    return ["| key | default | meaning |", "|---|---|---|", *rows, ""]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _relinked(text: str, folder: Path, out: Path) -> str:
    """``text`` with its links as they are on the site; what is not on the site is named without a link."""

    def link(found: re.Match[str]) -> str:
        picture, words, target, anchor = found[1], found[2], found[3], found[4] or ""
        path = (folder / target).resolve()
        if path == ROOT / "README.md":
            return f"[{words}](index.md{anchor})"
        if path == ROOT / "docs" / "README.md" or path == ROOT / "docs":
            return f"[{words}](contents.md)"
        if path.is_relative_to(ROOT / "docs"):
            return f"{picture}[{words}]({path.relative_to(ROOT / 'docs').as_posix()}{anchor})"
        if picture and path.exists():
            copied = out / "pictures" / path.relative_to(ROOT)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copied)
            return f"![{words}]({copied.relative_to(out).as_posix()})"
        return words

    return _LINK.sub(link, text)


if __name__ == "__main__":
    write_site()
