"""The command line: ``semkv-bench COMMAND key=value ...``; it parses, and what a command does is in commands/."""

import argparse
import os
import re
import signal
import sys
import textwrap
import traceback
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

from semkv_bench.commands import COMMANDS, Command, Given, options_of
from semkv_bench.console import ERR, OUT, print_plain, set_up_output
from semkv_bench.errors import STOPPED, MissingError, SemkvError, UsageError, one_line_on_interrupt

__all__ = ["main"]


@one_line_on_interrupt()
def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (0 good, 1 check failed, 2 wrong usage, 3 could not be done)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    set_up_output()
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        OUT.print(_summary(), markup=False, highlight=False, soft_wrap=True)
        return 0
    try:
        return _run(arguments)
    except SemkvError as error:
        return _fail(error)
    except KeyboardInterrupt:
        ERR.print(STOPPED, highlight=False, soft_wrap=True)
        return 128 + signal.SIGINT
    except Exception as error:
        if os.environ.get("SEMKV_TRACEBACK"):
            traceback.print_exc()
        if isinstance(error, ModuleNotFoundError):
            return _fail(MissingError(f"{error}; semkv-bench doctor tells what is missing here"))
        return _fail(
            SemkvError(f"unexpected {type(error).__name__}: {error} (SEMKV_TRACEBACK=1 shows where)")
        )


def _run(arguments: list[str]) -> int:
    options, rest = _parser().parse_known_args(arguments)
    if options.version:
        from semkv_bench import __version__

        OUT.print(f"semkv-bench {__version__}", highlight=False)
        return 0
    name = options.command
    command = COMMANDS[name]
    given = (*options.arguments, *rest)
    if unknown := next((argument for argument in given if argument.startswith("-")), None):
        known = [flag for option in options_of(command) for flag in option.flags]
        raise UsageError(f"unknown option {unknown}{_near(unknown, known)}; settings are given as key=value")
    from semkv_bench.config.own import joined

    with joined(options.conf):
        if options.help:
            _help(name, command)
            return 0
        asked = Given(command, options, given)
        if getattr(options, "cfg", None):
            from semkv_bench.config.compose import to_yaml

            print_plain(to_yaml(asked.config).rstrip())
            return 0
        return command.run(asked) or 0


class _Parser(argparse.ArgumentParser):
    """Says what is wrong as every other part does, and leaves help to us."""

    def __init__(self, **options: Any):
        super().__init__(add_help=False, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Raise the UsageError that ``message`` of argparse stands for."""
        if found := re.match(r"argument command: invalid choice: '(.*?)'", message):
            known = ", ".join(COMMANDS)
            raise UsageError(
                f"there is no command {found[1]!r}{_near(found[1], COMMANDS)}; choose from {known}"
            )
        if message == "argument --conf: expected one argument":
            raise UsageError("--conf needs a folder: --conf DIR")
        raise UsageError(message.removeprefix("argument "))


def _parser() -> argparse.ArgumentParser:
    """Every command with its options; what is of the form key=value is left to Hydra."""
    parser = _Parser(prog="semkv-bench")
    parser.add_argument("--version", action="store_true")
    commands = parser.add_subparsers(dest="command", parser_class=_Parser)
    for name, command in COMMANDS.items():
        of_command = commands.add_parser(name, help=command.about)
        for option in options_of(command):
            if option.flags == ("--conf",):
                of_command.add_argument("--conf", action="append", default=[], metavar="DIR")
            elif option.choices:
                of_command.add_argument(*option.flags, choices=option.choices)
            else:
                of_command.add_argument(*option.flags, action="store_true")
        of_command.add_argument("arguments", nargs="*", default=[]).completer = partial(_completions, command)
    return parser


def _completions(command: Command, **context: Any) -> list[str]:
    if command.config is None:
        return [f"{key}=" for key in command.keys]
    from semkv_bench.config.keys import completions
    from semkv_bench.config.own import joined

    with joined(context["parsed_args"].conf or []):
        return completions(command.config)


def _near(word: str, known: Sequence[str]) -> str:
    from semkv_bench.config.choices import did_you_mean

    return did_you_mean(word, known)


def _summary() -> str:
    lines = [
        "semkv-bench measures where an LLM's quality falls off a cliff as its KV cache",
        "loses bits.",
        "",
    ]
    for name, command in COMMANDS.items():
        lines.append(f"  semkv-bench {name} {command.example}".rstrip())
        lines += textwrap.wrap(
            command.about, 78, initial_indent=" " * 6, subsequent_indent=" " * 6, break_on_hyphens=False
        )
    lines += ["", "Each command takes Hydra overrides (key=value) and --help, which lists every", "key."]
    return "\n".join(lines)


def _help(name: str, command: Command) -> None:
    lines = [
        f"semkv-bench {name} {command.example}".rstrip(),
        "",
        f"{command.about[0].upper()}{command.about[1:]}.",
    ]
    lines += ["", "Options:"]
    for option in options_of(command):
        flags = ", ".join(option.flags) + (f" {'|'.join(option.choices)}" if option.choices else "")
        lines.append(f"  {flags:<16}  {option.meaning}")
    if command.config is not None:
        from semkv_bench.config.compose import compose_config
        from semkv_bench.config.keys import help_lines

        lines += help_lines(command.config, compose_config(command.config))
    elif command.keys:
        lines += ["", f"Keys: {', '.join(command.keys)}"]
    # What is no terminal gets whole lines, to search in.
    text = "\n".join(lines)
    if OUT.is_terminal:
        text = "\n".join(_wrapped(line, OUT.width) for line in text.split("\n"))
    OUT.print(text, markup=False, highlight=False, soft_wrap=True)


def _wrapped(line: str, width: int) -> str:
    """``line`` folded at ``width``: what goes on stands below the text of its last column, or further in."""
    column = re.search(r"(?<=\S) {2,}", line)
    indent = len(line) - len(line.lstrip())
    hang = column.end() if column else indent and indent + 2
    if hang + max(map(len, line.split()), default=0) > width:
        hang = indent + 4
    return textwrap.fill(
        line, width, subsequent_indent=" " * hang, break_long_words=False, break_on_hyphens=False
    )


def _fail(error: SemkvError) -> int:
    ERR.print(f"semkv-bench: {' '.join(str(error).split())}", markup=False, highlight=False, soft_wrap=True)
    return error.exit_code


def complete() -> None:
    """Answer a shell that asks for completions, which it does by an environment variable; else nothing."""
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(_parser(), always_complete_options=False)


if __name__ == "__main__":
    sys.exit(main())
