"""What a command is, and what it was given."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semkv_bench.console import ERR, print_plain
from semkv_bench.errors import UsageError

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["Command", "Given", "Option", "listed", "loading"]


@dataclass(frozen=True)
class Option:
    """A flag of a command, and its line of help; ``choices`` where it takes a value."""

    flags: tuple[str, ...]
    meaning: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Command:
    """A row of the table: what runs, one line about it, an example, and what it takes.

    config: the file of ``conf/`` whose keys it takes; keys: what it takes where it composes none; bare: the key that
    an argument without ``=`` is the value of; renamed: keys that are called otherwise in the configuration.
    """

    run: Callable[["Given"], int | None]
    about: str
    example: str = ""
    config: str | None = None
    keys: tuple[str, ...] = ()
    options: tuple[Option, ...] = ()
    bare: str | None = None
    renamed: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Given:
    """What was given to a command: its options by name, and its arguments as they were written."""

    command: Command
    options: argparse.Namespace
    arguments: tuple[str, ...]

    @cached_property
    def overrides(self) -> list[str]:
        """The arguments as Hydra's overrides."""
        from semkv_bench.config.overrides import as_overrides

        renamed = dict(self.command.renamed)
        pairs = [argument.partition("=") for argument in self.arguments]
        named = ["".join((renamed.get(key, key), *rest)) for key, *rest in pairs]
        several = getattr(self.options, "multirun", False)
        return as_overrides(named, self.command.config, self.command.bare, several)

    @cached_property
    def config(self) -> "DictConfig":
        """The composed and checked configuration."""
        from semkv_bench.config.compose import compose_config

        return compose_config(self.command.config, self.overrides)

    def split(self, key: str) -> tuple[list[str], tuple[str, ...]]:
        """The values that ``key`` was given, and the other arguments."""
        mine = [argument for argument in self.arguments if argument.startswith(f"{key}=")]
        return [a.partition("=")[2] for a in mine], tuple(a for a in self.arguments if a not in mine)

    @cached_property
    def named(self) -> dict[str, list[str]]:
        """The values of each key of a command without a configuration, in order.

        An argument without an equals sign, or that is a folder's name, is a value of the command's ``bare`` key.

        Raises:
            UsageError: a key that the command does not take.
        """
        found = {key: [] for key in self.command.keys}
        for argument in self.arguments:
            key, equals, value = argument.partition("=")
            if not equals or (key not in found and Path(argument).expanduser().exists()):
                key, value = self.command.bare, argument
            if key not in found:
                keys = " and ".join(
                    filter(None, [", ".join(self.command.keys[:-1]), *self.command.keys[-1:]])
                )
                raise UsageError(f"{self.options.command} takes {keys or 'options only'}, not {argument}")
            found[key].append(value)
        return found

    def one(self, key: str, default: str = "") -> str:
        """The value of ``key`` in ``named``, or ``default``.

        Raises:
            UsageError: it was given more than once.
        """
        values = self.named[key]
        if len(values) > 1:
            raise UsageError(f"{self.options.command} takes one {key}, not {' and '.join(values)}")
        return values[0] if values else default

    def tell(self, content: Any) -> None:
        """Print ``content`` as JSON; a closed pipe is no error."""
        print_plain(json.dumps(content, indent=1, ensure_ascii=False))


@contextmanager
def loading() -> Iterator[None]:
    """Said while torch is imported, which takes seconds, and not where it was before."""
    what = "loading torch and transformers"
    if "torch" in sys.modules:
        yield
    elif ERR.is_terminal:
        from rich.live import Live
        from rich.spinner import Spinner

        # A ``Status`` would begin after the imports.
        with Live(Spinner("dots", what), console=ERR, transient=True):
            yield
    else:
        ERR.print(what, highlight=False)
        yield


def listed(value: str) -> list[str]:
    """The parts of ``a,b`` or ``[a,b]``."""
    return [part.strip() for part in value.removeprefix("[").removesuffix("]").split(",") if part.strip()]
