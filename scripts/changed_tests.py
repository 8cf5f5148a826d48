"""Tests of the rooms that differ from a branch, one a line: ``changed_tests.py main`` for ``make check``."""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ALWAYS = "tests/test_rooms.py"
# Groups of the configuration whose room has another name.
ROOM_OF = {"allocation": "settings", "grid": "settings", "metric": "importance", "experiment": "sweep"}


def tests_of(changed: Iterable[str]) -> list[str]:
    """Test files and folders for changed files, by the name that a room and its tests share.

    A file at the root of the package has a test file of its name; configuration and documentation have theirs.
    """
    found = {ALWAYS}
    for name in changed:
        parts = Path(name).parts
        if parts[0] == "tests" and Path(name).name.startswith("test_"):
            found.add(name)
        elif parts[0] == "tests":
            found.add(str(Path(*parts[:-1])) if len(parts) > 2 else ALWAYS)
        elif parts[0] == "semkv_bench" and len(parts) > 2:
            found.add(f"tests/{parts[1]}")
        elif parts[0] == "semkv_bench":
            found.add(f"tests/test_{Path(name).stem}.py")
        elif parts[0] == "conf":
            group = parts[1]
            found |= {"tests/config", f"tests/{ROOM_OF.get(group, group)}", f"tests/{group}s"}
        elif parts[0] == "docs" or name == "README.md":
            found.add("tests/docs")
    there = sorted(path for path in found if (ROOT / path).exists())
    return [path for path in there if not any(path.startswith(f"{other}/") for other in there)]


def changed_since(base: str) -> list[str]:
    """Files that differ from where ``base`` was left, with those that git does not know yet."""
    git = ["git", "-C", str(ROOT)]
    fork = subprocess.run([*git, "merge-base", base, "HEAD"], capture_output=True, text=True, check=True)
    told = subprocess.run(
        [*git, "diff", "--name-only", fork.stdout.strip()], capture_output=True, text=True, check=True
    )
    new = subprocess.run(
        [*git, "ls-files", "--others", "--exclude-standard"], capture_output=True, text=True, check=True
    )
    return [*told.stdout.split(), *new.stdout.split()]


if __name__ == "__main__":
    print("\n".join(tests_of(changed_since(sys.argv[1] if len(sys.argv) > 1 else "main"))))
