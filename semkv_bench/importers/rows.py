"""What every importer returns, and how the results of several settings become one table of records."""

import hashlib
import json
import math
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from semkv_bench.errors import MissingError, UsageError
from semkv_bench.records.normalize import normalize
from semkv_bench.records.schema import REFERENCE

__all__ = [
    "Imported",
    "Importer",
    "Occurrences",
    "Options",
    "Row",
    "Setting",
    "fingerprint",
    "folder",
    "number_of",
    "one_of",
    "read_json",
    "table",
]

_SHOWN = 3

# Likelihoods of a reference are taken from printed ones, of four decimals and more.
_ROUNDED = 5e-4

# What a log of another layout ends in, wherever a reader takes something for granted.
_OTHER_LAYOUT = (
    ArithmeticError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    zlib.error,
)


@dataclass(frozen=True)
class Options:
    """What the user chose of a log that holds several scores: a metric's name, a filter's, tasks."""

    metric: str | None = None
    filter: str | None = None
    task: str | None = None


@dataclass(frozen=True)
class Row:
    """One scored example.

    score: 0 to 1; fingerprint: hash of the prompt, None where the log does not tell it; occurrence: number of
    this row among those that the log cannot tell apart.
    """

    task: str
    example_id: str
    score: float
    seed: int = 0
    fingerprint: str | None = None
    prediction: str | None = None
    kl: float | None = None
    top1_agreement: float | None = None
    nll: float | None = None


@dataclass(frozen=True)
class Imported:
    """The rows of one log.

    bits: what the log itself says of the cache, bits a value; model: as the log names it; notes: sentences that the
    user should read; reference_rows: the rows of ``full`` where the log holds a comparison and not scores, with the
    reference's likelihoods, by which logs that were compared with another are told.
    """

    rows: Sequence[Row]
    bits: float | None = None
    model: str | None = None
    notes: Sequence[str] = ()
    reference_rows: Sequence[Row] = field(default=())


Importer = Callable[[Path, Options], Imported]


@dataclass(frozen=True)
class Setting:
    """One setting of the command: its name, the bits that the user gave, and where its log lies."""

    name: str
    path: Path
    bits: float | None = None


def table(
    settings: Sequence[Setting], read: Importer, options: Options, source: str
) -> tuple[pd.DataFrame, list[str]]:
    """Records of all settings, checked as records of a file are, and what there is to say of them.

    Raises:
        UsageError: no bits for a setting, no reference, the same example with another prompt, two models, a log of
            another layout.
        MissingError: a path that is not there.
    """
    logs = {setting.name: _read(setting, read, options, source) for setting in settings}
    notes = [f"{name}: {note}" for name, log in logs.items() for note in log.notes]
    references = {name: log.reference_rows for name, log in logs.items() if log.reference_rows}
    if REFERENCE not in logs and not references:
        raise UsageError(f"the reference is missing: name its log by {REFERENCE}=PATH")
    _check_references(references)
    if REFERENCE not in logs:
        first = next(iter(references.values()))
        logs = {REFERENCE: Imported(first), **logs}
    _check_models(logs)
    _check_prompts(logs)
    notes += _unshared(logs)
    given = {setting.name: setting.bits for setting in settings}
    records = [
        {
            "task": row.task,
            "example_id": row.example_id,
            "seed": row.seed,
            "setting": name,
            "kind": "full" if name == REFERENCE else "uniform",
            "code_bits": _bits(name, given.get(name), log),
            "score": row.score,
            "kl": row.kl,
            "top1_agreement": row.top1_agreement,
            "prediction": row.prediction,
            "prompt_hash": row.fingerprint,
            "model": log.model,
            "protocol": "engine",
        }
        for name, log in logs.items()
        for row in log.rows
    ]
    if not records:
        raise UsageError(f"{source}: the logs hold no scored example")
    frame = pd.DataFrame(records)
    frame["model"] = next((log.model for log in logs.values() if log.model), None)
    return normalize(frame, source), notes


def _there(setting: Setting) -> Path:
    if not setting.path.exists():
        raise MissingError(f"{setting.name}={setting.path} does not exist")
    return setting.path


def _read(setting: Setting, read: Importer, options: Options, source: str) -> Imported:
    path = _there(setting)
    try:
        return read(path, options)
    except _OTHER_LAYOUT as error:
        what = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(
            f"{setting.name}={path} is not laid out as {source} reads it ({what}); give the scores by records=FILE"
        ) from error


