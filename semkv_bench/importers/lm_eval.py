"""Logs of lm-evaluation-harness: ``--log_samples --output_path DIR`` leaves ``samples_<task>_<date>.jsonl``."""

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from semkv_bench.errors import MissingError, UsageError
from semkv_bench.files import json_lines
from semkv_bench.importers.rows import Imported, Options, Row, number_of, one_of, read_json

__all__ = ["looks_like", "read"]

_FILE = re.compile(r"samples_(?P<task>.+)_(?P<date>\d{4}-\d{2}-\d{2}T[\d.:-]+)\.jsonl")


def looks_like(path: Path) -> bool:
    """Is ``path`` such a log?"""
    return bool(_sample_files(path))


def read(path: Path, options: Options) -> Imported:
    """Rows of the newest log of every task below ``path``, one filter and one metric of each.

    Raises UsageError where the log holds several metrics or filters and none was chosen, where a metric is a loss,
    and where several models lie side by side.
    """
    files = _sample_files(path)
    if not files:
        raise MissingError(
            f"{path} holds no samples_<task>_<date>.jsonl; run lm_eval with --log_samples --output_path DIR"
        )
    folders = {file.parent for file in files}
    if len(folders) > 1:
        names = ", ".join(sorted(folder.name for folder in folders))
        raise UsageError(f"{path} holds logs of several models ({names}); give the folder of one")
    newest, notes = _newest(files)
    if options.task is not None:
        if options.task not in newest:
            raise UsageError(f"{path} has no task {options.task}; it holds {', '.join(sorted(newest))}")
        newest = {options.task: newest[options.task]}
    rows = [
        row
        for task, file in sorted(newest.items())
        for row in _rows(task, file, options, _higher_is_better(file, task))
    ]
    return Imported(rows, model=None, notes=notes)


def _sample_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if _FILE.fullmatch(path.name) else []
    return sorted(file for file in path.rglob("samples_*.jsonl") if _FILE.fullmatch(file.name))


def _newest(files: list[Path]) -> tuple[dict[str, Path], list[str]]:
    by_task: dict[str, list[tuple[str, Path]]] = defaultdict(list)
    for file in files:
        match = _FILE.fullmatch(file.name)
        by_task[match["task"]].append((match["date"], file))
    notes = [
        f"task {task} was run {len(dated)} times; the newest, of {max(dated)[0]}, is taken"
        for task, dated in sorted(by_task.items())
        if len(dated) > 1
    ]
    return {task: max(dated)[1] for task, dated in by_task.items()}, notes


def _higher_is_better(file: Path, task: str) -> Mapping[str, Any]:
    date = _FILE.fullmatch(file.name)["date"]
    results = file.with_name(f"results_{date}.json")
    if not results.exists():
        return {}
    content = read_json(results)
    return (content.get("higher_is_better") or {}).get(task) or {} if isinstance(content, dict) else {}


def _rows(task: str, file: Path, options: Options, better: Mapping[str, Any]) -> list[Row]:
    lines = _filtered([row for _, row in json_lines(file)], file, options.filter)
    metric = _metric(lines, file, options.metric)
    if better.get(metric) is False:
        raise UsageError(
            f"{file.name}: {metric} is a loss (lower is better); choose another with metric=NAME"
        )
    rows, seen = [], set()
    for line in lines:
        if "doc_id" not in line:
            raise UsageError(f"{file.name}: a line has no doc_id; is this a log of lm_eval --log_samples?")
        example = str(line["doc_id"])
        if example in seen:
            raise UsageError(f"{file.name}: doc_id {example} occurs twice; was a file appended to?")
        seen.add(example)
        where = f"{file.name}, doc_id {example}: {metric}"
        if isinstance(line.get(metric), list | tuple | dict):
            raise UsageError(f"{where} is a sum to be averaged over a corpus and no score of an example")
        answers = line.get("filtered_resps")
        answer = answers[0] if isinstance(answers, list) and answers else None
        rows.append(
            Row(
                task,
                example,
                number_of(line.get(metric), where),
                fingerprint=line.get("prompt_hash") or line.get("doc_hash"),
                prediction=answer if isinstance(answer, str) else None,
            )
        )
    return rows


def _filtered(lines: list[dict[str, Any]], file: Path, chosen: str | None) -> list[dict[str, Any]]:
    filters = sorted({str(line.get("filter", "none")) for line in lines})
    wanted = one_of(filters or ["none"], chosen, file, "filter", "filter")
    return [line for line in lines if str(line.get("filter", "none")) == wanted]


def _metric(lines: list[dict[str, Any]], file: Path, chosen: str | None) -> str:
    named = sorted({name for line in lines for name in line.get("metrics") or [] if name != "bypass"})
    if not named:
        raise UsageError(f"{file.name} names no metric; lm_eval writes them from version 0.4.5 on")
    return one_of(named, chosen, file, "metric")
