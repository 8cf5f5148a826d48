"""Logs of inspect_ai: ``.eval`` archives or ``.json`` files."""

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from semkv_bench.errors import MissingError, UsageError
from semkv_bench.importers.rows import Imported, Options, Row, fingerprint, one_of, read_json

__all__ = ["looks_like", "read"]

_LETTERS = {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0}
_ZSTANDARD = 93


def looks_like(path: Path) -> bool:
    """Is ``path`` such a log, or a folder of one?"""
    return bool(_files(path))


def read(path: Path, options: Options) -> Imported:
    """Rows of one finished log: an example's epochs are its seeds.

    ``options.metric`` names the scorer where there are several. Samples that ended in an error or a limit, and those
    without a score, are counted and left out.
    """
    files = _files(path)
    if not files:
        raise MissingError(f"{path} holds no .eval or .json log of inspect_ai")
    if len(files) > 1:
        raise UsageError(f"{path} holds {len(files)} logs; give the file of one")
    header, samples = _archive(files[0]) if files[0].suffix == ".eval" else _whole(files[0])
    status = header.get("status")
    if status != "success":
        raise UsageError(f"{files[0]} is a log of a run with status {status}; only a finished one is read")
    about = header.get("eval") or {}
    task = str(options.task or about.get("task") or files[0].stem)
    scorer = _scorer(samples, files[0], options.metric)
    rows, left_out = [], 0
    for sample in samples:
        value = _value(sample, scorer, files[0])
        if value is None or sample.get("error") or sample.get("limit"):
            left_out += 1
            continue
        rows.append(
            Row(
                task,
                str(sample.get("id")),
                value,
                seed=int(sample.get("epoch") or 1) - 1,
                fingerprint=fingerprint(sample.get("input")) if sample.get("input") is not None else None,
            )
        )
    notes = [f"{left_out} samples ended in an error or a limit or have no score"] if left_out else []
    return Imported(rows, model=about.get("model"), notes=notes)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if path.suffix in (".eval", ".json") else []
    return sorted([*path.glob("*.eval"), *(file for file in path.glob("*.json") if _is_log(file))])


def _is_log(file: Path) -> bool:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and {"eval", "samples"} <= set(content)


def _archive(file: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    try:
        with zipfile.ZipFile(file) as archive:
            if any(member.compress_type == _ZSTANDARD for member in archive.infolist()):
                _know_zstandard(file)
            # A member that was written again stands in the archive twice; the last one holds.
            return _member(archive, "header.json"), list(_member(archive, "summaries.json"))
    except KeyError as error:
        raise UsageError(f"{file} is not a finished log of inspect_ai: {error.args[0]}") from error
    except (zipfile.BadZipFile, NotImplementedError, OSError) as error:
        raise UsageError(f"{file} cannot be read as an archive: {error}") from error


def _member(archive: zipfile.ZipFile, name: str) -> Any:
    try:
        return json.loads(archive.read(name))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{archive.filename}: {name} is not readable JSON") from error


def _know_zstandard(file: Path) -> None:
    try:
        import zipfile_zstd  # noqa: F401  (teaches zipfile the method)
    except ImportError as error:
        raise MissingError(
            f"{file} is compressed with Zstandard, which needs a package: pip install zipfile-zstd "
            "(or write the log as JSON: inspect log convert --to json)"
        ) from error


def _whole(file: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    content = read_json(file)
    if not isinstance(content, dict) or not isinstance(content.get("samples"), list):
        raise UsageError(f"{file} is no log of inspect_ai with its samples")
    return content, content["samples"]


def _scorer(samples: list[dict[str, Any]], file: Path, chosen: str | None) -> str:
    named = sorted({name for sample in samples for name in sample.get("scores") or {}})
    if not named:
        raise UsageError(f"{file} holds no score; was it run with --no-score?")
    return one_of(named, chosen, file, "scorer")


def _value(sample: Mapping[str, Any], scorer: str, file: Path) -> float | None:
    score = (sample.get("scores") or {}).get(scorer)
    value = score.get("value") if isinstance(score, Mapping) else score
    if isinstance(value, str) and value in _LETTERS:
        return _LETTERS[value]
    if isinstance(value, bool | int | float):
        return None if value != value else float(value)
    if value is None:
        return None
    raise UsageError(f"{file}: sample {sample.get('id')} has the score {value!r}, which is no number")
