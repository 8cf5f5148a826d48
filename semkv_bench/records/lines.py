"""Append-only files of JSON lines: written all or none, repaired after a kill, read from where reading ended."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from semkv_bench.errors import UsageError
from semkv_bench.files import parse_json
from semkv_bench.records.schema import EXAMPLE, PLACE, Unit

__all__ = ["AppendFile", "Expected", "UnitReader"]

_TYPES = {
    "task": str,
    "example_id": str,
    "seed": int,
    "setting": str,
    "turn": int,
    "turns": int,
    "of_unit": int,
}
_OTHER_RUN = "take the file, or those lines, out of the folder and run the sweep again"


class AppendFile:
    """A file that lines are appended to; what cannot be written whole leaves no trace."""

    def __init__(self, path: Path) -> None:
        # Unbuffered: what a full disk refused must not be written later, behind the end that was put back.
        self.file = path.open("ab+", buffering=0)

    def append(self, objects: Iterable[Mapping[str, Any]]) -> None:
        """Append one line an object, and wait for the disk. Raises OSError, with the file as it was before."""
        lines = "".join(json.dumps(o, ensure_ascii=False, allow_nan=False) + "\n" for o in objects)
        left = memoryview(lines.encode(errors="backslashreplace"))
        before = os.fstat(self.file.fileno()).st_size
        try:
            while left:
                left = left[self.file.write(left) :]
            os.fsync(self.file.fileno())
        except BaseException:
            with suppress(OSError):
                self.cut(before)
            raise

    def cut(self, size: int) -> None:
        """Leave the first ``size`` bytes."""
        os.ftruncate(self.file.fileno(), size)

    def cut_torn_line(self) -> None:
        """Leave whole lines."""
        self.file.seek(0)
        content = self.file.read()
        keep = content.rfind(b"\n") + 1
        if keep != len(content):
            self.cut(keep)

    def close(self) -> None:
        """Close the file; every line is on the disk already."""
        self.file.close()


@dataclass(frozen=True)
class Expected:
    """What the records of a run must look like.

    settings: those of the charter in force, by its mark, and behind it those of the charters that it amends. prompts:
    prompt hash of every planned example; None where the plan is not at hand, then ``tasks`` and
    ``seeds`` are all that is known of it.
    """

    settings: Mapping[str, tuple[str, ...]]
    tasks: frozenset[str] | None = None
    seeds: frozenset[int] | None = None
    prompts: Mapping[Unit, str] | None = None

    def check(self, record: Mapping[str, Any], unit: Unit) -> str | None:
        """What says that ``record`` is of another run; None for a record of this one."""
        task, example_id, seed = unit
        named = f"example {example_id} of task {task}"
        if record.get("charter") not in self.settings:
            return (
                f"{named} was recorded by a run of another protocol ({record.get('charter') or 'none is named'}, "
                f"this run's is {next(iter(self.settings))})"
            )
        if self.tasks is not None and task not in self.tasks:
            return f"the run has no task {task}"
        if self.seeds is not None and seed not in self.seeds:
            return f"the run has no seed {seed}"
        if self.prompts is not None and unit not in self.prompts:
            return f"{named} and seed {seed} is not planned"
        if self.prompts is not None and record.get("prompt_hash") != self.prompts[unit]:
            return f"{named} answered another prompt than the planned one (prompt_hash differs)"
        return None


@dataclass
class UnitReader:
    """Reads the complete units of one file; every ``read`` goes on behind the last complete one.

    The records of one example under all settings, in all its turns, form a unit, whatever the order of settings. What a
    kill left of one is passed over: its example is run again.
    """

    path: Path
    expected: Expected
    offset: int = 0
    lines: int = 0

    def read(self) -> Iterator[list[dict[str, Any]]]:
        """Units that were completed since the last call, each record with its file and line.

        Raises:
            UsageError: a line is no record, or one of another run.
        """
        with self.path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < self.offset:
                self.offset = self.lines = 0
            file.seek(self.offset)
            end, number, unit = self.offset, self.lines, _Unit(self.expected)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                number, end = number + 1, end + len(line)
                unit = unit.with_record(self._record(line, number))
                if unit.complete:
                    self.offset, self.lines = end, number
                    yield unit.records
                    unit = _Unit(self.expected)

    def _record(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            record = parse_json(line)
            unit = _identity(record)
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{self.path}, line {number}: not a record ({error}); remove the line, its example is then run again"
            ) from error
        if wrong := self.expected.check(record, unit):
            raise UsageError(f"{self.path}, line {number}: {wrong}; {_OTHER_RUN}")
        if record["setting"] not in self.expected.settings[record["charter"]]:
            raise UsageError(
                f"{self.path}, line {number}: the run has no setting {record['setting']}; remove the lines of its "
                "example and run the sweep again"
            )
        return record | dict(zip(PLACE, (str(self.path), number), strict=True))


@dataclass
class _Unit:
    """Records of one example, as far as they were read."""

    expected: Expected
    records: list[dict[str, Any]] = field(default_factory=list)
    places: set[tuple[int, str]] = field(default_factory=set)

    def with_record(self, record: dict[str, Any]) -> "_Unit":
        """This unit with ``record``, or a new one that begins with it where it cannot be the next."""
        if self.records:
            last = self.records[-1]
            same = all(
                last.get(name) == record.get(name) for name in (*EXAMPLE, "turns", "charter", "of_unit")
            )
            if not same or _place(record) in self.places:
                return _Unit(self.expected, [record], {_place(record)})
        self.records.append(record)
        self.places.add(_place(record))
        return self

    @property
    def complete(self) -> bool:
        """Is there one record for every setting and turn, or of settings that were added, as many as it says?"""
        first, turns = self.records[0], self.records[0].get("turns", 1)
        settings = first.get("of_unit", len(self.expected.settings[first["charter"]]))
        return len(self.records) == settings * turns and all(0 <= turn < turns for turn, _ in self.places)


def _place(record: Mapping[str, Any]) -> tuple[int, str]:
    """Turn and setting of a record, which no other of its unit has."""
    return record.get("turn", 0), record["setting"]


def _identity(record: Any) -> Unit:
    """Unit of a record. Raises KeyError or TypeError for what is none."""
    task, example_id, seed, _ = (record[name] for name in (*EXAMPLE, "setting"))
    for name, kind in _TYPES.items():
        if not isinstance(record.get(name, 0), kind):
            raise TypeError(f"{name} is {record[name]!r}")
    return task, example_id, seed
