"""The one page that is shown as HTML, as Markdown and in a terminal: what it says, in which order."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import yaml

from semkv_bench import __version__
from semkv_bench.console import human_bytes
from semkv_bench.records.schema import REFERENCE
from semkv_bench.report.examples import Example, worst_examples
from semkv_bench.report.figures import Drawn
from semkv_bench.report.formatting import (
    DASH,
    bits_text,
    clean,
    fixed,
    known,
    plural,
    signed,
    signed_interval,
)
from semkv_bench.report.lookup import cliffs_of, compared_settings, dead_tasks, task_title
from semkv_bench.report.notes import Card, cards, incomplete, reading_notes, remarks, run_facts
from semkv_bench.report.section import Section
from semkv_bench.report.sections import sections
from semkv_bench.report.served import served_table
from semkv_bench.report.tables import Table, detail_table, interval_table, settings_table, task_rows
from semkv_bench.report.verdict import (
    cliff_words,
    confirmation_words,
    headline,
    limits,
    operating_point_words,
    subject,
)
from semkv_bench.stats.result import Report, TaskResult

__all__ = ["Page", "page_of"]

_MOST_TASKS_ACROSS = 7


@dataclass(frozen=True)
class Page:
    """A report in words: ``lead`` has at most three sentences, each of which decides something.

    ``anchors`` say by setting which example its cells lead to.
    """

    title: str
    lead: tuple[str, ...]
    cards: tuple[Card, ...]
    sections: tuple[Section, ...]
    operating_point: str | None = None
    anchors: Mapping[Hashable, str] = field(default_factory=dict)
    version: str = __version__


def page_of(
    report: Report,
    context: Mapping[str, Any],
    *,
    frame: pd.DataFrame | None = None,
    prompts: Mapping[tuple, Mapping[str, Any]] | None = None,
    figures: Sequence[Drawn] = (),
) -> Page:
    """The page of ``report``; examples are quoted from ``frame`` with what ``prompts`` say was asked and expected."""
    examples, left_out = worst_examples(report, frame, prompts or {})
    made = (
        Section("figures", "Where quality goes", figures=tuple(figures)),
        _settings(report),
        Section(
            "details",
            "Remaining numbers of every setting",
            note="Intervals of scores, further p-values, agreement with full precision, and sample sizes.",
            tables=(("", detail_table(report)),),
            folded=True,
        ),
        _cliff(report),
        _measured(report),
        _served(report),
        *sections(report),
        _tasks(report, examples),
        Section("remarks", "What to know of these records", points=tuple(remarks(report))),
        _examples(examples, left_out),
        Section("run", "What was run", terms=tuple(run_facts(report, context)), folded=True),
        Section("reading", "How to read this", terms=tuple(reading_notes(report)), folded=True),
        Section("configuration", "Details of configuration", texts=_configurations(context), folded=True),
    )
    point = report.operating_point
    return Page(
        title=f"KV-cache cliff report: {subject(report)}",
        lead=tuple(words for words in (headline(report), limits(report), incomplete(report)) if words),
        cards=tuple(cards(report)),
        sections=tuple(section for section in made if not section.empty),
        operating_point=clean(point.setting) if point else None,
        anchors=_anchors(examples, lambda _, setting: setting),
    )


def _settings(report: Report) -> Section:
    level = f"; intervals have level {100 * report.confidence:g}%" if known(report.confidence) else ""
    table = settings_table(report)
    note = f"Every setting against full precision, example by example; scores run from 0 to 1{level}."
    if report.operating_point:
        note += " ★ is the operating point."
    if table.missing:
        note += f" Not measured in these records: {', '.join(table.missing)}."
    return Section("settings", "Settings", note=note, tables=(("", table),))


def _cliff(report: Report) -> Section:
    points, tables = [], []
    for quantizer, cliff in cliffs_of(report):
        name = f"Cliff of {clean(quantizer)}" if quantizer else "Cliff"
        points.append(f"{name}: {cliff_words(report, quantizer, cliff)}.")
        if fall := cliff.steepest:
            points.append(
                f"{name}, steepest fall of the averages: {signed(-fall.drop)} from {clean(fall.upper_setting)} to "
                f"{clean(fall.lower_setting)}."
            )
        if (intervals := interval_table(cliff)).rows:
            tables.append(
                (
                    f"{name}: outcomes of the bootstrap" if quantizer else "Outcomes of the bootstrap",
                    intervals,
                )
            )
    points.append(f"Operating point: {operating_point_words(report)}.")
    if confirmation := confirmation_words(report):
        points.append(confirmation)
    return Section("cliff", "Cliff and operating point", points=tuple(points), tables=tuple(tables))


def _measured(report: Report) -> Section:
    """Bytes, speed and answers of real buffers, where ``semkv-bench measure`` left them in the run folder."""
    found = report.measured
    if found is None:
        return Section("measured", "Measured in the packed cache")
    predicted = found.predicted_cache_bits
    beside = f", {bits_text(predicted)} predicted by the records" if known(predicted) else ""
    of = plural(found.examples, "example")
    return Section(
        "measured",
        "Measured in the packed cache",
        points=(
            f"{clean(found.setting)} on {of}, {found.device}, {found.dtype}: {human_bytes(found.nbytes)} held "
            f"by {'all packed caches together' if found.examples > 1 else 'the packed cache'}, "
            f"{human_bytes(found.plain_nbytes)} by plain ones.",
            f"Bits per value of the whole cache: {bits_text(found.cache_bits)} measured{beside}; tokens that are not "
            "coded count in 16 bits, and so does the room that their buffer has for more.",
            f"Decoding: {found.tokens_per_second:.1f} tokens a second packed, "
            f"{found.plain_tokens_per_second:.1f} plain.",
            f"Answers as in the sweep: {found.answers_as_in_sweep} of {of} packed, "
            f"{found.plain_answers_as_in_sweep} plain.",
        ),
    )


def _served(report: Report) -> Section:
    """What the engine's servers told of themselves, beside what was asked of them."""
    return Section(
        "served",
        "What the servers said",
        note="Type and size of the cache as each setting's own server tells them. The bits follow from its bytes, "
        "those of full being 16.",
        tables=(("", served_table(report)),) if report.served else (),
    )


