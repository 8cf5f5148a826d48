"""Results of kvpress' evaluation: a folder with ``predictions.csv``, ``config.yaml`` and ``metrics.json``."""

import ast
import json
import re
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import yaml

from semkv_bench.errors import MissingError, UsageError
from semkv_bench.importers.rows import Imported, Occurrences, Options, Row, fingerprint, folder

__all__ = ["looks_like", "read"]

_UNPARTED = re.compile(r"""(['"])\s+(['"])""")
_NEEDED = ("task", "question", "answer", "predicted_answer")


def looks_like(path: Path) -> bool:
    """Is ``path`` such a result?"""
    return path.is_dir() and (path / "predictions.csv").exists()


def read(path: Path, options: Options) -> Imported:
    """Rows scored as RULER does it: of question answering any reference, else the share of the references found.

    ``bits`` follow from the measured ``compression_ratio`` column. The log has no ids; an example is known by task,
    question and answer, and those that share all three are taken in their order.
    """
    file = folder(path, "one kvpress result") / "predictions.csv"
    if not file.exists():
        raise MissingError(f"{path} holds no predictions.csv; give the folder of one kvpress result")
    try:
        frame = pd.read_csv(file, keep_default_na=False)
    except (ValueError, pd.errors.ParserError) as error:
        raise UsageError(f"{file} is not readable CSV ({str(error).splitlines()[0]})") from error
    if missing := [name for name in _NEEDED if name not in frame]:
        raise UsageError(f"{file} has no column {', '.join(missing)}")
    _check_scored_here(path)
    if options.task is not None:
        frame = frame[frame["task"].astype(str) == options.task]
    rows, again = [], Occurrences()
    for line in frame.to_dict("records"):
        answers = _answers(line["answer"])
        key = fingerprint(str(line["task"]), str(line["question"]), answers)
        rows.append(
            Row(
                str(line["task"]),
                f"{key}-{again.number(key)}",
                ruler_score(str(line["task"]), str(line["predicted_answer"]), answers),
                prediction=str(line["predicted_answer"]),
            )
        )
    notes = []
    if again.repeated:
        notes.append(
            f"{again.repeated} questions occur more than once, and the log tells no context: equal ones are paired "
            "in their order"
        )
    config = _config(path)
    return Imported(rows, _bits(frame), config.get("model"), notes)


def ruler_score(task: str, prediction: str, answers: Sequence[str]) -> float:
    """Share of the answers found in ``prediction``, without case; 1 for any of them in question answering."""
    text = prediction.lower()
    found = [answer.lower() in text for answer in answers]
    if not found:
        return 0.0
    return float(any(found)) if task.startswith("qa") else sum(found) / len(found)


def _check_scored_here(path: Path) -> None:
    dataset = str(_config(path).get("dataset") or path.name.partition("__")[0])
    if not dataset.startswith("ruler"):
        raise UsageError(
            f"{path} is a result on {dataset}; kvpress keeps no score of an example, and only ruler's is known here. "
            "Score the predictions and give them by records=FILE"
        )


def _config(path: Path) -> dict:
    try:
        content = yaml.safe_load((path / "config.yaml").read_text())
    except (OSError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def _bits(frame: pd.DataFrame) -> float | None:
    if "compression_ratio" not in frame:
        return None
    removed = pd.to_numeric(frame["compression_ratio"], errors="coerce").dropna()
    return None if removed.empty else 16 * (1 - float(removed.mean()))


def _answers(text: object) -> list[str]:
    """The references, which pandas or numpy wrote as a list in text."""
    if not isinstance(text, str):
        return [str(text)]
    # numpy leaves the commas out, and Python would join such strings: ['1234567' '7654321']
    for parse in (json.loads, lambda given: ast.literal_eval(_UNPARTED.sub(r"\1, \2", given))):
        try:
            found = parse(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(found, list | tuple):
            return [str(answer) for answer in found]
    return [text]
