"""report.json, report.md, report.html and the figures of one report."""

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from markupsafe import Markup, escape

from semkv_bench.errors import SemkvError
from semkv_bench.report.figures import FIGURE_NAMES, Drawn, draw_all
from semkv_bench.report.files import write_all
from semkv_bench.report.formatting import DASH, clean, plain_data
from semkv_bench.report.lookup import compared_settings
from semkv_bench.report.methods import METHOD_FILES, method_files
from semkv_bench.report.notes import GLOSSARY
from semkv_bench.report.page import page_of
from semkv_bench.report.plot_style import inline_svg
from semkv_bench.report.tables import VERDICT_SIGNS
from semkv_bench.stats.result import Report

__all__ = ["json_bytes", "render", "write"]

# An underscore inside a word means nothing in GitHub's Markdown and stays readable unescaped.
_MARKDOWN_SIGNS = re.compile(r"[\\`*\[|~$]|(?<![0-9A-Za-z])_|_(?![0-9A-Za-z])")


def write(
    report: Report,
    frame: pd.DataFrame,
    context: dict,
    out: Path,
    prompts: Mapping[tuple, Mapping[str, Any]] | None = None,
) -> dict[str, Path]:
    """Write the whole report into the folder ``out`` and return the path of every file by its name there.

    ``frame`` holds the records it came from (answers are quoted from it), ``prompts`` what was asked and expected (see
    :func:`semkv_bench.records.prompts.read_prompts`), and ``context`` says what was run (``source``, ``config``,
    ``protocol``, ``environment``, ``prompts``, ``seeds``, all optional). report.json depends on ``report`` alone, to
    the byte. Raises SemkvError where a file cannot be written; earlier files are then left as they were.
    """
    context, out = plain_data(context), Path(out)
    figures = draw_all(report)
    page = page_of(report, context, frame=frame, prompts=prompts, figures=figures)
    values = {
        "page": page,
        "verdict_signs": VERDICT_SIGNS,
        "tasks": [clean(task) for task in sorted(report.tasks)],
        "settings": [clean(row.setting) for row in compared_settings(report)],
    }
    contents = {
        "report.json": json_bytes(report.to_json()),
        "report.md": render("report.md.j2", values),
        "report.html": render("report.html.j2", values),
    }
    for figure in figures:
        contents[f"figures/{figure.name}.svg"] = figure.svg.encode()
        contents[f"figures/{figure.name}.png"] = figure.png
    contents |= method_files(report)
    paths = write_all(out, contents)
    _remove_stale(out, set(contents))
    return paths


def json_bytes(content: dict) -> bytes:
    """``content`` as JSON: sorted keys, null for NaN and infinity, a line break at the end."""
    return (json.dumps(plain_data(content), sort_keys=True, indent=2, allow_nan=False) + "\n").encode()


def _remove_stale(out: Path, written: set[str]) -> None:
    """Figures and tables of an earlier report in the same folder must not stand beside this one."""
    figures = {f"figures/{name}.{suffix}" for name in FIGURE_NAMES for suffix in ("svg", "png")}
    for name in (figures | set(METHOD_FILES)) - written:
        try:
            (out / name).unlink(missing_ok=True)
        except OSError as error:
            raise SemkvError(f"cannot remove {out / name}: {error.strerror or error}") from error


def render(name: str, values: Mapping[str, Any]) -> bytes:
    """The template ``name`` filled with ``values``; HTML is escaped."""
    return _environment().get_template(name).render(values).encode("utf-8", "replace")


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("semkv_bench.report", "templates"),
        autoescape=lambda template: template is not None and ".html" in template,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(md=_markdown, number=_number, inline=_inline, breakable=_breakable, term=_term)
    return environment


def _markdown(text: str) -> str:
    """``text`` so that Markdown shows it as it is, also in a table cell."""
    return _MARKDOWN_SIGNS.sub(r"\\\g<0>", str(escape(clean(text)))).strip()


def _number(cell: str, link: str = "") -> Markup:
    """A number with a real minus sign; its difference and interval, which may stand below it, and where it leads."""
    first, *rest = [str(escape(part)) for part in cell.replace("-", "\u2212").split(" ", 1)]
    below = rest[0].replace(" [", "</span> <span class='below'>[") if rest else ""
    shown = f"<a href='#{link}'>{first}</a>" if link and cell != DASH else first
    return Markup(f"{shown} <span class='below'>{below}</span>" if below else shown)


def _term(title: str) -> Markup:
    """A heading, with what it means where the pointer rests on it."""
    meaning = GLOSSARY.get(title, GLOSSARY.get(title.lower()))
    return Markup(f'<abbr title="{escape(meaning)}">{escape(title)}</abbr>') if meaning else escape(title)


def _inline(figure: Drawn) -> Markup:
    description = str(escape(figure.description))
    return Markup(inline_svg(figure.svg, figure.name, str(escape(figure.title)), description))


def _breakable(name: str) -> Markup:
    """A name that may be broken behind its separators."""
    return Markup(re.sub(r"(?<=[@:/_])(?=.)", "<wbr>", str(escape(name))))
