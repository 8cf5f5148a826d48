"""The command: measure, or take a run, compare it with its baseline, say what moved."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

import semkv_bench
from semkv_bench.config.compose import build
from semkv_bench.errors import MissingError, SemkvError, UsageError
from semkv_bench.files import check_writable
from semkv_bench.models.shape import ModelShape
from semkv_bench.plan.plan import Plan, make_plan
from semkv_bench.plan.settings import planned_settings, quantizers
from semkv_bench.records.folder import charter_hash, read_run, read_sessions
from semkv_bench.records.runs import OF_REGRESS, RUNS, new_folder
from semkv_bench.regress.checksums import Checks, code_checks
from semkv_bench.regress.comparison import Comparison, JudgeOptions, compare, compare_code, require_comparable
from semkv_bench.regress.show import as_data, show
from semkv_bench.regress.snapshot import (
    Snapshot,
    from_run,
    planned_identity,
    read_baseline,
    through_json,
    write_baseline,
)
from semkv_bench.settings.setting import Setting
from semkv_bench.sweep.command import run_plan

__all__ = ["BASELINES", "baseline_path", "run_regress"]

BASELINES = Path("results/baselines")
_OWN_KEYS = ("run", "baseline", "quick", "judge")


def run_regress(config: DictConfig, console: Console, *, update: bool = False) -> tuple[int, dict]:
    """Compare with the baseline, tell ``console``, write regress.json; the exit code and that file's content.

    Exit code 0: nothing moved, or the baseline was written (``update``);
    1: something moved; 3: too few examples to judge.

    Raises:
        MissingError: no baseline, run or model.
        UsageError: a baseline or run of something else.
    """
    options = JudgeOptions(**OmegaConf.to_container(config.judge))
    if config.quick:
        if update or config.run is not None:
            raise UsageError("quick=true compares the code without a run; leave out --update and run=DIR")
        return _quick(config, console)
    _check_places(config, update)
    measured = _measure if config.run is None else _take
    old, new, path, out = measured(config, console, update)
    if update:
        return _update(old, new, options, path, out, console)
    outcome = compare(old, new, options)
    content = _content_shown(outcome, old, new, path, out, console)
    return _hint(outcome, path, console), content


def baseline_path(model: str, quantizer: str, protocol: str) -> Path:
    """Where the baseline of a model, quantizer and protocol lies.

    Under ``results/baselines`` of the working directory if it is there, else the one that comes with the
    package, if there is one.
    """
    slug = re.sub(r"[^a-z0-9]+", "-", f"{model}-{quantizer}-{protocol}".lower()).strip("-")
    own = BASELINES / f"{slug}.json"
    package = Path(semkv_bench.__file__).resolve().parent
    places = (BASELINES, package / "baselines", package.parent / BASELINES)
    return next((folder / own.name for folder in places if (folder / own.name).exists()), own)


def _quick(config: DictConfig, console: Console) -> tuple[int, dict]:
    """Code and storage alone: seconds, and no model."""
    out = None if config.out is None else Path(config.out).expanduser()
    if out is not None:
        check_writable(out)
    model, protocol = build(config.model, "model"), build(config.protocol, "protocol")
    settings = planned_settings(config)
    path = _path(config, model.name, settings, protocol.name)
    old = read_baseline(path)
    plain = OmegaConf.to_container(config)
    decided = {name: plain[name] for name in ("quantizer", "value_quantizer")}
    require_comparable(
        old, {**old.identity, **decided, "grid": [s.name for s in settings]}, "this configuration"
    )
    shape = old.model_shape()
    checks = code_checks(*quantizers(config), settings, shape, _device())
    figures = {setting.name: asdict(setting.storage_in(shape.cache)) for setting in settings}
    findings, count = compare_code(old, checks, figures)
    outcome = Comparison(findings, notes=[], checks=count)
    content = _content_shown(outcome, old, None, path, out, console)
    return _hint(outcome, path, console), content


def _measure(
    config: DictConfig, console: Console, update: bool
) -> tuple[Snapshot | None, Snapshot, Path, Path]:
    """Run the sweep; what can be refused is refused before."""
    sweep = OmegaConf.masked_copy(config, [key for key in config if key not in _OWN_KEYS])
    plan = make_plan(sweep)
    path = _path(config, plan.source.name, plan.settings, plan.protocol.name)
    old = _old(path, update)
    if old is not None and not update:
        require_comparable(old, {**old.identity, **planned_identity(plan.charter)}, "this configuration")
    checks = code_checks(*quantizers(config), plan.settings, plan.shape, _device())
    sweep.out = str(_fresh_folder(config, plan))
    folder = run_plan(plan, sweep, out=console).path
    return old, _snapshot(folder, plan.settings, plan.shape, checks), path, folder


def _take(config: DictConfig, console: Console, update: bool) -> tuple[Snapshot | None, Snapshot, Path, Path]:
    """A finished run; the code is checked as it is installed here."""
    folder = Path(config.run).expanduser()
    _, charter = read_run(folder)
    recorded = _config_of(folder)
    settings = planned_settings(recorded)
    path = _path(config, charter["model"], settings, charter["protocol"])
    old = _old(path, update)
    if old is not None and not update:
        require_comparable(old, {**old.identity, **planned_identity(charter)}, f"the run in {folder}")
    shape = build(recorded.model, "model").shape() if old is None else old.model_shape()
    checks = code_checks(*quantizers(recorded), settings, shape, _device())
    out = folder if config.out is None else Path(config.out).expanduser()
    return old, _snapshot(folder, settings, shape, checks), path, out


def _update(
    old: Snapshot | None, new: Snapshot, options: JudgeOptions, path: Path, out: Path, console: Console
) -> tuple[int, dict]:
    """Write the baseline after the difference to the old one was shown."""
    examples = len({unit[:2] for unit in new.units})
    if examples < options.min_examples:
        raise UsageError(
            f"nothing could be judged by a baseline of {examples} examples; {options.min_examples} are needed "
            "(per_task, seeds)"
        )
    content: dict = {}
    if old is None:
        _say(console, f"there was no usable baseline {path} before")
    else:
        try:
            content = _content_shown(compare(old, new, options), old, new, path, out, console)
        except UsageError as error:
            _say(console, f"not compared with the old baseline: {error}")
    write_baseline(new, path)
    _say(console, f"baseline written: {path}")
    return 0, {**content, "status": "updated", "exit_code": 0, "baseline": str(path)}


def _content_shown(
    outcome: Comparison, old: Snapshot, new: Snapshot | None, path: Path, out: Path | None, console: Console
) -> dict:
    """Show the outcome and write it to ``out``; returns what was written."""
    show(outcome, old, new, console)
    content = as_data(outcome, old, new, str(path))
    if out is not None:
        target = out / "regress.json"
        try:
            out.mkdir(parents=True, exist_ok=True)
            target.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise SemkvError(f"cannot write {target}: {error.strerror or error}") from error
    return content


def _hint(outcome: Comparison, path: Path, console: Console) -> int:
    """What to do about a move; the exit code."""
    if outcome.moved:
        _say(
            console,
            f"compared with {path}; if that is intended, run a sweep with --update and commit the file",
        )
    return outcome.exit_code


def _say(console: Console, words: str) -> None:
    console.print(words, markup=False, highlight=False, soft_wrap=True)


def _snapshot(folder: Path, settings: Sequence[Setting], shape: ModelShape, checks: Checks) -> Snapshot:
    frame, charter = read_run(folder)
    environment = next(iter(read_sessions(folder)), {})
    seeded = any(setting.seeded for setting in settings)
    return through_json(from_run(frame, charter, shape, checks, environment, seeded=seeded))


def _path(config: DictConfig, model: str, settings: Sequence[Setting], protocol: str) -> Path:
    if config.baseline is not None:
        return Path(config.baseline).expanduser()
    quantizer = next((setting.quantizer for setting in settings if setting.quantizer), "none")
    return baseline_path(model, quantizer, protocol)


def _old(path: Path, update: bool) -> Snapshot | None:
    """The baseline; when a new one is to be written it may be missing or of no use."""
    try:
        return read_baseline(path)
    except (MissingError, UsageError):
        if update:
            return None
        raise


def _config_of(folder: Path) -> DictConfig:
    try:
        config = OmegaConf.load(folder / "config.yaml")
    except (OSError, ValueError, OmegaConfBaseException) as error:
        raise MissingError(
            f"{folder / 'config.yaml'} cannot be read, so the code cannot be checked: {error}"
        ) from error
    if not isinstance(config, DictConfig):
        raise UsageError(f"{folder / 'config.yaml'} holds no configuration")
    return config


def _check_places(config: DictConfig, update: bool) -> None:
    """Raise for what could not be written in the end, before anything is run."""
    if config.out is None and config.run is not None:
        if Path(config.run).expanduser().is_dir():
            check_writable(Path(config.run).expanduser(), "run")
    else:
        check_writable(Path(config.out or RUNS).expanduser())
    if update:
        check_writable(
            Path(config.baseline or BASELINES / "any").expanduser().parent, "baseline", "baseline=FILE"
        )


def _fresh_folder(config: DictConfig, plan: Plan) -> Path:
    """A folder without records: those of an earlier state of the code must not be mixed in."""
    if config.out is not None:
        out = Path(config.out).expanduser()
        if (out / "protocol.yaml").exists():
            raise UsageError(
                f"out={out} holds a run already, perhaps of other code; choose another, or judge it: run={out}"
            )
        return out
    return new_folder(charter_hash(plan.charter)[:10], OF_REGRESS)


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
