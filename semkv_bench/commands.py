"""What each command does: a function that takes what was given, and a row of ``COMMANDS``.

A function composes its configuration first, and then imports what it uses: what is wrong with the arguments is said
at once, and no command waits for the libraries of another.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semkv_bench.console import ERR, OUT, print_plain
from semkv_bench.errors import MissingError, UsageError

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["COMMANDS", "Command", "Given", "Option", "options_of"]


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
        print_plain(json.dumps(content, indent=1, ensure_ascii=False))


@contextmanager
def _loading() -> Iterator[None]:
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


def _sweep(given: Given) -> None:
    if given.options.multirun:
        from semkv_bench.sweep.multirun import multirun

        multirun(given.overrides, ERR)
        return
    config = given.config
    with _loading():
        from semkv_bench.sweep.command import sweep_once
    sweep_once(config)


def _cliff_report(given: Given) -> None:
    if any(argument.startswith("import=") for argument in given.arguments):
        _import_report(given)
        return
    from semkv_bench.files import check_writable
    from semkv_bench.records.runs import check_run

    config = given.config
    if config.run is not None and all(config[key] is None for key in ("runs", "records", "records_model")):
        if config.out is not None:
            check_writable(Path(config.out).expanduser())
        check_run(Path(config.run).expanduser())
    from semkv_bench.report.command import given_options, reported

    changed = _changed_stats(given)
    if config.runs is not None:
        from semkv_bench.report.several import make_overview

        make_overview(config, given_options(config, changed), OUT)
    else:
        reported(config, changed, OUT)


def _import_report(given: Given) -> None:
    from semkv_bench.importers import import_logs, split_arguments
    from semkv_bench.report.command import make_import_report

    kind, settings, options, rest = split_arguments(given.arguments, ("stats", "out"))
    frame, notes = import_logs(kind, settings, options)
    for note in notes:
        ERR.print(note, markup=False, highlight=False, soft_wrap=True, style="yellow")
    make_import_report(frame, kind, replace(given, arguments=tuple(rest)).config, OUT)


def _export(given: Given) -> None:
    outs, rest = given.split("out")
    if not outs:
        raise UsageError("export needs a file for the prompts: out=prompts.jsonl")
    asked = replace(given, arguments=rest)
    config = asked.config
    with _loading():
        from semkv_bench.sweep.exchange import export_prompts
    count = export_prompts(config, asked.overrides, Path(outs[-1]).expanduser())
    OUT.print(f"{count} prompts: {outs[-1]}", markup=False, highlight=False, soft_wrap=True)
    OUT.print(
        "answer each with a line of id, setting, text and bits; then: semkv-bench score ANSWERS.jsonl out=RUN"
    )


def _score(given: Given) -> None:
    prompts, rest = given.split("prompts")
    files = [argument for argument in rest if "=" not in argument]
    if len(files) != 1:
        raise UsageError("score needs one file of answers: semkv-bench score ANSWERS.jsonl out=RUN")
    overrides = replace(given, arguments=tuple(a for a in rest if a not in files)).overrides
    where = Path(prompts[-1]).expanduser() if prompts else None
    with _loading():
        from semkv_bench.sweep.exchange import score_answers
    score_answers(Path(files[0]).expanduser(), where, overrides)


def _changed_stats(given: Given) -> set[str]:
    """Names of the statistics options that were given."""
    keys = [override.lstrip("+").partition("=")[0] for override in given.overrides]
    whole = set(given.config.stats) if "stats" in keys else set()
    return whole | {key.removeprefix("stats.") for key in keys if key.startswith("stats.")}


def _compare(given: Given) -> None:
    from semkv_bench.records.runs import check_run, folders_of

    config = given.config
    for folder in folders_of(config.runs)[0] if config.runs is not None else ():
        check_run(folder)
    from semkv_bench.report.command import given_options
    from semkv_bench.report.compare import compared

    options = given_options(config, _changed_stats(given))
    for planned in ("looks", "race"):
        options.pop(planned, None)
    compared(config, options, OUT)


def _check_given_run(config: "DictConfig") -> None:
    """That ``run=DIR`` names a run, before anything is imported that takes long."""
    from semkv_bench.records.runs import check_run

    if config.run is not None:
        check_run(Path(config.run).expanduser())


def _measure(given: Given) -> None:
    config = given.config
    _check_given_run(config)
    with _loading():
        from semkv_bench.sweep.measure import measure
        from semkv_bench.sweep.measured import measured_words

    content, path = measure(config)
    if given.options.json:
        given.tell(content)
        return
    again = shlex.quote(f"run={path.parent}")
    for line in (*measured_words(content), f"written: {path}", f"next: semkv-bench cliff-report {again}"):
        OUT.print(line, markup=False, highlight=False, soft_wrap=True)


def _atlas(given: Given) -> None:
    outs, rest = given.split("out")
    runs = []
    for key, value in (_pair(argument, "runs") for argument in rest):
        if key != "runs":
            raise UsageError(f"atlas takes runs and out, not {key}")
        runs += [value] if Path(value).expanduser().exists() else _listed(value)
    from semkv_bench.records.runs import folders_of

    if runs:
        folders_of(runs)
    from semkv_bench.report.atlas import ATLAS, make_atlas

    make_atlas(runs, Path(outs[-1] if outs else ATLAS).expanduser(), OUT)


def _pair(argument: str, bare: str) -> tuple[str, str]:
    """Key and value of an argument; one without an equals sign, or that is a folder's name, is a value of ``bare``."""
    key, equals, value = argument.partition("=")
    if not equals or (key != bare and Path(argument).expanduser().exists()):
        return bare, argument
    return key, value


