"""The run folder: what was decided is written first, records are appended, and a killed run continues."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
from filelock import FileLock

from semkv_bench.errors import MissingError, SemkvError, UsageError
from semkv_bench.files import hold_lock, locked, parse_json, write_atomically
from semkv_bench.records.charter import (
    CHARTER,
    SHARED_LOCK,
    agree,
    charter_hash,
    charter_mark,
    read_charter,
    settings_by_mark,
)
from semkv_bench.records.lines import AppendFile, Expected, UnitReader
from semkv_bench.records.prompts import PromptsFile
from semkv_bench.records.racing import left_settings, planned_at
from semkv_bench.records.runs import check_run
from semkv_bench.records.schema import EXAMPLE, PLACE, UNIT, Unit

__all__ = ["RunFolder", "charter_hash", "read_looks", "read_run", "read_sessions", "write_looks"]

T = TypeVar("T")


@dataclass
class _Writer:
    """The files of this process, its alone while it holds the lock."""

    number: int
    lock: FileLock
    records: AppendFile
    prompts: PromptsFile

    def close(self) -> None:
        """Close both files and let another process write."""
        self.records.close()
        self.prompts.close()
        self.lock.release()


@dataclass
class RunFolder:
    """A folder that one or several processes append records to.

    Each process writes a ``records-N.jsonl`` and a ``prompts-N.jsonl`` of its own, held by a lock. The records of
    one example under all settings, in all its turns, form a unit; a unit cut short by a kill is taken out and done
    again. Where the charter was amended by settings, an example that lacks them gets a unit of these alone, and is
    done with it; where settings left a raced run at a look (``left``), the units of later examples lack them. ``plan``
    holds the prompt hash of every planned example, where the plan is known: records of others are refused.
    """

    path: Path
    charter: dict[str, Any]
    plan: Mapping[Unit, str] | None = None
    done: set[Unit] = field(default_factory=set)
    left: dict[str, int] = field(default_factory=dict)
    _held: dict[Unit, set[str]] = field(default_factory=dict)
    _look: dict[Unit, int | None] = field(default_factory=dict)
    _writer: _Writer | None = None
    _readers: dict[Path, UnitReader] = field(default_factory=dict)
    _seen: Callable[[Sequence[Mapping[str, Any]]], None] | None = None

    @classmethod
    def open(
        cls,
        path: Path,
        charter: Mapping[str, Any],
        config_yaml: str,
        plan: Mapping[Unit, str] | None = None,
    ) -> "RunFolder":
        """Create the folder, continue the run of the same charter in it, or extend the run in it by what is added.

        Raises:
            UsageError: the folder holds something else, or a run of another charter; it says what differs.
            SemkvError: it cannot be written.
        """
        sealed = {**charter, "hash": charter_hash(charter)}
        if path.exists() and not path.is_dir():
            raise UsageError(f"out={path} is a file; give a folder")
        with _explained(path):
            path.mkdir(parents=True, exist_ok=True)
            # Listed before the charter is looked for: another process may write both at this moment.
            entries = list(path.iterdir())
            if not (path / CHARTER).exists() and not _only_scratch(entries):
                raise UsageError(
                    f"{path} is not empty and not a run folder (no protocol.yaml: put it back if it was one); "
                    "choose another out=DIR"
                )
            agreed = agree(
                path,
                sealed,
                config_yaml,
                lambda present: _count(path, present, plan),
                lambda mark: _used(path, mark),
            )
        return cls(path, agreed, plan)

    def start(self) -> None:
        """Take files for this process, repair what a kill left, and learn what is done."""
        with _explained(self.path):
            self._writer = self._claim()
            self.refresh()

    def refresh(self) -> None:
        """Learn what was finished meanwhile; what was read before is not read again."""
        try:
            for path in sorted(self.path.glob("records-*.jsonl")):
                reader = self._readers.setdefault(path, UnitReader(path, _expected(self.charter, self.plan)))
                self._learn(reader.read())
        except UsageError as error:
            if read_charter(self.path)["hash"] == self.charter.get("hash"):
                raise
            raise UsageError(
                f"{self.path} was extended by another process meanwhile; what is recorded is safe, run that command "
                "here too"
            ) from error
        # Behind the records: what is recorded without a setting was so after the look at which it left.
        if (
            self.charter.get("stats", {}).get("race")
            and (left := left_settings(read_looks(self.path))) != self.left
        ):
            self.left = left
            self._settle(self._held.keys() - self.done)

    def missing(self, unit: Unit, look: int | None = None) -> tuple[str, ...]:
        """The settings under which an example of ``look`` is yet to be recorded."""
        held = self._held.get(unit, ())
        planned = planned_at(self._look.get(unit, look), self.charter["settings"], self.left)
        return tuple(name for name in planned if name not in held)

    def watch(self, seen: Callable[[Sequence[Mapping[str, Any]]], None]) -> None:
        """Let ``seen`` have the records of every example, once; what was learnt before is learnt anew."""
        self._seen = seen
        for learnt in (self._readers, self._held, self._look, self.done, self.left):
            learnt.clear()

    def _learn(self, units: Iterable[Sequence[Mapping[str, Any]]]) -> None:
        found = set()
        for records in units:
            unit = tuple(records[0][name] for name in EXAMPLE)
            held = self._held.setdefault(unit, set())
            if self._seen is not None and any(record["setting"] not in held for record in records):
                self._seen([record for record in records if record["setting"] not in held])
            held.update(record["setting"] for record in records)
            self._look[unit] = records[0].get("look")
            found.add(unit)
        self._settle(found)

    def _settle(self, units: Iterable[Unit]) -> None:
        self.done.update(unit for unit in units if not self.missing(unit))

    def share(self, pending: Sequence[T]) -> list[T]:
        """``pending`` in the order in which this process should take it.

        The first writer begins at the front, the second at the back, further ones in between, so that they
        meet late.
        """
        number = self._writer.number
        if number == 1:
            return list(reversed(pending))
        start = int(len(pending) * (number * 0.618 % 1)) if number else 0
        return [*pending[start:], *pending[:start]]

    def append(self, unit: Sequence[Mapping[str, Any]], prompts: Iterable[Mapping[str, Any]] = ()) -> None:
        """Append the records of one example, all or none, and what it asked (see :mod:`semkv_bench.records.prompts`).

        Raises:
            SemkvError: the disk is full or the folder gone; what was there before stays intact.
        """
        mark = charter_mark(self.charter)
        with _explained(self.path):
            self._writer.prompts.append(prompts)
            self._writer.records.append({**record, "charter": mark} for record in unit)
        self._learn([unit])

    def close(self) -> None:
        """Release this process's files."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        """Note what the run was done on; a resumed run appends to the list of sessions."""
        with _explained(self.path), self.only_me():
            content = {"sessions": [*read_sessions(self.path), dict(environment)]}
            text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
            write_atomically(self.path / "environment.json", text)

    @contextmanager
    def only_me(self) -> Iterator[None]:
        """Within, no other process changes what all of them share."""
        with locked(self.path / SHARED_LOCK):
            yield

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
        self.refresh()
        return len(self.done)

    def _claim(self) -> _Writer:
        for number in range(10_000):
            lock = hold_lock(self.path / f".records-{number}.lock", wait=False)
            if lock is None:
                continue
            try:
                path = self.path / f"records-{number}.jsonl"
                records = AppendFile(path)
                reader = self._readers[path] = UnitReader(path, _expected(self.charter, self.plan))
                self._learn(reader.read())
                records.cut(reader.offset)
                return _Writer(number, lock, records, PromptsFile(self.path / f"prompts-{number}.jsonl"))
            except BaseException:
                lock.release()
                raise
        raise SemkvError(f"{self.path} has ten thousand writers at once")