def _tasks(report: Report, examples: Sequence[Example]) -> Section:
    """Settings down, tasks across in tables of a few, so that none is wider than a page."""
    names = [report.reference, *(row.setting for row in compared_settings(report))]
    rows = task_rows(report, names)
    anchors = _anchors(examples, lambda each, setting: (each.task, setting))
    tables = []
    for start in range(0, len(rows), _MOST_TASKS_ACROSS):
        part = rows[start : start + _MOST_TASKS_ACROSS]
        table = Table(
            titles=("setting", *(task_title(report, task) for task, _ in part)),
            numeric=(False, *(True for _ in part)),
            rows=tuple(
                (clean(name), *(_cell(results[k]) for _, results in part)) for k, name in enumerate(names)
            ),
            shades=tuple(
                ("", *(_shade(results[k], report.margin) for _, results in part)) for k in range(len(names))
            ),
            links=tuple(
                ("", *(anchors.get((clean(task), clean(name)), "") for task, _ in part)) for name in names
            ),
        )
        tables.append(("", table))
    note = (
        "Score per task and setting with the difference from full precision and its interval; shaded where the "
        "difference is larger than the margin."
    )
    if anchors:
        note += f" {_LINKED}"
    return Section("tasks", "Tasks", note=note, points=dead_tasks(report), tables=tuple(tables))


_LINKED = "A cell leads to the example that lost most there, where it is among those below."


def _anchors(examples: Sequence[Example], key: Callable[[Example, str], Hashable]) -> dict[Hashable, str]:
    """Where the worst example of every ``key(example, setting)`` stands: one that lost there, else any."""
    found: dict[Hashable, str] = {}
    for lost in (True, False):
        for each in examples:
            answers = each.lost if lost else each.answers
            for setting in [answer.setting for answer in answers] + ([] if lost else [REFERENCE]):
                found.setdefault(key(each, setting), each.anchor)
    return found


def _cell(result: TaskResult | None) -> str:
    if result is None:
        return DASH
    if not known(result.diff):
        return fixed(result.score)
    bounds = signed_interval(result.diff_ci, 2)
    return f"{fixed(result.score)} {signed(result.diff)}" + ("" if bounds == DASH else f" {bounds}")


def _shade(result: TaskResult | None, margin: float) -> str:
    """How far a difference is beyond the margin, as the name of a background."""
    if result is None or not known(result.diff) or abs(result.diff) <= margin:
        return ""
    if result.diff > 0:
        return "gain"
    lost = -result.diff / margin
    return "loss-1" if lost <= 3 else "loss-2" if lost <= 6 else "loss-3"


def _examples(examples: Sequence[Example], left_out: int) -> Section:
    note = (
        "The examples that lost most come first (not a random choice). In every answer, what comes behind the first "
        "difference from full precision is marked."
    )
    if left_out:
        note += f" {plural(left_out, 'more example')}: semkv-bench show run=DIR setting=NAME lists all."
    return Section("examples", "Examples", note=note, examples=tuple(examples))


def _configurations(context: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    named = [("Configuration", context.get("config")), ("Protocol fixed beforehand", context.get("protocol"))]
    return tuple(
        (title, clean(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True), keep_lines=True))
        for title, tree in named
        if tree
    )
