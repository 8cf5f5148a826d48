"""The run folder: what was decided is written first, records are appended, and a killed run continues."""

import fcntl
import hashlib
import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

import pandas as pd
import yaml

from semkv_bench.errors import MissingError, SemkvError, UsageError
from semkv_bench.records.schema import PLACE

__all__ = ["RunFolder", "charter_hash", "read_looks", "read_run", "read_sessions", "write_looks"]

T = TypeVar("T")

_UNIT = ("task", "example_id", "seed")
_TYPES = {"task": str, "example_id": str, "seed": int, "setting": str, "turn": int, "turns": int}
_EXTRA_TOP = frozenset({"hash"})


def charter_hash(charter: Mapping[str, Any]) -> str:
    """SHA-256 of a protocol's content (keys sorted, its own ``hash`` left out)."""
    content = {key: value for key, value in charter.items() if key not in _EXTRA_TOP}
    return hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


_MENDED = "put a copy of it back, or run the sweep again into another out=DIR"


@dataclass
class RunFolder:
    """A folder that one or several processes append records to.

    Each process writes a ``records-N.jsonl`` of its own, held by a lock. The records of one example under all
    settings, in all its turns, form a unit; a unit cut short by a kill is taken out and done again.
    """

    path: Path
    charter: dict[str, Any]
    done: set[tuple[str, str, int]] = field(default_factory=set)
    _file: IO[bytes] | None = None

    @classmethod
    def open(cls, path: Path, charter: Mapping[str, Any], config_yaml: str) -> "RunFolder":
        """Create the folder, or continue the run of the same charter in it.

        Raises:
            UsageError: the folder holds something else, or a run of another protocol.
            SemkvError: it cannot be written.
        """
        sealed = {**charter, "hash": charter_hash(charter)}
        if path.exists() and not path.is_dir():
            raise UsageError(f"out={path} is a file; give a folder")
        with _explained(path):
            path.mkdir(parents=True, exist_ok=True)
            # Listed before the protocol is looked for: another process may write both at this moment.
            entries = list(path.iterdir())
            if not (path / "protocol.yaml").exists():
                if not _only_scratch(entries):
                    raise UsageError(
                        f"{path} is not empty and not a run folder (no protocol.yaml: put it back if it was one); "
                        "choose another out=DIR"
                    )
                _seal(path, sealed, config_yaml)
            _require_same(path, sealed)
        return cls(path, sealed)

    def start(self) -> None:
        """Take a records file for this process, repair what a kill left, and learn what is done."""
        with _explained(self.path):
            self._file = self._claim()
            self.done = {unit for file in self._files() for unit in _complete_units(file, self._settings)}

    def refresh(self) -> None:
        """Learn what other processes have finished meanwhile."""
        others = [file for file in self._files() if file.name != Path(self._file.name).name]
        self.done |= {unit for file in others for unit in _complete_units(file, self._settings)}

    def share(self, pending: Sequence[T]) -> list[T]:
        """``pending`` in the order in which this process should take it.

        The first writer begins at the front, the second at the back, further ones in between, so that they
        meet late.
        """
        number = int(Path(self._file.name).stem.rpartition("-")[2])
        if number == 1:
            return list(reversed(pending))
        start = int(len(pending) * (number * 0.618 % 1)) if number else 0
        return [*pending[start:], *pending[:start]]

    def append(self, unit: Sequence[Mapping[str, Any]]) -> None:
        """Append the records of one example, all or none.

        Raises:
            SemkvError: the disk is full or the folder gone; what was there before stays intact.
        """
        lines = "".join(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in unit)
        before = self._file.seek(0, os.SEEK_END)
        try:
            with _explained(self.path):
                self._file.write(lines.encode())
                self._file.flush()
                os.fsync(self._file.fileno())
        except SemkvError:
            os.truncate(self._file.fileno(), before)
            raise
        self.done.add(tuple(unit[0][name] for name in _UNIT))

    def close(self) -> None:
        """Release the records file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        """Note what the run was done on; a resumed run appends to the list of sessions."""
        target = self.path / "environment.json"
        with _explained(self.path), (self.path / "protocol.yaml").open("r+") as guard:
            fcntl.flock(guard, fcntl.LOCK_EX)
            sessions = read_sessions(self.path)
            content = {"sessions": [*sessions, dict(environment)]}
            _write_atomically(target, json.dumps(content, indent=1, ensure_ascii=False) + "\n")

    @property
    def complete(self) -> bool:
        """Are all planned examples recorded, or all up to the look that ended a sequential run?"""
        return self.stopped_after is not None or self.recorded >= self.charter["examples"]["count"]

    @property
    def stopped_after(self) -> int | None:
        """Number of the look that ended a sequential run early, if one did."""
        return next((look["look"] for look in read_looks(self.path) if look["stop"]), None)

    @property
    def recorded(self) -> int:
        """Examples that are recorded by now, whoever ran them."""
        return len({unit for file in self._files() for unit in _complete_units(file, self._settings)})

    @property
    def _settings(self) -> tuple[str, ...]:
        return tuple(self.charter["settings"])

    def _files(self) -> list[Path]:
        return sorted(self.path.glob("records-*.jsonl"))

    def _claim(self) -> IO[bytes]:
        for number in range(10_000):
            path = self.path / f"records-{number}.jsonl"
            file = path.open("ab+")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.close()
                continue
            _repair(file, self._settings)
            return file
        raise SemkvError(f"{self.path} has ten thousand writers at once")


def read_sessions(path: Path) -> list[dict[str, Any]]:
    """What a run was done on, one entry a session; empty where ``environment.json`` is absent or damaged."""
    try:
        sessions = json.loads((path / "environment.json").read_text())["sessions"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return (
        [session for session in sessions if isinstance(session, dict)] if isinstance(sessions, list) else []
    )


def read_looks(path: Path) -> list[dict[str, Any]]:
    """The looks that were taken of a sequential run, in order; empty where there are none or the file is damaged."""
    try:
        looks = json.loads((path / "looks.json").read_text())["looks"]
        whole = [(look["look"], look["stop"], look["reason"]) for look in looks]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return looks if [number for number, *_ in whole] == list(range(1, len(whole) + 1)) else []


def write_looks(path: Path, looks: Sequence[Mapping[str, Any]]) -> None:
    """Note the looks that were taken."""
    with _explained(path):
        _write_atomically(path / "looks.json", json.dumps({"looks": list(looks)}, indent=1) + "\n")


def read_run(path: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Records and protocol of a run folder, each record with its file and line; units cut short are left out.

    Raises:
        MissingError: there is no run, or nothing recorded yet.
        UsageError: it is a file, or its files do not parse or do not fit together.
    """
    if path.is_file():
        raise UsageError(
            f"{path} is a file; give run=DIR of a sweep, or records=FILE for scores made elsewhere"
        )
    if not path.exists():
        raise MissingError(f"{path} does not exist; give run=DIR of a sweep")
    if not (path / "protocol.yaml").exists():
        raise MissingError(f"{path} is not a run folder (no protocol.yaml); give run=DIR of a sweep")
    charter = _read_charter(path)
    try:
        recorded, settings = charter["hash"], tuple(charter["settings"])
    except (KeyError, TypeError) as error:
        raise UsageError(f"{path / 'protocol.yaml'} is damaged: no {error}; {_MENDED}") from error
    if charter_hash(charter) != recorded:
        raise UsageError(
            f"{path / 'protocol.yaml'} was changed after it was written: its hash does not match; {_MENDED}"
        )
    records: list[dict[str, Any]] = []
    for file in sorted(path.glob("records-*.jsonl")):
        for unit in _units(file.read_bytes(), file, settings):
            if _is_complete(unit, settings):
                records.extend(unit)
    if not records:
        raise MissingError(f"{path} holds no finished example yet; run the sweep again to continue it")
    frame = pd.DataFrame.from_records(records)
    # Two processes may have answered the same example; the first file wins.
    return frame.drop_duplicates([*_UNIT, "turn", "setting"], ignore_index=True), charter


