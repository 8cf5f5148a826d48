"""Outputs of OpenCompass: ``results/<model>/<dataset>.json`` with details, beside ``predictions/``."""

from pathlib import Path
from typing import Any

from semkv_bench.errors import MissingError, UsageError
from semkv_bench.importers.rows import Imported, Options, Row, fingerprint, folder, number_of, read_json

__all__ = ["looks_like", "read"]


def looks_like(path: Path) -> bool:
    """Is ``path`` the folder of one run?"""
    return path.is_dir() and (path / "results").is_dir() and (path / "predictions").is_dir()


def read(path: Path, options: Options) -> Imported:
    """Rows of every dataset whose results hold details (``dump_details=True``)."""
    results = folder(path, "one OpenCompass run") / "results"
    models = sorted(entry for entry in results.glob("*") if entry.is_dir())
    if not models:
        raise MissingError(f"{path} holds no results/<model>; give the folder of one OpenCompass run")
    if len(models) > 1:
        raise UsageError(f"{path} holds {len(models)} models; run cliff-report once a model")
    rows, notes = [], []
    for file in sorted(models[0].glob("*.json")):
        if options.task not in (None, file.stem):
            continue
        prompts = _prompts(path / "predictions" / models[0].name, file.stem)
        found = _rows(file, prompts)
        if not found:
            notes.append(f"{file.name} holds no details of its examples (dump_details=True writes them)")
        rows += found
    if not rows:
        raise UsageError(f"{path}: no result holds details of its examples; run with dump_details=True")
    return Imported(rows, model=models[0].name, notes=notes)


def _rows(file: Path, prompts: dict[str, str]) -> list[Row]:
    content = read_json(file)
    details = content.get("details") if isinstance(content, dict) else None
    listed: dict[str, Any] = {}
    if isinstance(details, list):
        listed = {str(number): detail for number, detail in enumerate(details)}
    elif isinstance(details, dict):
        listed = {name: detail for name, detail in details.items() if isinstance(detail, dict)}
    return [
        Row(
            file.stem,
            number,
            number_of(detail["correct"], f"{file.name}, example {number}: correct"),
            fingerprint=prompts.get(number),
        )
        for number, detail in listed.items()
        if isinstance(detail, dict) and "correct" in detail
    ]


def _prompts(folder_of: Path, dataset: str) -> dict[str, str]:
    """Fingerprints of the prompts by index; files of a split dataset go on counting."""
    split = sorted(folder_of.glob(f"{dataset}_*.json"), key=lambda f: _part(f.stem, dataset))
    parts = [file for file in split if _part(file.stem, dataset) is not None]
    files = [folder_of / f"{dataset}.json"] if (folder_of / f"{dataset}.json").exists() else parts
    found: dict[str, str] = {}
    for file in files:
        start = len(found)
        for number, item in read_json(file).items():
            prompt = item.get("origin_prompt") if isinstance(item, dict) else None
            if prompt is not None:
                found[str(start + int(number))] = fingerprint(prompt)
    return found


def _part(stem: str, dataset: str) -> int | None:
    number = stem.removeprefix(f"{dataset}_")
    return int(number) if number.isdecimal() else None
