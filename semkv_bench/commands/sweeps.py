"""Commands that run models, or say what running them would take.

A command composes its configuration first and then imports what it uses: what is wrong with the arguments is said at
once, and none waits for the libraries of another.
"""

import shlex
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from semkv_bench.commands.given import Given, listed, loading
from semkv_bench.console import ERR, OUT
from semkv_bench.errors import UsageError

if TYPE_CHECKING:
    from omegaconf import DictConfig


def sweep(given: Given) -> None:
    """Run or resume a sweep, or one a combination of choices."""
    if given.options.multirun:
        from semkv_bench.sweep.multirun import multirun

        multirun(given.overrides, ERR)
        return
    config = given.config
    with loading():
        from semkv_bench.sweep.command import sweep_once
    sweep_once(config)


def plan(given: Given) -> None:
    """Print what a sweep would take."""
    named, rest = given.split("on")
    on = [name for value in named for name in listed(value)]
    config = replace(given, arguments=rest).config
    with loading():
        from semkv_bench.plan.command import estimates
        from semkv_bench.plan.view import plan_content, show_plan
    estimated = estimates(config, ERR, calibrated=given.options.calibrate, on=on)
    if given.options.json:
        given.tell(plan_content(*estimated))
    else:
        show_plan(*estimated, OUT)


def storage(given: Given) -> None:
    """Print bits per value and bytes of caches."""
    config = given.config
    from semkv_bench.plan.storage import show_storage, storage_rows

    # The shape of a model is what transformers makes of its configuration.
    with loading() if config.model is not None else nullcontext():
        rows = storage_rows(config)
    if given.options.json:
        given.tell(rows if len(rows) > 1 else rows[0])
    else:
        show_storage(rows, OUT)


def calibrate(given: Given) -> None:
    """Fit a method to a model."""
    config = given.config
    with loading():
        from semkv_bench.sweep.calibrate import calibrate
    path = calibrate(config)
    OUT.print(f"written: {path}", markup=False, highlight=False, soft_wrap=True)


def recipe(given: Given) -> None:
    """Find the cliff, then the mixes just above it."""
    config = given.config
    with loading():
        from semkv_bench.recipe import run_recipe
    run_recipe(config, OUT)


def search(given: Given) -> None:
    """Find levels by layer and side under a budget."""
    config = given.config
    with loading():
        from semkv_bench.search.run import run_search
    run_search(config, OUT)


def regress(given: Given) -> int:
    """Compare with the baseline; returns 1 where the cliff moved."""
    config, as_json = given.config, given.options.json
    _check_given_run(config)
    with loading():
        from semkv_bench.regress import run_regress
    code, content = run_regress(config, ERR if as_json else OUT, update=given.options.update)
    if as_json:
        given.tell(content)
    return code


def measure(given: Given) -> None:
    """Weigh a run's operating point in the packed cache."""
    config = given.config
    _check_given_run(config)
    with loading():
        from semkv_bench.sweep.measure import measure
        from semkv_bench.sweep.measured import measured_words

    content, path = measure(config)
    if given.options.json:
        given.tell(content)
        return
    again = shlex.quote(f"run={path.parent}")
    for line in (*measured_words(content), f"written: {path}", f"next: semkv-bench cliff-report {again}"):
        OUT.print(line, markup=False, highlight=False, soft_wrap=True)


def export(given: Given) -> None:
    """Write the prompts of a sweep for an engine without an adapter."""
    outs, rest = given.split("out")
    if not outs:
        raise UsageError("export needs a file for the prompts: out=prompts.jsonl")
    asked = replace(given, arguments=rest)
    config = asked.config
    with loading():
        from semkv_bench.sweep.exchange import export_prompts
    count = export_prompts(config, asked.overrides, Path(outs[-1]).expanduser())
    OUT.print(f"{count} prompts: {outs[-1]}", markup=False, highlight=False, soft_wrap=True)
    OUT.print(
        "answer each with a line of id, setting, text and bits; then: semkv-bench score ANSWERS.jsonl out=RUN"
    )


def score(given: Given) -> None:
    """Score answers to exported prompts into a run folder."""
    prompts, rest = given.split("prompts")
    # A file's name may hold an equals sign.
    files = [a for a in rest if "=" not in a or Path(a).expanduser().is_file()]
    if len(files) != 1:
        raise UsageError("score needs one file of answers: semkv-bench score ANSWERS.jsonl out=RUN")
    overrides = replace(given, arguments=tuple(a for a in rest if a not in files)).overrides
    where = Path(prompts[-1]).expanduser() if prompts else None
    with loading():
        from semkv_bench.sweep.exchange import score_answers
    score_answers(Path(files[0]).expanduser(), where, overrides)


def _check_given_run(config: "DictConfig") -> None:
    """That ``run=DIR`` names a run, before anything is imported that takes long."""
    from semkv_bench.records.runs import check_run

    if config.run is not None:
        check_run(Path(config.run).expanduser())