def _listed(value: str) -> list[str]:
    return [part.strip() for part in value.removeprefix("[").removesuffix("]").split(",") if part.strip()]


def _calibrate(given: Given) -> None:
    config = given.config
    with _loading():
        from semkv_bench.sweep.calibrate import calibrate
    path = calibrate(config)
    OUT.print(f"written: {path}", markup=False, highlight=False, soft_wrap=True)


def _recipe(given: Given) -> None:
    config = given.config
    with _loading():
        from semkv_bench.recipe import run_recipe
    run_recipe(config, OUT)


def _search(given: Given) -> None:
    config = given.config
    with _loading():
        from semkv_bench.search.run import run_search
    run_search(config, OUT)


def _regress(given: Given) -> int:
    config, as_json = given.config, given.options.json
    _check_given_run(config)
    with _loading():
        from semkv_bench.regress import run_regress
    code, content = run_regress(config, ERR if as_json else OUT, update=given.options.update)
    if as_json:
        given.tell(content)
    return code


def _storage(given: Given) -> None:
    config = given.config
    from semkv_bench.plan.storage import show_storage, storage_rows

    # The shape of a model is what transformers makes of its configuration.
    with _loading() if config.model is not None else nullcontext():
        rows = storage_rows(config)
    if given.options.json:
        given.tell(rows if len(rows) > 1 else rows[0])
    else:
        show_storage(rows, OUT)


def _plan(given: Given) -> None:
    named, rest = given.split("on")
    on = [name for value in named for name in _listed(value)]
    config = replace(given, arguments=rest).config
    with _loading():
        from semkv_bench.plan.command import estimates
        from semkv_bench.plan.view import plan_content, show_plan
    estimated = estimates(config, ERR, calibrated=given.options.calibrate, on=on)
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
    from semkv_bench.doctor.report import as_data, examine, healthy, shown

    if given.options.json:
        with ERR.status("looking at this machine"):
            findings = list(examine())
        given.tell(as_data(findings))
    else:
        findings = list(shown(examine(), OUT))
    return 0 if healthy(findings) else MissingError.exit_code


def _show(given: Given) -> None:
    from semkv_bench.records.runs import check_run

    keys = {"run": "", "setting": "", "only": "all"}
    for argument in given.arguments:
        key, value = _pair(argument, "run")
        if key not in keys:
            raise UsageError(f"show takes {', '.join(keys)}, not {key}")
        keys[key] = value
    if not keys["run"] or not keys["setting"]:
        raise UsageError(
            "show needs run=DIR and setting=NAME, for example run=results/runs/mine setting=affine-L4"
        )
    run = Path(keys["run"]).expanduser()
    check_run(run)
    from semkv_bench.report.examples import show_examples

    show_examples(run, keys["setting"], keys["only"], OUT)


def _badge(given: Given) -> None:
    pairs = [_pair(argument, "run") for argument in given.arguments]
    if [key for key, _ in pairs] != ["run"]:
        raise UsageError("badge takes one folder of a run or a report: semkv-bench badge run=DIR")
    folder = Path(pairs[0][1]).expanduser()
    if not folder.is_dir():
        raise MissingError(f"{folder} does not exist; give run=DIR of a sweep or a report")
    from semkv_bench.report.badge import badge, badge_line
    from semkv_bench.report.several import report_in

    report = report_in(folder, {})
    if given.options.json:
        given.tell(badge(report))
    else:
        print_plain(badge_line(report))


def _completion(given: Given) -> None:
    shells = ("bash", "zsh")
    if len(given.arguments) != 1 or given.arguments[0] not in shells:
        raise UsageError("completion takes one of bash and zsh: semkv-bench completion bash")
    import argcomplete

    print_plain(argcomplete.shellcode(["semkv-bench"], shell=given.arguments[0]).strip())


def options_of(command: Command) -> tuple[Option, ...]:
    """All options of a command, with those that every command has."""
    composed = (Option(("--cfg",), "print the composed configuration and run nothing", ("job",)),)
    return (*command.options, *(composed if command.config else ()), *_EVERYWHERE)


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
    "badge": Command(
        _badge,
        "a line for a model card: the cheapest safe cache with its evidence; --json for an endpoint of shields.io",
        "run=DIR",
        keys=("run",),
        options=(_JSON,),
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
    "atlas": Command(
        _atlas,
        "one page and one JSON of models x methods: cliff, cheapest safe cache, n, date, from folders of runs",
        "runs=[DIR,DIR] [out=results/atlas]",
        keys=("runs", "out"),
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
    "search": Command(
        _search,
        "levels by layer and side under a budget, by KL on calibration prompts, then confirmed on fresh examples "
        "against uniform levels and KVTuner's pairs",
        "model=smollm2 quantizer=affine target_bits=3.0",
        config="search",
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
        "prompts, memory, time of a sweep; loads no weights; on=[A100,H100,H200,MI300X,cpu] estimates it for these",
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
