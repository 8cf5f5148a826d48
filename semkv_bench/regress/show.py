"""The outcome in words: one verdict line, a table of what was measured, and the same as data."""

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from semkv_bench.regress.comparison import ALL, Comparison, Shift, cliff_text
from semkv_bench.regress.snapshot import Snapshot
from semkv_bench.report.formatting import divergence, fixed, known, p_value, plain_data

__all__ = ["as_data", "show", "verdict_line"]

_STATUS = {0: "same", 1: "moved", 3: "not judged"}


def verdict_line(outcome: Comparison, label: str) -> str:
    """One sentence: moved or not, and by which witnesses."""
    if outcome.moved:
        witnesses = list(dict.fromkeys(finding.witness for finding in outcome.findings))
        return f"MOVED: {label} differs from its baseline in {', '.join(witnesses)}."
    if not outcome.judged:
        return (
            f"NOT JUDGED: {label}; {outcome.checks} checks agree, but too few of its examples for the rest."
        )
    if not outcome.shifts:
        return f"SAME: {label}; {outcome.checks} checks agree (code and storage only, no sweep)."
    size = outcome.examples
    how = "every record is alike" if outcome.alike else "no difference beyond chance"
    return f"SAME: {label}; {outcome.checks} checks agree, {how} on {size} examples."


def show(outcome: Comparison, old: Snapshot, new: Snapshot | None, console: Console) -> None:
    """Tables, findings and notes, then the verdict line."""
    if outcome.shifts and new is not None:
        console.print(_settings_table(outcome, old, new))
        console.print(_cliff_line(outcome, old, new), highlight=False, soft_wrap=True)
        if not outcome.alike:
            console.print(_power_line(outcome), style="dim", highlight=False, soft_wrap=True)
    for finding in outcome.findings:
        line = f"moved  {finding.witness}: {finding.what} [{finding.certainty}]"
        console.print(line, markup=False, highlight=False, soft_wrap=True, style="red")
    for note in outcome.notes:
        console.print(f"note   {note}", markup=False, highlight=False, soft_wrap=True)
    style = "bold red" if outcome.moved else "bold green" if outcome.judged else "bold yellow"
    line = verdict_line(outcome, old.label)
    console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def as_data(outcome: Comparison, old: Snapshot, new: Snapshot | None, baseline: str) -> dict[str, Any]:
    """Content of regress.json."""
    return plain_data(
        {
            "schema": 1,
            "status": _STATUS[outcome.exit_code],
            "exit_code": outcome.exit_code,
            "verdict": verdict_line(outcome, old.label),
            "baseline": baseline,
            "model": old.identity["model"],
            "protocol": old.identity["protocol"],
            "checks": outcome.checks,
            "examples": outcome.examples,
            "alike": outcome.alike,
            "findings": [vars(finding) for finding in outcome.findings],
            "shifts": [vars(shift) for shift in outcome.shifts],
            "notes": outcome.notes,
            "cliff": {"baseline": old.cliff, "run": None if new is None else new.cliff},
            "operating_point": {
                "baseline": old.operating_point,
                "run": None if new is None else new.operating_point,
            },
            "verdicts": {
                name: [row["verdict"], None if new is None else new.settings[name]["verdict"]]
                for name, row in old.settings.items()
            },
        }
    )


def _settings_table(outcome: Comparison, old: Snapshot, new: Snapshot) -> Table:
    table = Table(
        title=f"baseline -> now, {outcome.examples} examples of both",
        title_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
    )
    table.add_column("setting", overflow="fold")
    table.add_column("verdict", overflow="fold")
    for title in ("score", "p", "KL", "times", "p"):
        table.add_column(title, justify="right", no_wrap=title != "KL")
    by = {(shift.witness, shift.setting): shift for shift in outcome.shifts}
    for name in [*old.names, ALL]:
        kl, score = by.get(("kl", name)), by.get(("score", name))
        row = old.settings.get(name)
        verdict = "" if row is None else _change(row["verdict"], new.settings[name]["verdict"])
        cells = ["", ""] if score is None else [_scores(old, new, name), p_value(score.p_adjusted)]
        cells += (
            ["", "", ""]
            if kl is None
            else [
                _change(divergence(kl.old), divergence(kl.new)),
                fixed(kl.change, 2),
                p_value(kl.p_adjusted),
            ]
        )
        moved = any(shift is not None and shift.moved for shift in (kl, score))
        table.add_row(Text(name), verdict, *cells, style="red" if moved else "")
    return table


def _scores(old: Snapshot, new: Snapshot, name: str) -> str:
    before = old.measures["score"][:, old.names.index(name)].mean()
    after = new.measures["score"][:, new.names.index(name)].mean()
    return _change(fixed(before), fixed(after))


def _cliff_line(outcome: Comparison, old: Snapshot, new: Snapshot) -> str:
    words = f"cliff {_change(cliff_text(old), cliff_text(new))}"
    halfway = _find(outcome, "cliff")
    if halfway is not None:
        places = _change(fixed(halfway.old, 2), fixed(halfway.new, 2))
        words += f", halfway down at {places} bits (p {p_value(halfway.p_adjusted)})"
    return f"{words}; operating point {_change(_point(old), _point(new))}"


def _power_line(outcome: Comparison) -> str:
    """What this comparison could have seen."""
    parts = []
    kl, halfway = _find(outcome, "kl", ALL), _find(outcome, "cliff")
    if kl is not None:
        parts.append(f"KL over all settings by {100 * (kl.visible - 1):.0f} %")
    if halfway is not None and known(halfway.visible):
        parts.append(f"the cliff by {halfway.visible:.2f} bits")
    return f"a change of {' or of '.join(parts)} would be seen nine times in ten" if parts else ""


def _find(outcome: Comparison, witness: str, setting: str = ALL) -> Shift | None:
    found = (s for s in outcome.shifts if (s.witness, s.setting) == (witness, setting))
    return next(found, None)


def _point(snapshot: Snapshot) -> str:
    point = snapshot.operating_point
    return "none" if point is None else f"{point['setting']} ({point['effective_bits']:.3f} effective bits)"


def _change(before: str, after: str) -> str:
    return before if before == after else f"{before} -> {after}"