def _bits(name: str, given: float | None, log: Imported) -> float:
    if name == REFERENCE:
        return 16.0
    bits = given if given is not None else log.bits
    if bits is None:
        raise UsageError(f"{name} has no bits: write {name}:BITS=PATH, for example {name}:8=PATH")
    return bits


def _check_models(logs: Mapping[str, Imported]) -> None:
    named = {name: log.model for name, log in logs.items() if log.model}
    if len(set(named.values())) > 1:
        said = ", ".join(f"{name} is {model}" for name, model in sorted(named.items()))
        raise UsageError(f"the logs are of different models, which are never pooled: {said}")


def _check_prompts(logs: Mapping[str, Imported]) -> None:
    """The same example must have had the same prompt under every setting."""
    seen: dict[tuple, tuple[str, str]] = {}
    for name, log in logs.items():
        for row in log.rows:
            if row.fingerprint is None:
                continue
            key = (row.task, row.example_id, row.seed)
            first, prompt = seen.setdefault(key, (name, row.fingerprint))
            if prompt != row.fingerprint:
                raise UsageError(
                    f"task {row.task}, example {row.example_id} had another prompt under {name} than under {first}: "
                    "scores of different prompts cannot be paired (another chat template, shots or data?)"
                )


def _check_references(references: Mapping[str, Sequence[Row]]) -> None:
    """Logs that hold a comparison must be compared with one reference, as likely on the same text."""
    seen: dict[str, tuple[str, float]] = {}
    for name, rows in references.items():
        for row in rows:
            if row.nll is None:
                continue
            first, nll = seen.setdefault(row.example_id, (name, row.nll))
            if not math.isclose(nll, row.nll, rel_tol=_ROUNDED, abs_tol=_ROUNDED):
                raise UsageError(
                    f"{name} was compared with another base than {first}: at {row.example_id} its mean negative log "
                    f"likelihood is {row.nll:.4f}, and that of {first} is {nll:.4f} (another model or text?)"
                )


def _unshared(logs: Mapping[str, Imported]) -> list[str]:
    """Says which examples only some of the logs hold."""
    keys = {name: {(row.task, row.example_id, row.seed) for row in log.rows} for name, log in logs.items()}
    shared = set.intersection(*keys.values())
    notes = []
    for name, held in keys.items():
        if alone := sorted(held - shared):
            shown = ", ".join(f"{task} {example}" for task, example, _ in alone[:_SHOWN])
            more = f" and {len(alone) - _SHOWN} more" if len(alone) > _SHOWN else ""
            notes.append(f"{name}: {len(alone)} of {len(held)} examples are not in every log ({shown}{more})")
    return notes


def fingerprint(*parts: Any) -> str:
    """Hash of what tells a prompt from another."""
    return hashlib.sha256(
        json.dumps(parts, sort_keys=True, ensure_ascii=False, default=str).encode()
    ).hexdigest()[:16]


class Occurrences:
    """Numbers the rows that a log cannot tell apart, in their order."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def number(self, key: str) -> int:
        """How often ``key`` was seen before."""
        self._counts[key] += 1
        return self._counts[key] - 1

    @property
    def repeated(self) -> int:
        """Keys that came more than once."""
        return sum(count > 1 for count in self._counts.values())


def folder(path: Path, what: str) -> Path:
    """``path``, which must be a folder."""
    if not path.is_dir():
        raise UsageError(f"{path} is a file; give the folder of {what}")
    return path


def number_of(value: Any, where: str) -> float:
    """A score as a number; UsageError for anything that is none."""
    if isinstance(value, bool) or (isinstance(value, int | float) and not math.isnan(value)):
        return float(value)
    raise UsageError(f"{where} is {value!r}, which is no score")


def one_of(names: Sequence[str], chosen: str | None, file: Path, what: str, key: str = "metric") -> str:
    """Which of the scores or filters ``names`` of a log is read: the ``chosen`` one, or the only one.

    Raises UsageError where that is none, or cannot be told.
    """
    held = ", ".join(names)
    if not names:
        raise UsageError(f"{file.name} holds no {what}")
    if chosen is not None and chosen not in names:
        raise UsageError(f"{file.name} has no {what} {chosen}; it holds {held}")
    if chosen is None and len(names) > 1:
        raise UsageError(f"{file.name} holds {len(names)} {what}s; choose one with {key}=NAME: {held}")
    return chosen or names[0]


def read_json(path: Path) -> Any:
    """The content of a JSON file; UsageError where it is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not readable JSON ({str(error).splitlines()[0]})") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
