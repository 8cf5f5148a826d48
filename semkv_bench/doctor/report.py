"""Is everything there that a sweep needs? Each finding comes with the command that mends it."""

import importlib
import platform
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

import semkv_bench
from semkv_bench.doctor.finding import MISSING, NOTE, OK, Finding

if TYPE_CHECKING:
    from packaging.requirements import Requirement

__all__ = ["as_data", "examine", "healthy", "show_findings"]

_PYTHON = (3, 11)


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


def show_findings(findings: list[Finding], console: Console) -> None:
    """One line per finding, and under it how to mend it."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column("state", no_wrap=True)
    table.add_column("check", no_wrap=True)
    table.add_column("found", overflow="fold")
    colours = {OK: "green", NOTE: "yellow", MISSING: "bold red"}
    for finding in findings:
        text = finding.found if finding.mend is None else f"{finding.found}\n-> {finding.mend}"
        table.add_row(f"[{colours[finding.state]}]{finding.state}[/]", finding.name, _plain(text))
    console.print(table, highlight=False)
    missing = [finding.name for finding in findings if finding.state == MISSING]
    verdict = f"missing: {', '.join(missing)}" if missing else "all that a sweep needs is there"
    console.print(f"\n{verdict}", markup=False, highlight=False)


def _plain(text: str) -> str:
    return text.replace("[", r"\[")


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