def read_sessions(path: Path) -> list[dict[str, Any]]:
    """What a run was done on, one entry a session; empty where ``environment.json`` is absent or damaged."""
    try:
        sessions = parse_json((path / "environment.json").read_bytes())["sessions"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return (
        [session for session in sessions if isinstance(session, dict)] if isinstance(sessions, list) else []
    )


def read_looks(path: Path) -> list[dict[str, Any]]:
    """The looks that were taken of a sequential run, in order; empty where there are none or the file is damaged."""
    try:
        looks = parse_json((path / "looks.json").read_bytes())["looks"]
        whole = [(look["look"], look["stop"], look["reason"]) for look in looks]
        named = all(isinstance(name, str) for look in looks for name in look.get("leave", []))
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return looks if named and [number for number, *_ in whole] == list(range(1, len(whole) + 1)) else []


def write_looks(path: Path, looks: Sequence[Mapping[str, Any]]) -> None:
    """Note the looks that were taken."""
    with _explained(path):
        write_atomically(path / "looks.json", json.dumps({"looks": list(looks)}, indent=1) + "\n")


def read_run(path: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Records and charter of a run folder, each record with its file and line; units cut short are left out.

    Raises:
        MissingError: there is no run, or nothing recorded yet.
        UsageError: it is a file, or its files do not parse, do not fit together or are not of this run.
    """
    check_run(path)
    charter = read_charter(path)
    expected = _expected(charter)
    records: list[dict[str, Any]] = []
    for file in sorted(path.glob("records-*.jsonl")):
        try:
            for unit in UnitReader(file, expected).read():
                records.extend(unit)
        except OSError as error:
            raise UsageError(f"{file} cannot be read: {error.strerror}; take it out of the folder") from error
    if not records:
        raise MissingError(f"{path} holds no finished example yet; run the sweep again to continue it")
    frame = pd.DataFrame.from_records(records)
    # Two processes may have answered the same example; the first file wins.
    frame = frame.drop_duplicates([*UNIT, "setting"], ignore_index=True)
    _check_settings(frame, charter)
    if charter.get("amendments"):
        frame = _under_common_settings(frame, charter)
    planned, held = charter["examples"]["count"], len(frame.drop_duplicates(EXAMPLE))
    if held > planned:
        raise UsageError(
            f"{path} holds records of {held} examples where {planned} were planned; take the files or lines that "
            "are not this run's out of the folder"
        )
    return frame, charter


def _check_settings(frame: pd.DataFrame, charter: Mapping[str, Any]) -> None:
    """What a record says that its setting is must be what the charter says."""
    described = {setting: said for setting, said in charter["settings"].items() if isinstance(said, dict)}
    for name in ("kind", "code_bits", "packed_bits", "effective_bits"):
        if name not in frame:
            continue
        planned = frame["setting"].map({setting: said.get(name) for setting, said in described.items()})
        wrong = frame[planned.notna() & (frame[name] != planned)]
        if not wrong.empty:
            record = wrong.iloc[0]
            file, line = (record[place] for place in PLACE)
            raise UsageError(
                f"{file}, line {line}: setting {record['setting']} has {name} {record[name]}, not the "
                f"{planned[record.name]} of protocol.yaml; remove the lines of its example and run the sweep again"
            )


def _expected(charter: Mapping[str, Any], plan: Mapping[Unit, str] | None = None) -> Expected:
    tasks, seeds = charter.get("tasks"), charter.get("seeds")
    return Expected(
        settings=settings_by_mark(charter),
        tasks=None if tasks is None else frozenset(tasks),
        seeds=None if seeds is None else frozenset(seeds),
        prompts=plan,
    )


def _under_common_settings(frame: pd.DataFrame, charter: Mapping[str, Any]) -> pd.DataFrame:
    """The records under the settings of the latest charter that every example was recorded under.

    While an extension by settings is not finished, these are the ones from before it: no example is left out.
    """
    held = frame.groupby(EXAMPLE)["setting"].agg(set)
    for settings in settings_by_mark(charter).values():
        if all(each >= set(settings) for each in held):
            return frame[frame["setting"].isin(settings)].reset_index(drop=True)
    return frame


def _count(path: Path, charter: Mapping[str, Any], plan: Mapping[Unit, str] | None) -> int:
    """Examples that the run of ``charter`` holds; UsageError where one is not among the prompts of ``plan``."""
    folder = RunFolder(path, dict(charter), plan)
    folder.refresh()
    return len(folder.done)


def _used(path: Path, mark: str) -> bool:
    """Does a record in ``path`` carry the mark of that charter?"""
    told = f'"charter": "{mark}"'.encode()
    return any(told in line for file in sorted(path.glob("records-*.jsonl")) for line in file.open("rb"))


def _only_scratch(entries: Iterable[Path]) -> bool:
    return all(entry.name == "config.yaml" or entry.suffix in (".tmp", ".lock") for entry in entries)


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
