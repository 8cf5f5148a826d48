"""report.json, report.md, report.html and the figures of one report."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import jinja2
import pandas as pd
import yaml
from markupsafe import Markup, escape

from semkv_bench import __version__
from semkv_bench.errors import SemkvError
from semkv_bench.report.access import cliffs_of, compared_settings
from semkv_bench.report.axes import inline_svg
from semkv_bench.report.content import cards, incomplete, reading_notes, remarks, run_facts, samples
from semkv_bench.report.figures import FIGURE_NAMES, Drawn, draw_all
from semkv_bench.report.files import write_all
from semkv_bench.report.formatting import DASH, clean, fixed, known, plain_data, signed, signed_interval
from semkv_bench.report.methods import METHOD_FILES, method_files
from semkv_bench.report.sections import sections
from semkv_bench.report.tables import (
    VERDICT_SIGNS,
    detail_table,
    interval_table,
    settings_table,
    task_rows,
)
from semkv_bench.report.verdict import (
    cliff_words,
    confirmation_words,
    headline,
    limits,
    operating_point_words,
    subject,
)
from semkv_bench.stats.result import Report, TaskResult

__all__ = ["json_bytes", "render", "write"]

# An underscore inside a word means nothing in GitHub's Markdown and stays readable unescaped.
_MARKDOWN_SIGNS = re.compile(r"[\\`*\[|~$]|(?<![0-9A-Za-z])_|_(?![0-9A-Za-z])")


def write(report: Report, frame: pd.DataFrame, context: dict, out: Path) -> dict[str, Path]:
    """Write the whole report into the folder ``out`` and return the path of every file by its name there.

    ``frame`` holds the records it came from (predictions are quoted from it), and
    ``context`` says what was run (``source``, ``config``, ``protocol``, ``environment``, ``prompts``,
    ``seeds``, ``planned_examples``, all optional). report.json depends on ``report`` alone, to
    the byte. Raises SemkvError where a file cannot be written; earlier files are then left as they were.
    """
    context, out = plain_data(context), Path(out)
    figures = draw_all(report)
    page = _page(report, frame, context, figures)
    contents = {
        "report.json": json_bytes(report.to_json()),
        "report.md": render("report.md.j2", page),
        "report.html": render("report.html.j2", page),
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


def _page(report: Report, frame: pd.DataFrame, context: dict, figures: list[Drawn]) -> dict:
    return {
        "title": f"KV-cache cliff report: {subject(report)}",
        "headline": headline(report),
        "limits": limits(report),
        "notice": incomplete(report),
        "remarks": remarks(report),
        "level": f"{100 * report.confidence:g}% " if known(report.confidence) else "",
        "cards": cards(report),
        "figures": figures,
        "settings": settings_table(report),
        "details": detail_table(report),
        "verdict_signs": VERDICT_SIGNS,
        "operating_point": report.operating_point.setting if report.operating_point else None,
        "cliffs": _cliffs(report),
        "point": operating_point_words(report),
        "confirmation": confirmation_words(report),
        "sections": sections(report),
        "tasks": _tasks(report),
        "samples": samples(report, frame),
        "facts": run_facts(report, context),
        "notes": reading_notes(report),
        "configurations": _configurations(context),
        "version": __version__,
    }


def _cliffs(report: Report) -> list[dict]:
    return [
        {
            "title": f"Cliff of {clean(quantizer)}" if quantizer else "Cliff",
            "words": cliff_words(report, quantizer, cliff),
            "intervals": interval_table(cliff),
        }
        for quantizer, cliff in cliffs_of(report)
    ]


def _tasks(report: Report) -> dict:
    """The table of tasks: settings across, tasks down, the reference first."""
    names = [report.reference, *(row.setting for row in compared_settings(report))]
    rows = [
        (clean(task), [_task_cell(result, report.margin) for result in results])
        for task, results in task_rows(report, names)
    ]
    return {"settings": [clean(name) for name in names], "rows": rows}


def _task_cell(result: TaskResult | None, margin: float) -> dict:
    if result is None:
        return {"score": DASH, "diff": "", "bounds": "", "shade": ""}
    diff = result.diff
    bounds = signed_interval(result.diff_ci, 2)
    return {
        "score": fixed(result.score),
        "diff": signed(diff) if known(diff) else "",
        "bounds": "" if bounds == DASH else bounds,
        "shade": _shade(diff, margin) if known(diff) else "",
    }


def _shade(diff: float, margin: float) -> str:
    """How far a difference is beyond the margin, as the name of a background."""
    if abs(diff) <= margin:
        return ""
    if diff > 0:
        return "gain"
    return "loss-1" if -diff <= 3 * margin else "loss-2" if -diff <= 6 * margin else "loss-3"


def _configurations(context: dict) -> list[tuple[str, str]]:
    named = [("Configuration", context.get("config")), ("Protocol fixed beforehand", context.get("protocol"))]
    return [
        (title, clean(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True), keep_lines=True))
        for title, tree in named
        if tree
    ]


def render(name: str, page: Mapping) -> bytes:
    """The template ``name`` filled with ``page``; HTML is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("semkv_bench.report", "templates"),
        autoescape=lambda template: template is not None and ".html" in template,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(md=_markdown, minus=_minus, inline=_inline, breakable=_breakable)
    return environment.get_template(name).render(page).encode("utf-8", "replace")


def _markdown(text: str) -> str:
    """``text`` so that Markdown shows it as it is, also in a table cell."""
    return _MARKDOWN_SIGNS.sub(r"\\\g<0>", str(escape(clean(text)))).strip()


def _minus(text: str) -> str:
    """Numbers with a real minus sign, as the page's proportional type asks for."""
    return text.replace("-", "\u2212")


def _inline(figure: Drawn) -> Markup:
    description = str(escape(figure.description))
    return Markup(inline_svg(figure.svg, figure.name, str(escape(figure.title)), description))


def _breakable(name: str) -> Markup:
    """A name that may be broken behind its separators."""
    return Markup(re.sub(r"(?<=[@:/_])(?=.)", "<wbr>", str(escape(name))))
