"""Is everything there that a sweep needs? Each finding comes with the command that mends it."""

import importlib
import platform
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

import semkv_bench
from semkv_bench.doctor.finding import MISSING, NOTE, OK, Finding

if TYPE_CHECKING:
    from packaging.requirements import Requirement

__all__ = ["as_data", "examine", "healthy", "shown"]

_PYTHON = (3, 11)
_COLOURS = {OK: "green", NOTE: "yellow", MISSING: "bold red"}
_NAME_WIDTH = 14


def examine() -> Iterator[Finding]:
    """Run every check, one after another; a check that itself fails is a finding too."""
    # The rest imports what these two look for.
    yield from _python()
    yield from _packages()
    try:
        checks = importlib.import_module("semkv_bench.doctor.checks").CHECKS
    except Exception as error:
        yield Finding(
            "imports",
            MISSING,
            f"{type(error).__name__}: {error}",
            "pip install --force-reinstall semkv-bench",
        )
        return
    for check in checks:
        try:
            yield from check()
        except Exception as error:
            name = check.__name__.strip("_")
            yield Finding(name, MISSING, f"cannot be checked: {type(error).__name__}: {error}")


def healthy(findings: list[Finding]) -> bool:
    """Is nothing missing that a sweep needs?"""
    return all(finding.state != MISSING for finding in findings)


def as_data(findings: list[Finding]) -> dict[str, Any]:
    """The findings as plain data."""
    return {"ok": healthy(findings), "checks": [asdict(finding) for finding in findings]}


def shown(findings: Iterable[Finding], console: Console) -> Iterator[Finding]:
    """Each finding as a line as soon as it is there, under it how to mend it, and at the end the verdict."""
    missing = []
    with console.status("looking at this machine"):
        for finding in findings:
            console.print(_line(finding), highlight=False, soft_wrap=True)
            missing += [finding.name] if finding.state == MISSING else []
            yield finding
    verdict = f"missing: {', '.join(missing)}" if missing else "all that a sweep needs is there"
    console.print(f"\n{verdict}", markup=False, highlight=False)


def _line(finding: Finding) -> Text:
    """Whole lines, to search in: the terminal breaks them where it must."""
    before = len(MISSING) + _NAME_WIDTH + 3
    text = finding.found if finding.mend is None else f"{finding.found}\n{' ' * before}-> {finding.mend}"
    state = Text(f"{finding.state:<{len(MISSING)}}  ", _COLOURS[finding.state])
    return state + Text(f"{finding.name:<{_NAME_WIDTH}} {text}")


def _python() -> Iterator[Finding]:
    found = platform.python_version()
    if sys.version_info >= _PYTHON:
        yield Finding("python", OK, found)
    else:
        wanted = ".".join(map(str, _PYTHON))
        yield Finding(
            "python", MISSING, found, f"install Python {wanted} or newer and make a new environment"
        )


def _packages() -> Iterator[Finding]:
    try:
        from packaging.version import Version

        wanted = _requirements()
    except ImportError:
        yield Finding("packaging", MISSING, "not installed", "pip install packaging")
        return
    wrong = 0
    for requirement in wanted:
        try:
            present = version(requirement.name)
        except PackageNotFoundError:
            present = None
        if present is None or Version(present) not in requirement.specifier:
            wrong += 1
            yield Finding(
                requirement.name,
                MISSING,
                "not installed" if present is None else f"{present} is too old",
                f"pip install '{requirement.name}{requirement.specifier}'",
            )
    if not wrong:
        yield Finding("packages", OK, f"{len(wanted)} packages, none older than needed")


def _requirements() -> list["Requirement"]:
    """What semkv-bench itself needs, extras left out: from the source tree, else from the installed package."""
    from packaging.requirements import Requirement

    project = Path(semkv_bench.__file__).resolve().parents[1] / "pyproject.toml"
    if project.exists():
        lines = tomllib.loads(project.read_text())["project"]["dependencies"]
    else:
        lines = requires("semkv-bench") or []
    every = [Requirement(line) for line in lines]
    return [r for r in every if r.marker is None or r.marker.evaluate({"extra": ""})]
