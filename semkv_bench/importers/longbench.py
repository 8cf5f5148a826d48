"""Predictions of LongBench's own script: ``pred/<model>/<task>.jsonl`` with pred, answers, all_classes, length."""

from pathlib import Path

from semkv_bench.errors import MissingError, UsageError
from semkv_bench.files import json_lines
from semkv_bench.importers.rows import (
    Imported,
    Occurrences,
    Options,
    Row,
    fingerprint,
    folder,
)
from semkv_bench.tasks.base import Example
from semkv_bench.tasks.longbench import TASKS, LongBench

__all__ = ["looks_like", "read"]


def looks_like(path: Path) -> bool:
    """Is ``path`` such a folder?"""
    return path.is_dir() and any((path / f"{task}.jsonl").exists() for task in TASKS)


def read(path: Path, options: Options) -> Imported:
    """Rows scored with the benchmark's metrics.

    The files have no ids, and their order differs from run to run where several processes wrote one: an example is
    known by its answers and its length.
    """
    files = [
        file for task in TASKS if (file := folder(path, "one model's predictions") / f"{task}.jsonl").exists()
    ]
    if options.task is not None:
        files = [file for file in files if file.stem == options.task]
    if not files:
        raise MissingError(f"{path} holds no <task>.jsonl of LongBench")
    rows, notes = [], []
    for file in files:
        again = Occurrences()
        for _, line in json_lines(file):
            rows.append(_row(file, line, again))
        if again.repeated:
            notes.append(
                f"{file.name}: {again.repeated} pairs of answers and length occur more than once; equal ones are "
                "paired in their order"
            )
    return Imported(rows, notes=notes)


def _row(file: Path, line: dict, again: Occurrences) -> Row:
    answers = line.get("answers")
    if not isinstance(line.get("pred"), str) or not isinstance(answers, list) or not answers:
        raise UsageError(f"{file}: a line lacks pred or answers; is this a file of LongBench's pred.py?")
    answers = [str(answer) for answer in answers]
    key = fingerprint(answers, line.get("length"))
    classes = line.get("all_classes")
    example = Example(
        task=file.stem,
        example_id=f"{key}-{again.number(key)}",
        seed=0,
        input_ids=(),
        answers=tuple(answers),
        max_new_tokens=1,
        all_classes=tuple(map(str, classes)) if isinstance(classes, list) else None,
    )
    return Row(
        file.stem, example.example_id, LongBench().score(example, line["pred"]), prediction=line["pred"]
    )
