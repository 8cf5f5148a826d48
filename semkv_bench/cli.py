"""The command line: ``semkv-bench COMMAND key=value ...``; nothing but argument handling."""

import json
import os
import re
import signal
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence
from functools import partial

from semkv_bench.console import ERR, OUT, set_up_output
from semkv_bench.errors import STOPPED, MissingError, SemkvError, UsageError, one_line_on_interrupt
from semkv_bench.sweep.command import run_plan, sweep_once

__all__ = ["main"]

_SUMMARY = """semkv-bench measures where an LLM's quality falls off a cliff as its KV cache
loses bits.

  semkv-bench sweep model=smollm2 quantizer=affine task=synthetic
      run or resume a sweep
  semkv-bench cliff-report [run=DIR | records=FILE]
      statistics and report; runs=[DIR,DIR,...] sets cliffs side by side
  semkv-bench recipe model=smollm2 quantizer=affine
      the cliff, then mixes just above it
  semkv-bench regress [run=DIR]
      did the cliff move since the baseline?
  semkv-bench storage quantizer=affine grid.levels=[6,5]
      bits per value, cache bytes
  semkv-bench plan model=llama31 task=longbench
      prompts, memory, time of a sweep; loads no weights
  semkv-bench models
      what can be loaded here
  semkv-bench doctor
      what is missing here, and how to mend it

Each command takes Hydra overrides (key=value) and --help, which lists the
groups and choices."""

_PATHS = ("baseline", "dir", "out", "path", "prompts_path", "records", "run")


@one_line_on_interrupt()
def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (0 good, 1 check failed, 2 wrong usage, 3 could not be done)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    set_up_output()
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        OUT.print(_SUMMARY, markup=False, highlight=False, soft_wrap=True)
        return 0
    if arguments[0] == "--version":
        from semkv_bench import __version__

        OUT.print(f"semkv-bench {__version__}", highlight=False)
        return 0
    try:
        return _run(arguments[0], arguments[1:])
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


def _run(command: str, arguments: list[str]) -> int:
    if command not in _COMMANDS:
        raise UsageError(f"there is no command {command!r}; choose from {', '.join(_COMMANDS)}")
    config_name, run = _COMMANDS[command]
    from semkv_bench.config.own import joined

    folders, arguments = _own_folders(arguments)
    with joined(folders):
        if "-h" in arguments or "--help" in arguments:
            _help(command, config_name)
            return 0
        return run(arguments)


