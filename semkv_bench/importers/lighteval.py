"""Details of LightEval: ``details/<model>/<date>/details_<task>_<date>.parquet``, written with --save-details."""

import re
from pathlib import Path
from typing import Any

import pandas as pd

from semkv_bench.errors import MissingError, UsageError
from semkv_bench.importers.rows import Imported, Options, Row, fingerprint, number_of, one_of

__all__ = ["looks_like", "read"]

_FILE = re.compile(r"details_(?P<task>.+)_(?P<date>\d{4}-\d{2}-\d{2}T[\d.:-]+)\.parquet")


def looks_like(path: Path) -> bool:
    """Is ``path`` such a log?"""
    return bool(_files(path))


def read(path: Path, options: Options) -> Imported:
    """Rows of the newest details of every task, by one metric."""
    files = _files(path)
    if not files:
        raise MissingError(
            f"{path} holds no details_<task>_<date>.parquet; run lighteval with --save-details"
        )
    newest: dict[str, Path] = {}
    for file in sorted(files, key=lambda file: _FILE.fullmatch(file.name)["date"]):
        newest[_FILE.fullmatch(file.name)["task"]] = file
    notes = (
        []
        if len(newest) == len(files)
        else [f"{len(files)} logs of {len(newest)} tasks: the newest of each is taken"]
    )
    if options.task is not None:
        newest = {task: file for task, file in newest.items() if options.task in (task, task.split("|")[0])}
    rows = [row for task, file in sorted(newest.items()) for row in _rows(task, file, options.metric)]
    return Imported(rows, notes=notes)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if _FILE.fullmatch(path.name) else []
    return sorted(file for file in path.rglob("details_*.parquet") if _FILE.fullmatch(file.name))


def _rows(task: str, file: Path, chosen: str | None) -> list[Row]:
    try:
        frame = pd.read_parquet(file)
    except Exception as error:
        raise UsageError(f"{file} is not a readable Parquet file: {str(error).splitlines()[0]}") from error
    if missing := [name for name in ("doc", "metric") if name not in frame]:
        raise UsageError(f"{file} has no column {', '.join(missing)}; is it of LightEval 0.13?")
    names = sorted({name for scores in frame["metric"] for name in scores})
    metric = one_of(names, chosen, file, "metric")
    return [
        _row(task, doc, scores, metric, file)
        for doc, scores in zip(frame["doc"], frame["metric"], strict=True)
    ]


def _row(task: str, doc: dict[str, Any], scores: dict[str, Any], metric: str, file: Path) -> Row:
    example = str(doc.get("id"))
    return Row(
        str(doc.get("task_name") or task),
        example,
        number_of(scores.get(metric), f"{file.name}, example {example}: {metric}"),
        fingerprint=fingerprint(doc.get("query")),
    )
