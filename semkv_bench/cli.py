"""The command line: ``semkv-bench COMMAND key=value ...``; it parses, and what a command does is elsewhere.

A new command is a function that takes what was given, and a row of ``COMMANDS``. The function imports what it uses,
so that no command waits for the libraries of another.
"""

import argparse
import json
import os
import re
import signal
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from semkv_bench.console import ERR, OUT, set_up_output
from semkv_bench.errors import STOPPED, MissingError, SemkvError, UsageError, one_line_on_interrupt

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["COMMANDS", "Command", "Given", "main"]


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

    def tell(self, content: Any) -> None:
        """Print ``content`` as JSON; a closed pipe is no error."""
        _tell(json.dumps(content, indent=1, ensure_ascii=False))


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
        known = [flag for option in _options_of(command) for flag in option.flags]
        raise UsageError(f"unknown option {unknown}{_near(unknown, known)}; settings are given as key=value")
    from semkv_bench.config.own import joined

    with joined(options.conf):
        if options.help:
            _help(name, command)
            return 0
        asked = Given(command, options, given)
        if getattr(options, "cfg", None):
            from semkv_bench.config.compose import to_yaml

            _tell(to_yaml(asked.config).rstrip())
            return 0
        return command.run(asked) or 0


class _Parser(argparse.ArgumentParser):
    """Says what is wrong as every other part does, and leaves help to us."""

    def __init__(self, **options: Any):
        super().__init__(add_help=False, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
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
        for option in _options_of(command):
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


def _options_of(command: Command) -> tuple[Option, ...]:
    composed = (Option(("--cfg",), "print the composed configuration and run nothing", ("job",)),)
    return (*command.options, *(composed if command.config else ()), *_EVERYWHERE)


def _near(word: str, known: Sequence[str]) -> str:
    from semkv_bench.config.choices import did_you_mean

    return did_you_mean(word, known)


def _sweep(given: Given) -> None:
    if given.options.multirun:
        from semkv_bench.sweep.multirun import multirun

        multirun(given.overrides, ERR)
        return
    from semkv_bench.sweep.command import sweep_once

    sweep_once(given.config)


def _cliff_report(given: Given) -> None:
    if any(argument.startswith("import=") for argument in given.arguments):
        _import_report(given)
        return
    from semkv_bench.records.runs import check_run

    config = given.config
    if config.run is not None and all(
        config[key] is None for key in ("runs", "records", "records_model", "out")
    ):
        check_run(Path(config.run).expanduser())
    from semkv_bench.report.command import given_options, make_report

    changed = _changed_stats(given)
    if config.runs is not None:
        from semkv_bench.report.several import make_overview

        make_overview(config, given_options(config, changed), OUT)
    else:
        make_report(config, changed, OUT)


def _import_report(given: Given) -> None:
    from semkv_bench.importers import import_logs, split_arguments
    from semkv_bench.report.command import make_import_report

    kind, settings, options, rest = split_arguments(given.arguments, ("stats", "out"))
    frame, notes = import_logs(kind, settings, options)
    for note in notes:
        ERR.print(note, markup=False, highlight=False, soft_wrap=True, style="yellow")
    make_import_report(frame, kind, replace(given, arguments=tuple(rest)).config, OUT)


def _export(given: Given) -> None:
    from semkv_bench.sweep.exchange import export_prompts

    outs, rest = given.split("out")
    if not outs:
        raise UsageError("export needs a file for the prompts: out=prompts.jsonl")
    count = export_prompts(replace(given, arguments=rest).overrides, Path(outs[-1]).expanduser())
    OUT.print(f"{count} prompts: {outs[-1]}", markup=False, highlight=False, soft_wrap=True)
    OUT.print(
        "answer each with a line of id, setting, text and bits; then: semkv-bench score ANSWERS.jsonl out=RUN"
    )


def _score(given: Given) -> None:
    from semkv_bench.sweep.exchange import score_answers

    prompts, rest = given.split("prompts")
    files = [argument for argument in rest if "=" not in argument]
    if len(files) != 1:
        raise UsageError("score needs one file of answers: semkv-bench score ANSWERS.jsonl out=RUN")
    overrides = replace(given, arguments=tuple(a for a in rest if a not in files)).overrides
    where = Path(prompts[-1]).expanduser() if prompts else None
    score_answers(Path(files[0]).expanduser(), where, overrides)


def _changed_stats(given: Given) -> set[str]:
    """Names of the statistics options that were given."""
    keys = [override.lstrip("+").partition("=")[0] for override in given.overrides]
    whole = set(given.config.stats) if "stats" in keys else set()
    return whole | {key.removeprefix("stats.") for key in keys if key.startswith("stats.")}


def _compare(given: Given) -> None:
    from semkv_bench.report.command import given_options
    from semkv_bench.report.compare import compare_runs

    options = given_options(given.config, _changed_stats(given))
    options.pop("looks", None)
    compare_runs(given.config, options, OUT)


def _measure(given: Given) -> None:
    from semkv_bench.sweep.measure import measure, measured_words

    content, path = measure(given.config)
    if given.options.json:
        given.tell(content)
        return
    for line in (*measured_words(content), f"written: {path}"):
        OUT.print(line, markup=False, highlight=False, soft_wrap=True)


def _calibrate(given: Given) -> None:
    from semkv_bench.sweep.calibrate import calibrate

    path = calibrate(given.config)
    OUT.print(f"written: {path}", markup=False, highlight=False, soft_wrap=True)


def _recipe(given: Given) -> None:
    from semkv_bench.recipe import run_recipe

    run_recipe(given.config, OUT)


def _regress(given: Given) -> int:
    from semkv_bench.regress import run_regress

    as_json = given.options.json
    code, content = run_regress(given.config, ERR if as_json else OUT, update=given.options.update)
    if as_json:
        given.tell(content)
    return code


def _storage(given: Given) -> None:
    from semkv_bench.plan.storage import show_storage, storage_rows

    rows = storage_rows(given.config)
    if given.options.json:
        given.tell(rows if len(rows) > 1 else rows[0])
    else:
        show_storage(rows, OUT)


def _plan(given: Given) -> None:
    from semkv_bench.plan.command import estimates
    from semkv_bench.plan.view import plan_content, show_plan

    estimated = estimates(given.config, ERR, calibrated=given.options.calibrate)
    if given.options.json:
        given.tell(plan_content(*estimated))
    else:
        show_plan(*estimated, OUT)


def _models(given: Given) -> None:
    from semkv_bench.models.catalog import as_data, catalog, show_catalog

    entries = catalog(given.overrides)
    if given.options.json:
        given.tell(as_data(entries))
    else:
        show_catalog(entries, OUT)


def _doctor(given: Given) -> int:
    if given.arguments:
        raise UsageError(f"doctor takes --json only, not {given.arguments[0]}")
    from semkv_bench.doctor.report import as_data, examine, healthy, show_findings

    with ERR.status("looking at this machine"):
        findings = list(examine())
    if given.options.json:
        given.tell(as_data(findings))
    else:
        show_findings(findings, OUT)
    return 0 if healthy(findings) else MissingError.exit_code


def _show(given: Given) -> None:
    from semkv_bench.report.examples import show_examples

    keys = {"run": "", "setting": "", "only": "all"}
    for argument in given.arguments:
        key, equals, value = argument.partition("=")
        key, value = (key, value) if equals else ("run", argument)
        if key not in keys:
            raise UsageError(f"show takes {', '.join(keys)}, not {key}")
        keys[key] = value
    if not keys["run"] or not keys["setting"]:
        raise UsageError(
            "show needs run=DIR and setting=NAME, for example run=results/runs/mine setting=affine-L4"
        )
    show_examples(Path(keys["run"]).expanduser(), keys["setting"], keys["only"], OUT)


def _completion(given: Given) -> None:
    shells = ("bash", "zsh")
    if len(given.arguments) != 1 or given.arguments[0] not in shells:
        raise UsageError("completion takes one of bash and zsh: semkv-bench completion bash")
    import argcomplete

    _tell(argcomplete.shellcode(["semkv-bench"], shell=given.arguments[0]).strip())


_EVERYWHERE = (
    Option(("--conf",), "DIR adds groups and classes of your own: DIR/quantizer/mine.yaml is quantizer=mine"),
    Option(("-h", "--help"), "this text"),
)
_JSON = Option(("--json",), "print JSON")
_MULTIRUN = Option(
    ("-m", "--multirun"),
    "one sweep per combination of comma-separated choices, or per shard: sweep -m shard=1/2,2/2 out=DIR "
    "hydra/launcher=joblib hydra.launcher.n_jobs=2; launchers: basic, joblib, ray, submitit_local, submitit_slurm",
)

COMMANDS: dict[str, Command] = {
    "sweep": Command(
        _sweep,
        "run or resume a sweep",
        "model=smollm2 quantizer=affine task=synthetic",
        config="sweep",
        options=(_MULTIRUN,),
    ),
    "cliff-report": Command(
        _cliff_report,
        "statistics and report; runs=[DIR,DIR,...] sets cliffs side by side; import=FORMAT full=PATH NAME:BITS=PATH "
        "reads logs of lm-eval, kvpress, longbench, inspect, lighteval, opencompass, llama-perplexity",
        "[DIR | records=FILE | import=FORMAT full=PATH ...]",
        config="cliff_report",
        bare="run",
        renamed=(("model", "records_model"),),
    ),
    "compare": Command(
        _compare,
        "method against method at equal bits, over runs of one model, protocol and list of examples",
        "runs=[DIR,DIR]",
        config="compare",
    ),
    "export": Command(
        _export,
        "the prompts of a sweep as JSONL, for an engine without an adapter",
        "task=synthetic out=prompts.jsonl",
        config="sweep",
    ),
    "score": Command(
        _score,
        "answers to exported prompts, scored into a run folder",
        "ANSWERS.jsonl [prompts=FILE] out=RUN",
        config="sweep",
    ),
    "show": Command(
        _show,
        "examples with question, expected answer and the first difference from full precision; only=lost|won|changed",
        "run=DIR setting=affine-L4 [only=lost]",
        keys=("run", "setting", "only"),
        bare="run",
    ),
    "measure": Command(
        _measure,
        "bytes, speed and answers of a run's operating point in the packed cache, beside a plain one",
        "[DIR] [setting=NAME] [examples=8]",
        config="measure",
        options=(_JSON,),
        bare="run",
    ),
    "calibrate": Command(
        _calibrate,
        "fit a method to a model on a text that is not the evaluation's; sweeps of both then find the file",
        "model=smollm2 quantizer=kvquant [text=FILE]",
        config="calibrate",
    ),
    "recipe": Command(
        _recipe, "the cliff, then mixes just above it", "model=smollm2 quantizer=affine", config="recipe"
    ),
    "regress": Command(
        _regress,
        "did the cliff move since the baseline?",
        "[run=DIR]",
        config="regress",
        options=(_JSON, Option(("--update",), "write the baseline anew")),
    ),
    "storage": Command(
        _storage,
        "bits per value, cache bytes",
        "quantizer=affine grid.levels=[6,5]",
        config="storage",
        options=(_JSON,),
    ),
    "plan": Command(
        _plan,
        "prompts, memory, time of a sweep; loads no weights",
        "model=llama31 task=longbench",
        config="sweep",
        options=(Option(("--calibrate",), "time one example here, and keep that for estimates"), _JSON),
    ),
    "models": Command(
        _models,
        "what can be loaded here: cache shape, files on this disk, the command that fetches the rest; asks no network",
        keys=("model", "model.path"),
        options=(_JSON,),
    ),
    "doctor": Command(
        _doctor,
        "every check of this machine, with the command that mends what it finds; exit 3 if a sweep needs it",
        options=(_JSON,),
    ),
    "completion": Command(
        _completion,
        'completion of commands, keys and choices in a shell: eval "$(semkv-bench completion bash)"',
        "bash|zsh",
    ),
}


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
    for option in _options_of(command):
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


def _tell(text: str) -> None:
    """Print ``text`` as it is; a closed pipe is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        OUT.on_broken_pipe()


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
