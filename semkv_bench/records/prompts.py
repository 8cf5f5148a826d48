"""What was asked and what was expected: ``prompts-N.jsonl`` in a run folder, a line for every turn of an example."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from semkv_bench.errors import UsageError
from semkv_bench.files import parse_json
from semkv_bench.records.lines import AppendFile

__all__ = ["PromptsFile", "answers_hash", "read_prompts"]

# Seeds that draw the same item ask the same.
_SAME = ("task", "example_id", "prompt_hash", "turn")


class PromptsFile:
    """The prompts file of one writer. A prompt that any writer's file holds already is not written again."""

    def __init__(self, path: Path) -> None:
        self._file = AppendFile(path)
        self._file.cut_torn_line()
        self._written = {_key(line) for line in _lines(path.parent)}

    def append(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Append what is new of ``lines``. Raises OSError, with the file as it was before."""
        new = [line for line in lines if _key(line) not in self._written]
        if new:
            self._file.append(new)
            self._written.update(map(_key, new))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def answers_hash(answers: Sequence[str]) -> str:
    """Short SHA-256 by which a record names the answers that were expected."""
    return hashlib.sha256(json.dumps(list(answers)).encode()).hexdigest()[:16]


def read_prompts(path: Path) -> dict[tuple[str, str, str, int], dict[str, Any]]:
    """The prompts of the run folder ``path`` by (task, example_id, prompt_hash, turn), as its records name them.

    Each holds the text as it was fed in that turn (``prompt``), the ``question`` in it, the expected ``answers``
    and the first ``seed`` that asked. Empty for a run that was made before prompts were kept.

    Raises UsageError for a line that is none, or a file that cannot be read.
    """
    try:
        return {_key(line): line for line in reversed(list(_lines(path)))}
    except OSError as error:
        raise UsageError(
            f"{error.filename} cannot be read: {error.strerror}; take it out of the folder"
        ) from error


def _lines(folder: Path) -> Iterator[dict[str, Any]]:
    """Whole lines of all writers; what is being written, or was cut off by a kill, is left out."""
    for path in sorted(folder.glob("prompts-*.jsonl")):
        with path.open("rb") as file:
            for number, text in enumerate(file, start=1):
                if not text.endswith(b"\n"):
                    break
                try:
                    line = parse_json(text)
                    _key(line)
                except (ValueError, KeyError, TypeError) as error:
                    raise UsageError(
                        f"{path}, line {number}: not a prompt ({error}); remove the line"
                    ) from error
                yield line


def _key(line: Mapping[str, Any]) -> tuple[str, str, str, int]:
    task, example_id, prompt_hash, turn = (line[name] for name in _SAME)
    if not all(isinstance(value, str) for value in (task, example_id, prompt_hash)) or not isinstance(
        turn, int
    ):
        raise TypeError(
            f"task {task!r}, example_id {example_id!r}, prompt_hash {prompt_hash!r}, turn {turn!r}"
        )
    return task, example_id, prompt_hash, turn
