"""The report in a terminal: verdict first, then tables that fold rather than cut a number."""

import re
from dataclasses import replace

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from semkv_bench.report.formatting import DASH, clean, fixed, known, plural, signed
from semkv_bench.report.lookup import (
    compared_settings,
    dead_tasks,
    sample_noun,
    task_title,
    telling_settings,
)
from semkv_bench.report.page import page_of
from semkv_bench.report.tables import Table, task_rows
from semkv_bench.stats.result import Report

__all__ = ["show", "show_table"]

_STYLES = {
    "reference": "dim",
    "equivalent": "green",
    "no_worse": "green",
    "floor": "cyan",
    "degraded": "bold red",
    "inconclusive": "yellow",
    "insensitive": "magenta",
}
_GAP = 2
_NARROW = 60
_ASCII = str.maketrans({DASH: "-", "…": "~", "≈": "~", "★": "*", "†": "+"})


_DOCUMENTS_ONLY = ("figures", "details", "tasks", "examples", "run", "reading", "configuration")


def show(report: Report, context: dict, console: Console) -> None:
    """Print the page of ``report`` to ``console``, without what only documents have room for.

    Tables wider than the console are continued in further tables; plain text where it is no terminal.
    """
    printer, page = _Printer(console), page_of(report, context)
    printer.line(page.lead[0], "bold")
    for sentence in page.lead[1:]:
        printer.line(sentence, "dim")
    for section in page.sections:
        if section.name in _DOCUMENTS_ONLY:
            continue
        sample = f" ({_sample_words(report, context)})" if section.name == "settings" else ""
        printer.heading(section.title + sample)
        if section.finding:
            printer.line(section.finding)
        if section.name == "settings":
            printer.line(section.note, "dim")
        for point in section.points:
            printer.line(point)
        for caption, data in section.tables:
            if caption:
                printer.console.print()
                printer.line(caption)
            printer.table(data, page.operating_point)
    _show_tasks(report, printer)


def show_table(table: Table, console: Console, title: str) -> None:
    """Print ``table`` under ``title``, in as many parts as the width asks for."""
    printer = _Printer(console)
    printer.heading(title)
    printer.table(table)


def _sample_words(report: Report, context: dict) -> str:
    sizes = [
        (report.n_examples, "example" if sample_noun(report) == "example" else "answer"),
        (report.n_clusters, "cluster"),
        (len(report.tasks), "task"),
    ]
    words = ", ".join(plural(number, noun) for number, noun in sizes)
    if known(report.confidence):
        words += f", {100 * report.confidence:g}% intervals"
    source = context.get("source")
    return f"{words}, from {clean(source)}" if source else words


def _show_tasks(report: Report, printer: "_Printer") -> None:
    reference = report.reference
    names = telling_settings(report)
    key = max([len("task"), *(cell_len(task_title(report, task)) for task in report.tasks)])
    room = printer.width - min(key, printer.key_width) - _GAP - len("0.000")
    shown = []
    for name in names:
        need = _GAP + max(cell_len(clean(name)), len("+0.000"))
        if need <= room:
            shown.append(name)
            room -= need
    tested = [row.setting for row in compared_settings(report)]
    shown = [name for name in tested if name in shown]
    rows = []
    for task, (full, *others) in task_rows(report, [reference, *shown]):
        cells = [signed(result.diff) if result else DASH for result in others]
        rows.append((task_title(report, task), fixed(full.score) if full else DASH, *cells))
    left = len(tested) - len(shown)
    printer.heading(f"Tasks (score under {clean(reference)}, then differences from it)")
    titles = ("task", clean(reference), *(clean(name) for name in shown))
    printer.table(Table(titles, (False,) + (True,) * (len(shown) + 1), tuple(rows)))
    for words in dead_tasks(report):
        printer.line(words)
    if left:
        printer.line(f"{plural(left, 'more setting')} per task: see report.md or report.html.", "dim")


class _Printer:
    """Writes text and tables to a console, in ASCII where that is all it can show."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.width = console.width
        self.key_width = max(12, console.width // 4 if console.width >= _NARROW else console.width * 9 // 20)
        self.ascii = not console.encoding.lower().startswith("utf")

    def text(self, words: str, style: str = "") -> Text:
        """``words`` as they can be shown here."""
        if self.ascii:
            words = words.translate(_ASCII).encode("ascii", "replace").decode()
        return Text(words, style=style)

    def line(self, words: str, style: str = "") -> None:
        """One paragraph; not broken where the output goes to a file, so that it can be searched."""
        self.console.print(self.text(words, style), soft_wrap=not self.console.is_terminal)

    def heading(self, words: str) -> None:
        """An empty line, and ``words`` set apart where the terminal can."""
        self.console.print()
        self.line(words, "bold underline" if self.console.is_terminal else "")

    def table(self, table: Table, marked: str | None = None) -> None:
        """``table``, broken by columns into as many tables as the width asks for, the first one repeated.

        A narrow console gets one table of the most telling columns, and the names of the others.
        """
        star = " *" if self.ascii else " ★"
        if marked is not None:
            rows = ((f"{row[0]}{star}" if row[0] == marked else row[0], *row[1:]) for row in table.rows)
            table = replace(table, rows=tuple(rows))
        titles = table.short_titles or table.titles
        widths = [
            max([*(cell_len(word) for word in title.split()), *(cell_len(row[index]) for row in table.rows)])
            for index, title in enumerate(titles)
        ]
        widths[0] = min(widths[0], self.key_width)
        shown = [index for index in range(1, len(titles)) if not (table.detail and table.detail[index])]
        if self.width < _NARROW:
            self._narrow(table, shown, widths)
            return
        for number, columns in enumerate(_packed(widths, self.width, shown)):
            if number:
                self.console.print()
            self._part(table, [0, *columns], widths)

    def _narrow(self, table: Table, shown: list[int], widths: list[int]) -> None:
        telling = [index for index in shown if table.keep and table.keep[index]] or shown
        columns = _packed(widths, self.width, telling)[0]
        self._part(table, [0, *columns], widths)
        left = [table.titles[index] for index in shown if index not in columns]
        if left:
            self.line(f"A wider terminal shows {', '.join(left)}.", "dim")

    def _part(self, table: Table, columns: list[int], widths: list[int]) -> None:
        part = RichTable(
            box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold", collapse_padding=True
        )
        for index in columns:
            part.add_column(
                self.text((table.short_titles or table.titles)[index]),
                justify="right" if table.numeric[index] else "left",
                overflow="fold",
                min_width=widths[index],
                max_width=widths[index],
            )
        for row in table.rows:
            name = self.text(_folded(row[0], widths[0]))
            part.add_row(
                name,
                *(self.text(row[index], _style(table.titles[index], row[index])) for index in columns[1:]),
            )
        self.console.print(part)


def _folded(name: str, width: int) -> str:
    """``name`` over several lines, broken behind its separators where that fits ``width``."""
    lines = [""]
    for piece in re.findall(r"[^@:/]*[@:/]|[^@:/]+", name):
        if lines[-1] and cell_len(lines[-1] + piece) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(lines)


def _style(title: str, cell: str) -> str:
    return _STYLES.get(cell, "") if title == "verdict" else ""


def _packed(widths: list[int], width: int, columns: list[int]) -> list[list[int]]:
    """``columns`` in groups whose widths fit into ``width`` beside column 0."""
    groups: list[list[int]] = [[]]
    room = width - widths[0]
    for index in columns:
        need = _GAP + widths[index]
        if groups[-1] and need > room:
            groups.append([])
            room = width - widths[0]
        groups[-1].append(index)
        room -= need
    return groups