def _is_complete(unit: Sequence[Mapping[str, Any]], settings: Collection[str]) -> bool:
    """Does the unit hold one record for every setting and turn?"""
    turns = unit[0].get("turns", 1)
    if len(unit) != len(settings) * turns:
        return False
    found = {(record["setting"], record.get("turn", 0)) for record in unit}
    return found == {(name, turn) for name in settings for turn in range(turns)}


def _complete_units(path: Path, settings: Collection[str]) -> Iterable[tuple[str, str, int]]:
    for unit in _units(path.read_bytes(), path, settings):
        if _is_complete(unit, settings):
            yield tuple(unit[0][name] for name in _UNIT)


def _units(content: bytes, path: Path, settings: Collection[str]) -> list[list[dict[str, Any]]]:
    """Consecutive records of the same example; a torn last line is left out.

    Raises:
        UsageError: a line is no record, or one of a setting that the run does not have.
    """
    units: list[list[dict[str, Any]]] = []
    lines = content.split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):
        try:
            record = json.loads(line)
            key, setting = _identity(record)
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise UsageError(
                f"{path}, line {number}: not a record ({error}); remove the line, its example is then run again"
            ) from error
        if setting not in settings:
            raise UsageError(
                f"{path}, line {number}: the run has no setting {setting}; remove the lines of its example "
                "and run the sweep again"
            )
        record |= dict(zip(PLACE, (str(path), number), strict=True))
        if units and [units[-1][0][name] for name in _UNIT] == key:
            units[-1].append(record)
        else:
            units.append([record])
    return units