def _own_folders(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The folders that ``--conf DIR`` names, and the other arguments."""
    folders, rest, left = [], [], iter(arguments)
    for argument in left:
        name, equals, folder = argument.partition("=")
        if name != "--conf":
            rest.append(argument)
            continue
        folder = folder if equals else next(left, "")
        if not folder:
            raise UsageError("--conf needs a folder: --conf DIR")
        folders.append(folder)
    return folders, rest


def _sweep(arguments: list[str]) -> int:
    from semkv_bench.config.compose import compose_config

    if "-m" in arguments or "--multirun" in arguments:
        from semkv_bench.sweep.multirun import multirun

        rest = [a for a in arguments if a not in ("-m", "--multirun")]
        return multirun(_overrides(rest, several=True), ERR)
    sweep_once(compose_config("sweep", _overrides(arguments)))
    return 0


def _cliff_report(arguments: list[str]) -> int:
    from semkv_bench.config.compose import compose_config
    from semkv_bench.report.command import given_options, make_report

    # Hydra would take model= for the group of models, and a name of brackets and commas for a list.
    models = [argument for argument in arguments if argument.startswith("model=")]
    overrides = _overrides([argument for argument in arguments if argument not in models])
    config = compose_config("cliff_report", overrides)
    if models:
        config.records_model = _unquoted(models[-1].removeprefix("model=")) or None
    keys = [override.lstrip("+").partition("=")[0] for override in overrides]
    whole = set(config.stats) if "stats" in keys else set()
    changed = whole | {key.removeprefix("stats.") for key in keys if key.startswith("stats.")}
    if config.runs is not None:
        from semkv_bench.report.several import make_overview

        make_overview(config, given_options(config, changed), OUT)
        return 0
    make_report(config, changed, OUT)
    return 0


def _unquoted(value: str) -> str:
    """``value`` without a pair of quotes around it, as Hydra reads it."""
    quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    return value[1:-1] if quoted else value


def _recipe(arguments: list[str]) -> int:
    from semkv_bench.config.compose import compose_config
    from semkv_bench.recipe import run_recipe

    run_recipe(compose_config("recipe", _overrides(arguments)), run_plan, OUT)
    return 0


def _regress(arguments: list[str]) -> int:
    from semkv_bench.config.compose import compose_config
    from semkv_bench.regress import run_regress

    flags = {"--json", "--update"}
    config = compose_config("regress", _overrides([a for a in arguments if a not in flags]))
    console = ERR if "--json" in arguments else OUT
    run = partial(run_plan, out=console)
    code, content = run_regress(config, run, console, update="--update" in arguments)
    if "--json" in arguments:
        _tell(json.dumps(content, indent=1))
    return code


def _storage(arguments: list[str]) -> int:
    from semkv_bench.config.compose import compose_config
    from semkv_bench.plan.storage import show_storage, storage_rows

    as_json = "--json" in arguments
    config = compose_config("storage", _overrides([a for a in arguments if a != "--json"]))
    rows = storage_rows(config)
    if as_json:
        _tell(json.dumps(rows if len(rows) > 1 else rows[0], indent=1))
    else:
        show_storage(rows, OUT)
    return 0


def _plan(arguments: list[str]) -> int:
    flags, rest = _flags(arguments, "--json", "--calibrate")
    from semkv_bench.config.compose import compose_config
    from semkv_bench.plan.memory import estimate_memory, weights_of
    from semkv_bench.plan.plan import make_plan
    from semkv_bench.plan.storage import published_words
    from semkv_bench.plan.timing import calibrate, estimate_time
    from semkv_bench.plan.view import plan_content, show_plan

    config = compose_config("sweep", _overrides(rest))
    try:
        plan = make_plan(config)
    except MissingError as error:
        raise MissingError(f"{error}{published_words(config.model)}") from error
    weights = weights_of(plan)
    memory = estimate_memory(plan, weights)
    if "--calibrate" in flags:
        if not memory.fits:
            raise UsageError(f"the model does not fit here: {memory.advice}")
        with ERR.status(f"timing {plan.source.name} on one example"):
            calibrate(plan, weights.parameters)
    duration = estimate_time(plan, weights, memory.batch_rows)
    if "--json" in flags:
        _tell(json.dumps(plan_content(plan, memory, duration), indent=1))
    else:
        show_plan(plan, memory, duration, OUT)
    return 0


def _models(arguments: list[str]) -> int:
    flags, rest = _flags(arguments, "--json")
    from semkv_bench.models.catalog import as_json, catalog, show_catalog

    overrides = _overrides(rest)
    strange = next((o for o in overrides if not o.startswith(("model=", "model."))), None)
    if strange is not None:
        raise UsageError(f"models takes model=... and model.path=... only, not {strange}")
    entries = catalog(overrides)
    if "--json" in flags:
        _tell(as_json(entries))
    else:
        show_catalog(entries, OUT)
    return 0


def _doctor(arguments: list[str]) -> int:
    flags, rest = _flags(arguments, "--json")
    if rest:
        raise UsageError(f"doctor takes --json only, not {rest[0]}")
    from semkv_bench.doctor.report import as_json, examine, healthy, show_findings

    with ERR.status("looking at this machine"):
        findings = list(examine())
    if "--json" in flags:
        _tell(as_json(findings))
    else:
        show_findings(findings, OUT)
    return 0 if healthy(findings) else MissingError.exit_code


def _flags(arguments: list[str], *known: str) -> tuple[set[str], list[str]]:
    """The options among ``arguments`` that the command knows, and the rest."""
    return {a for a in arguments if a in known}, [a for a in arguments if a not in known]


_COMMANDS: dict[str, tuple[str | None, Callable[[list[str]], int]]] = {
    "sweep": ("sweep", _sweep),
    "cliff-report": ("cliff_report", _cliff_report),
    "recipe": ("recipe", _recipe),
    "regress": ("regress", _regress),
    "storage": ("storage", _storage),
    "plan": ("sweep", _plan),
    "models": (None, _models),
    "doctor": (None, _doctor),
}

_JSON = ("--json", "print JSON")
_OPTIONS: dict[str, list[tuple[str, str]]] = {
    "sweep": [
        ("-m, --multirun", "one sweep per combination of comma-separated choices, or per shard:"),
        ("", "  sweep -m shard=1/2,2/2 out=DIR hydra/launcher=joblib hydra.launcher.n_jobs=2"),
        ("", "launchers: basic, joblib, ray, submitit_local, submitit_slurm"),
    ],
    "plan": [("--calibrate", "time one example here, and keep that for estimates"), _JSON],
    "regress": [_JSON, ("--update", "write the baseline anew")],
    "storage": [_JSON],
    "models": [_JSON],
    "doctor": [_JSON],
}
_ABOUT = {
    "models": "semkv-bench models [model=NAME | model.path=HUB_NAME_OR_FOLDER]\n\n"
    "What can be loaded here: cache shape, files on this disk, the command that fetches the rest. Asks no network.",
    "doctor": "semkv-bench doctor\n\nEvery check of this machine, with the command that mends what it finds. "
    "Exit 3 if something is missing that a sweep needs.",
}


def _help(command: str, config_name: str | None) -> None:
    lines = [_ABOUT[command]] if config_name is None else _keys_of(command, config_name)
    if command in _OPTIONS:
        lines += ["", "Options:", *(f"  {name:<16}{text}" for name, text in _OPTIONS[command])]
    if config_name is not None:
        lines += [
            "",
            "Keys inside a group: group.key=value, for example grid.levels=[8,6,5,4] or stats.margin=0.05",
            "--conf DIR adds groups and classes of your own: DIR/quantizer/mine.yaml is the choice quantizer=mine",
        ]
    # What is no terminal gets whole lines, to search in.
    text = "\n".join(lines)
    if OUT.is_terminal:
        text = "\n".join(_wrapped(line, OUT.width) for line in text.split("\n"))
    OUT.print(text, markup=False, highlight=False, soft_wrap=True)


def _wrapped(line: str, width: int) -> str:
    """``line`` folded at ``width``: what goes on stands below the text of its last column, or further in."""
    column = re.search(r"(?<=\S) {2,}(# )?", line)
    indent = len(line) - len(line.lstrip())
    hang = " " * (column.end() if column else indent and indent + 2)
    return textwrap.fill(line, width, subsequent_indent=hang, break_long_words=False, break_on_hyphens=False)


def _keys_of(command: str, config_name: str) -> list[str]:
    from semkv_bench.config.compose import choices, conf_dir

    lines = [f"semkv-bench {command} key=value ...", "", "Groups and their choices (group=choice):"]
    lines += [f"  {group}: {', '.join(names)}" for group, names in choices(config_name).items()]
    lines += ["", "Keys and defaults:"]
    body = (conf_dir() / f"{config_name}.yaml").read_text().split("- _self_", 1)[1].splitlines()
    return lines + [f"  {line}" for line in body if line.strip() and not line.lstrip().startswith("- ")]


def _overrides(arguments: Sequence[str], several: bool = False) -> list[str]:
    """The arguments as Hydra reads them; ``several``: commas separate the choices of a multirun."""
    for argument in arguments:
        if argument.startswith("-"):
            raise UsageError(f"unknown option {argument}; settings are given as key=value")
        if "=" not in argument and not argument.startswith("~"):
            raise UsageError(f"{argument!r} is not of the form key=value")
    return [_path_as_given(argument, several) for argument in arguments]


def _path_as_given(argument: str, several: bool) -> str:
    """A path in Hydra's quotes, so that spaces, brackets and accents in it need none from the user."""
    key, equals, value = argument.partition("=")
    plain = value not in ("", "null", "???") and not value.startswith(("'", '"')) and not set(value) & {"\\"}
    if key.lstrip("+").rpartition(".")[2] not in _PATHS or not plain or "${" in value:
        return argument
    if several and "," in value:
        return argument
    return key + equals + "'" + value.replace("'", "\\'") + "'"


def _tell(text: str) -> None:
    """Print JSON as it is; a closed pipe is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        OUT.on_broken_pipe()


def _fail(error: SemkvError) -> int:
    ERR.print(f"semkv-bench: {' '.join(str(error).split())}", markup=False, highlight=False, soft_wrap=True)
    return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
