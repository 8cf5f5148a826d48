"""Where runs lie, which is the newest, and which folders are meant."""

import glob
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from omegaconf import ListConfig

from semkv_bench.errors import MissingError, SemkvError, UsageError
from semkv_bench.files import hold_lock

__all__ = [
    "OF_REGRESS",
    "RUNS",
    "check_run",
    "folders_of",
    "new_folder",
    "newest_run",
    "one_at_a_time",
    "short_names",
]


RUNS = Path("results/runs")


OF_REGRESS = "regress-"


def new_folder(short: str, prefix: str = "") -> Path:
    """A folder under ``results/runs`` that is not there yet, named by ``prefix``, time and hash."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    names = (f"{prefix}{stamp}{again}-{short}" for again in ("", *(f".{n}" for n in range(1, 1000))))
    return next(RUNS / name for name in names if not (RUNS / name).exists())


def check_run(path: Path) -> None:
    """Is ``path`` a run folder?

    Raises:
        MissingError: there is nothing, or no run.
        UsageError: it is a file.
    """
    if path.is_file():
        raise UsageError(
            f"{path} is a file; give run=DIR of a sweep, or records=FILE for scores made elsewhere"
        )
    if not path.exists():
        raise MissingError(f"{path} does not exist; give run=DIR of a sweep")
    if not (path / "protocol.yaml").exists():
        raise MissingError(f"{path} is not a run folder (no protocol.yaml); give run=DIR of a sweep")


def folders_of(runs: Any) -> tuple[list[Path], bool]:
    """The folders meant, in order, and whether each was named (and not found by a wildcard)."""
    texts = list(runs) if isinstance(runs, (list, tuple, ListConfig)) else [runs]
    if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        raise UsageError("runs must name folders, for example runs=[results/runs/a,results/runs/b]")
    found: list[Path] = []
    chosen = True
    for text in texts:
        path = Path(text).expanduser()
        if path.exists() or not glob.has_magic(text):
            if not path.is_dir():
                what = "is a file; give its folder" if path.exists() else "does not exist"
                raise MissingError(f"runs: {path} {what}")
            found.append(path)
            continue
        chosen = False
        matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
        matches = [match for match in matches if match.is_dir()]
        if not matches:
            raise MissingError(f"runs={text} matches no folder")
        found += matches
    unique = {path.resolve(): path for path in reversed(found)}
    return list(reversed(unique.values())), chosen


def short_names(folders: Sequence[Path]) -> list[str]:
    """Folders by as many of their last parts as tell them apart."""
    whole = [path.resolve() for path in folders]
    depth = 1
    while True:
        names = ["/".join(path.parts[-depth:]) for path in whole]
        if len(set(names)) == len(names) or depth > max(len(path.parts) for path in whole):
            return names
        depth += 1


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Shards that start together must find one folder, not make one each."""
    try:
        RUNS.parent.mkdir(parents=True, exist_ok=True)
        lock = hold_lock(RUNS.parent / ".runs.lock")
    except OSError as error:
        raise SemkvError(f"cannot write {RUNS.parent}: {error.strerror}; give a folder by out=DIR") from error
    try:
        yield
    finally:
        lock.release()


def newest_run() -> Path | None:
    """The run under ``results/runs`` that was written last, if there is one.

    The two of a recipe lie in a folder of its own; what ``regress`` ran is no answer to who asks for a sweep.
    """
    found = [path.parent for depth in ("*", "*/*") for path in RUNS.glob(f"{depth}/protocol.yaml")]
    runs = [run for run in found if not re.match(rf"{OF_REGRESS}\d", run.relative_to(RUNS).parts[0])]
    return max(runs, key=_last_written, default=None)


def _last_written(run: Path) -> int:
    files = [run / "protocol.yaml", *run.glob("records-*.jsonl")]
    return max(file.stat().st_mtime_ns for file in files)