def _identity(record: Any) -> tuple[list, str]:
    """Unit and setting of a record. Raises KeyError or TypeError for what is none."""
    key, setting = [record[name] for name in _UNIT], record["setting"]
    for name, kind in _TYPES.items():
        if not isinstance(record.get(name, 0), kind):
            raise TypeError(f"{name} is {record[name]!r}")
    return key, setting


def _repair(file: IO[bytes], settings: Collection[str]) -> None:
    """Cut a torn last line and an unfinished last unit."""
    file.seek(0)
    content = file.read()
    keep = content.rfind(b"\n") + 1
    units = _units(content[:keep], Path(file.name), settings)
    if units and not _is_complete(units[-1], settings):
        for _ in units[-1]:
            keep = content.rfind(b"\n", 0, keep - 1) + 1
    if keep != len(content):
        os.truncate(file.fileno(), keep)


def _read_charter(path: Path) -> dict[str, Any]:
    try:
        charter = yaml.safe_load((path / "protocol.yaml").read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"{path / 'protocol.yaml'} is damaged: {reason}; {_MENDED}") from error
    if not isinstance(charter, dict):
        raise UsageError(f"{path / 'protocol.yaml'} is damaged: it holds no protocol; {_MENDED}")
    return charter


def _require_same(path: Path, sealed: Mapping[str, Any]) -> None:
    present = _read_charter(path)
    if present.get("hash") != charter_hash(present):
        raise UsageError(f"{path / 'protocol.yaml'} was changed after it was written; choose another out=DIR")
    if present["hash"] != sealed["hash"]:
        changed = sorted(key for key in {*present, *sealed} - {"hash"} if present.get(key) != sealed.get(key))
        raise UsageError(
            f"{path} holds a run of another protocol (different: {', '.join(changed)}); choose another out=DIR"
        )


def _seal(path: Path, sealed: Mapping[str, Any], config_yaml: str) -> None:
    """Write the protocol unless another process was first; it is never replaced."""
    lock = path / "opening.tmp"
    with lock.open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        if not (path / "protocol.yaml").exists():
            _write_atomically(path / "config.yaml", config_yaml)
            _write_atomically(path / "protocol.yaml", _dump(sealed))
        # Whoever waits on this file, or makes another, finds the protocol.
        lock.unlink(missing_ok=True)


def _only_scratch(entries: Iterable[Path]) -> bool:
    return all(entry.name in {"config.yaml"} or entry.name.endswith(".tmp") for entry in entries)


def _dump(content: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True, width=110)


def _write_atomically(path: Path, text: str) -> None:
    scratch = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        scratch.write_text(text, encoding="utf-8")
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


@contextmanager
def _explained(path: Path):
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        safe = "what is recorded is safe, run the same command again to continue"
        hint = (
            safe if _holds_records(path) else "nothing is recorded yet; another folder is chosen by out=DIR"
        )
        raise SemkvError(f"cannot write {path}: {reason}; {hint}") from error


def _holds_records(path: Path) -> bool:
    try:
        return any(file.stat().st_size for file in path.glob("records-*.jsonl"))
    except OSError:
        return False
