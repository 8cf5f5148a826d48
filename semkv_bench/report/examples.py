"""What was asked, expected and answered, example by example: in the page, and by ``semkv-bench show``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.text import Text

from semkv_bench.errors import UsageError
from semkv_bench.records.folder import read_run
from semkv_bench.records.prompts import read_prompts
from semkv_bench.records.schema import REFERENCE
from semkv_bench.report.formatting import clean, fixed, plural
from semkv_bench.report.lookup import compared_settings
from semkv_bench.stats.result import Report

__all__ = ["Answer", "Example", "examples_of", "show_examples", "worst_examples"]

MOST = 200
_LONGEST = 600
_ONLY = ("all", "lost", "won", "changed")
_UNIT = ["task", "example_id", "seed", "turn"]


@dataclass(frozen=True)
class Answer:
    """What one setting answered: ``same`` as full up to its first difference, ``other`` from there on."""

    setting: str
    score: float
    change: float
    same: str
    other: str
    differs: bool


@dataclass(frozen=True)
class Example:
    """One example: what was asked and expected, full precision's answer, and those of the settings."""

    task: str
    name: str
    question: str
    expected: tuple[str, ...]
    score: float
    text: str
    answers: tuple[Answer, ...]
    anchor: str = ""

    @property
    def lost(self) -> tuple[Answer, ...]:
        """The answers that score less than full precision's."""
        return tuple(answer for answer in self.answers if answer.change < 0)


def worst_examples(
    report: Report, frame: pd.DataFrame | None, prompts: Mapping[tuple, Mapping[str, Any]], most: int = MOST
) -> tuple[list[Example], int]:
    """The ``most`` examples that lost most over the settings, and how many are left out; none without predictions."""
    if frame is None:
        return [], 0
    names = [row.setting for row in compared_settings(report)]
    found = examples_of(frame, prompts, names)
    found.sort(key=lambda each: sum(answer.change for answer in each.lost))
    return [replace(each, anchor=f"example-{k}") for k, each in enumerate(found[:most], 1)], max(
        0, len(found) - most
    )


def examples_of(
    frame: pd.DataFrame, prompts: Mapping[tuple, Mapping[str, Any]], names: Sequence[str]
) -> list[Example]:
    """Every example of ``frame`` that full precision answered, with the answers of the settings ``names``."""
    if "prediction" not in frame or frame["prediction"].isna().all():
        return []
    unit = [name for name in _UNIT if name in frame]
    wanted = frame[frame["setting"].isin([REFERENCE, *names]) & frame["prediction"].notna()]
    several = {name: name in frame and frame[name].nunique() > 1 for name in ("seed", "turn")}
    found = []
    for _, part in wanted.groupby(unit, sort=True):
        rows = {row["setting"]: row for row in part.to_dict("records")}
        if REFERENCE in rows:
            found.append(_example(rows, names, prompts, several))
    return found


def _example(
    rows: Mapping[str, Mapping], names: Sequence[str], prompts: Mapping[tuple, Mapping], several: Mapping
) -> Example:
    full = rows[REFERENCE]
    key = (full["task"], full["example_id"], full.get("prompt_hash"), int(full.get("turn", 0)))
    asked = prompts.get(key, {})
    name = clean(full["example_id"])
    if several["seed"]:
        name += f", seed {int(full['seed'])}"
    if several["turn"]:
        name += f", turn {int(full['turn']) + 1}"
    text = clean(full["prediction"], keep_lines=True)
    return Example(
        task=clean(full["task"]),
        name=name,
        question=_cut(clean(asked.get("question") or "", keep_lines=True)),
        expected=tuple(_cut(clean(answer)) for answer in asked.get("answers") or ()),
        score=float(full["score"]),
        text=_cut(text),
        answers=tuple(_answer(rows[name], text, float(full["score"])) for name in names if name in rows),
    )


def _answer(row: Mapping[str, Any], full: str, score: float) -> Answer:
    text = clean(row["prediction"], keep_lines=True)
    pairs = enumerate(zip(full, text, strict=False))
    same = next((k for k, (one, other) in pairs if one != other), min(len(full), len(text)))
    # Long agreement says nothing: what comes shortly before the difference is enough.
    start = max(0, same - _LONGEST // 2)
    return Answer(
        setting=clean(row["setting"]),
        score=float(row["score"]),
        change=float(row["score"]) - score,
        same=("… " if start else "") + text[start:same],
        other=_cut(text[same:]),
        differs=text != full,
    )


def _cut(text: str) -> str:
    left = len(text) - _LONGEST
    return text if left <= 0 else f"{text[:_LONGEST]} … ({left:,} more characters)"


def show_examples(path: Path, setting: str, only: str, console: Console) -> int:
    """Print the examples of run ``path`` under ``setting``; returns how many. ``only`` is all, lost, won or changed.

    Raises:
        MissingError: there is no such run.
        UsageError: it has no such setting or no answers, or ``only`` is something else.
    """
    if only not in _ONLY:
        raise UsageError(f"only={only} must be one of {', '.join(_ONLY)}")
    frame, _ = read_run(path)
    names = list(dict.fromkeys(frame["setting"]))
    if setting not in names or setting == REFERENCE:
        others = [name for name in names if name != REFERENCE]
        raise UsageError(f"{path} has no setting {setting}; choose one of {', '.join(others)}")
    found = examples_of(frame, read_prompts(path), [setting])
    if not found:
        raise UsageError(f"{path} holds no answers, so there is nothing to show")
    found = [each for each in found if each.answers and _is_wanted(each.answers[0], only)]
    found.sort(key=lambda each: each.answers[0].change)
    for each in found:
        _print(each, console)
    what = "" if only == "all" else f" {only}"
    console.print(f"{plural(len(found), 'example')}{what} under {setting}", highlight=False, markup=False)
    return len(found)


def _is_wanted(answer: Answer, only: str) -> bool:
    return {
        "all": True,
        "lost": answer.change < 0,
        "won": answer.change > 0,
        "changed": answer.differs,
    }[only]


def _print(example: Example, console: Console) -> None:
    (answer,) = example.answers
    console.print(Text(f"{example.task}, {example.name}", style="bold"), soft_wrap=True)
    if example.question:
        console.print(Text(f"  question: {example.question}", style="dim"), soft_wrap=True)
    if example.expected:
        console.print(Text(f"  expected: {' | '.join(example.expected)}"), soft_wrap=True)
    console.print(Text(f"  full {fixed(example.score)}: {example.text}"), soft_wrap=True)
    words = Text(f"  {answer.setting} {fixed(answer.score)}: {answer.same}")
    # The mark must not hang on a style that a file cannot show.
    words.append(
        f"»{answer.other}«" if answer.differs else "(the same)", style="bold red" if answer.differs else "dim"
    )
    console.print(words, soft_wrap=True)
    console.print()
