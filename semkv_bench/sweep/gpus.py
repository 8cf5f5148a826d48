"""Which GPU of the machine a process takes, when several processes share the work of one sweep."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from semkv_bench.files import hold_lock

__all__ = ["free_gpu"]


@contextmanager
def free_gpu(preferred: int, count: int, folder: Path | None = None) -> Iterator[int]:
    """Number of a GPU that no other process holds by this function: ``preferred`` mod ``count``, or the next free.

    Where all are held, ``preferred`` mod ``count`` is shared. The hold ends with the context or the process.
    folder: where the locks are; the machine's folder for temporary files by default.
    """
    folder = folder or Path(tempfile.gettempdir()) / "semkv-bench-gpus"
    first = preferred % count
    for number in [*range(first, count), *range(first)]:
        lock = _try_lock(folder, number)
        if lock is not None:
            try:
                yield number
            finally:
                lock.release()
            return
    yield first


def _try_lock(folder: Path, number: int) -> FileLock | None:
    try:
        folder.mkdir(mode=0o777, parents=True, exist_ok=True)
        return hold_lock(folder / f"gpu-{number}.lock", wait=False)
    except OSError:
        return None
