"""Scores made elsewhere: read a JSONL, CSV or Parquet file into the records the statistics work on."""

import csv
import json
from pathlib import Path

import pandas as pd

from semkv_bench.errors import MissingError, UsageError
from semkv_bench.files import parse_json
from semkv_bench.records.columns import Where
from semkv_bench.records.normalize import normalize
from semkv_bench.records.schema import COLUMNS, plain_name
from semkv_bench.records.values import short

__all__ = ["FORMATS", "read_records"]

FORMATS = (".jsonl", ".csv", ".tsv", ".parquet")

_DELIMITERS = (",", ";", "\t")


def read_records(path: Path | str, *, model: str | None = None) -> pd.DataFrame:
    """Records of a foreign score file, checked and completed; one row per example, seed, turn and setting.

    The file (.jsonl, .parquet, or .csv with commas, semicolons or tabs) needs the columns task, example_id,
    setting, code_bits and score (0..1); the setting ``full`` is the reference. Absent columns become seed 0,
    turn 0, a ``cluster`` (examples that share a document) of its own for each example, the kind that the setting's
    name tells (:func:`semkv_bench.records.names.kind_of`), and null; ``code_bits`` of ``full``
    may be left out. Ids are compared as text. ``model`` keeps the rows of one model, since models are never pooled.

    Raises:
        MissingError: there is no such file.
        UsageError: the file cannot be used; one line that names the row, column or setting.
    """
    path = Path(path)
    readers = dict(zip(FORMATS, (_read_jsonl, _read_csv, _read_csv, _read_parquet), strict=True))
    if path.suffix.lower() not in readers:
        raise UsageError(f"{path}: cannot tell the format from its name; use .jsonl, .csv or .parquet")
    if path.is_dir():
        raise UsageError(f"{path} is a folder; give a file of scores, or run=DIR for a run folder")
    if not path.exists():
        raise MissingError(f"{path} does not exist; give records=FILE with a .jsonl, .csv or .parquet file")
    try:
        frame, where = readers[path.suffix.lower()](path)
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    if frame.empty:
        raise UsageError(f"{path} holds no records")
    return normalize(frame, str(path), where=where, model=model)


def _read_jsonl(path: Path) -> tuple[pd.DataFrame, Where]:
    rows, lines = [], []
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = parse_json(line)
                # A lone surrogate is legal JSON, but no text that a report could hold.
                json.dumps(row, ensure_ascii=False).encode()
            except ValueError as error:
                raise UsageError(f"{path}, line {number}: broken JSON ({error})") from error
            if not isinstance(row, dict):
                raise UsageError(f"{path}, line {number}: expected a JSON object, got {short(row)}")
            rows.append(row)
            lines.append(number)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    # Object columns keep what the file says: ids such as 007 or 12 next to a missing value stay as written.
    data = {name: pd.Series([row.get(name) for row in rows], dtype=object) for name in columns}
    return pd.DataFrame(data), lambda i: f"line {lines[i]}"


def _read_csv(path: Path) -> tuple[pd.DataFrame, Where]:
    rows, lines = [], []
    header: list[str] = []
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=_delimiter(next((line for line in file if line.strip()), "")))
        file.seek(0)
        try:
            for row in reader:
                if not any(cell.strip() for cell in row):
                    continue
                if not header:
                    header = _header(row, path)
                    continue
                if len(row) != len(header):
                    raise UsageError(
                        f"{path}, line {reader.line_num}: {len(row)} fields where the header has {len(header)}"
                    )
                rows.append(row)
                lines.append(reader.line_num)
        except csv.Error as error:
            raise UsageError(f"{path}, line {reader.line_num}: broken CSV ({error})") from error
    frame = pd.DataFrame(rows, columns=header, dtype=object)
    return frame, lambda i: f"line {lines[i]}"


def _delimiter(header: str) -> str:
    """What separates the names of columns that are known; a comma where nothing tells."""

    def known(delimiter: str) -> int:
        names = next(csv.reader([header], delimiter=delimiter), [])
        return sum(plain_name(name) in COLUMNS for name in names)

    return max(_DELIMITERS, key=known)


def _header(row: list[str], path: Path) -> list[str]:
    names = [name.strip() for name in row]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise UsageError(f"{path}: column {repeated[0]} occurs more than once")
    return names


def _read_parquet(path: Path) -> tuple[pd.DataFrame, Where]:
    if path.stat().st_size == 0:
        return pd.DataFrame(), lambda i: f"row {i}"
    try:
        frame = pd.read_parquet(path).reset_index(drop=True)
    except Exception as error:
        raise UsageError(f"{path} is not a readable Parquet file: {str(error).splitlines()[0]}") from error
    return frame, lambda i: f"row {i + 1}"
