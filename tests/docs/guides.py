"""Reads the Markdown files: code blocks, the files they show, the commands they name."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`(semkv-bench [^`]+)`")
_SHOWN_FILE = re.compile(r"^`([^`\n]+)`\n\n```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page."""
    return [Block(page.name, language, text) for language, text in _FENCE.findall(page.read_text())]


def shown_files(page: Path) -> dict[str, str]:
    """Files that a guide shows: a line with nothing but the path, then the block with the content."""
    return dict(_SHOWN_FILE.findall(page.read_text()))


def write_files(page: Path, folder: Path) -> None:
    """Write the files that a guide shows under ``folder``."""
    for name, text in shown_files(page).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def commands(page: Path) -> list[list[str]]:
    """Every ``semkv-bench`` command of a page, without the program's name: fenced ones and inline ones."""
    text = page.read_text()
    found = [line for block in blocks(page) for line in _lines(block.text)]
    found += _INLINE.findall(_FENCE.sub("", text))
    return [split for line in found if len(split := shlex.split(line, comments=True)[1:])]


def _lines(text: str) -> Iterator[str]:
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip().startswith("semkv-bench "):
            yield line.strip()
