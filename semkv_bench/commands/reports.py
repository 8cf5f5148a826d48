"""Commands that read records and reports.

What is wrong with the arguments is said before anything is imported that takes long.
"""

from dataclasses import replace
from pathlib import Path

from semkv_bench.commands.given import Given, listed
from semkv_bench.console import ERR, OUT, print_plain
from semkv_bench.errors import MissingError, UsageError

_BESIDE_IMPORT = ("stats", "out", "export", "log")


def cliff_report(given: Given) -> None:
    """Statistics and report of a run, of several side by side, or of records made elsewhere."""
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

    kind, settings, options, rest = split_arguments(given.arguments, _BESIDE_IMPORT)
    config = replace(given, arguments=tuple(rest)).config
    frame, notes = import_logs(kind, settings, options)
    for note in notes:
        ERR.print(note, markup=False, highlight=False, soft_wrap=True, style="yellow")
    make_import_report(frame, kind, config, OUT)


def compare(given: Given) -> None:
    """Methods against each other over runs of one protocol."""
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


def _changed_stats(given: Given) -> set[str]:
    """Names of the statistics options that were given."""
    keys = [override.lstrip("+").partition("=")[0] for override in given.overrides]
    whole = set(given.config.stats) if "stats" in keys else set()
    return whole | {key.removeprefix("stats.") for key in keys if key.startswith("stats.")}


def atlas(given: Given) -> None:
    """Write the page and the JSON of models x methods."""
    runs = []
    for value in given.named["runs"]:
        runs += [value] if Path(value).expanduser().exists() else listed(value)
    from semkv_bench.records.runs import folders_of

    if runs:
        folders_of(runs)
    from semkv_bench.report.atlas import ATLAS, make_atlas

    make_atlas(runs, Path(given.one("out", str(ATLAS))).expanduser(), OUT)


def show(given: Given) -> None:
    """Print the examples of a run under one setting."""
    from semkv_bench.records.runs import check_run

    run, setting, only = given.one("run"), given.one("setting"), given.one("only", "all")
    if not run or not setting:
        raise UsageError(
            "show needs run=DIR and setting=NAME, for example run=results/runs/mine setting=affine-L4"
        )
    check_run(Path(run).expanduser())
    from semkv_bench.report.examples import show_examples

    show_examples(Path(run).expanduser(), setting, only, OUT)


def badge(given: Given) -> None:
    """Print a model card's line."""
    if not given.named["run"]:
        raise UsageError("badge takes one folder of a run or a report: semkv-bench badge run=DIR")
    folder = Path(given.one("run")).expanduser()
    if not folder.is_dir():
        raise MissingError(f"{folder} does not exist; give run=DIR of a sweep or a report")
    from semkv_bench.report.badge import badge, badge_line
    from semkv_bench.report.several import report_in

    report = report_in(folder, {})
    if given.options.json:
        given.tell(badge(report))
    else:
        print_plain(badge_line(report))
