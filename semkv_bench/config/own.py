"""Parts of the user's own: folders of Hydra groups and modules beside the package's, named by ``SEMKV_CONF``.

``DIR/quantizer/mine.yaml`` makes ``quantizer=mine`` a choice, and its ``_target_`` may be a class of ``DIR/mine.py``.
``DIR/metric/mine.yaml`` makes ``allocation.metric=mine`` one.
"""

import hashlib
import inspect
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from semkv_bench.errors import MissingError, UsageError

__all__ = ["VARIABLE", "check_names", "fingerprints", "import_own", "joined", "own_folders"]

VARIABLE = "SEMKV_CONF"


def own_folders() -> list[Path]:
    """Folders that ``SEMKV_CONF`` names, separated as in PATH.

    Raises:
        MissingError: one of them is not there.
    """
    given = [part for part in os.environ.get(VARIABLE, "").split(os.pathsep) if part]
    folders = [Path(part).expanduser().absolute() for part in given]
    for folder in folders:
        if not folder.is_dir():
            raise MissingError(f"{VARIABLE} (--conf) names {folder}, which is not a folder")
    return folders


@contextmanager
def joined(given: Iterable[str]) -> Iterator[None]:
    """The folders ``given`` come before those of ``SEMKV_CONF`` for a while, in child processes too."""
    before = os.environ.get(VARIABLE)
    # Workers may start in another folder.
    parts = [str(Path(folder).expanduser().absolute()) for folder in given]
    if not parts:
        yield
        return
    os.environ[VARIABLE] = os.pathsep.join([*parts, *([before] if before else [])])
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def check_names(shipped: Path) -> None:
    """Raise UsageError where a file of the user's own has the name of one in ``shipped``, the package's folder.

    Or of one in another folder of the user's own.
    """
    for group in (folder for folder in shipped.iterdir() if folder.is_dir()):
        seen: dict[Path, Path] = {}
        for own in dict.fromkeys(folder.resolve() for folder in own_folders()):
            for path in sorted((own / group.name).rglob("*.yaml")):
                choice = path.relative_to(own / group.name).with_suffix("")
                if (shipped / path.relative_to(own)).exists():
                    raise UsageError(
                        f"{path}: {group.name}={choice} is a choice of the package's own; rename it"
                    )
                if choice in seen:
                    raise UsageError(
                        f"{path}: {group.name}={choice} is a choice of {seen[choice]} too; rename one"
                    )
                seen[choice] = path


def import_own() -> None:
    """Make modules of the user's folders and of the working folder importable."""
    folders = own_folders()
    # Behind everything else: a file called random.py must not take the place of Python's.
    for folder in (*folders, Path.cwd()):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))


def fingerprints(parts: Iterable[object]) -> dict[str, str]:
    """SHA-256 of the source of every class in ``parts`` that is not the package's own, by its full name."""
    found = {}
    for part in parts:
        cls = type(part)
        if cls.__module__.partition(".")[0] not in (__package__.partition(".")[0], "builtins"):
            try:
                source = Path(inspect.getsourcefile(cls) or "").read_bytes()
            except (OSError, TypeError):
                continue
            found[f"{cls.__module__}.{cls.__qualname__}"] = hashlib.sha256(source).hexdigest()[:16]
    return dict(sorted(found.items()))
