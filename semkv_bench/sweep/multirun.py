"""``sweep -m``: the sweep under Hydra's multirun, one after another or through a launcher plugin."""

import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.console import Console

from semkv_bench.config.choices import conf_dir, search_path
from semkv_bench.config.compose import check_config, check_sweeps, to_yaml, without, wrong_configuration
from semkv_bench.config.methods import method_nodes
from semkv_bench.errors import SemkvError, UsageError
from semkv_bench.files import check_writable
from semkv_bench.plan.plan import make_plan
from semkv_bench.records.runs import RUNS
from semkv_bench.sweep.launchers import _HERE, launcher_of

__all__ = ["multirun"]


log = logging.getLogger(__name__)


def multirun(overrides: Sequence[str], console: Console) -> int:
    """Run one sweep per combination of the comma-separated choices in ``overrides``.

    Each has a run folder of its own; shards of one sweep share one. All plans are made before the first job is
    started; ``console`` says so meanwhile.

    Raises:
        UsageError: overrides that do not compose, or a plan that cannot work.
        MissingError: the launcher chosen is not installed.
        SemkvError: a worker was lost.
    """
    launcher = launcher_of(overrides)
    own_overrides = [o for o in overrides if not o.lstrip("+~").startswith("hydra")]
    jobs = check_sweeps("sweep", own_overrides)
    nodes = _method_nodes(jobs, own_overrides)
    with console.status(f"checking the plans of {len(jobs)} jobs"):
        _check_plans(jobs)
    failed: list[tuple[str, Exception]] = []
    job = _collecting(failed) if launcher == _HERE else _job
    launch = hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="sweep")(job)
    # Without it Hydra prints a failed job's traceback and exits by itself.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    own = sys.argv
    sys.argv = [
        own[0],
        "--multirun",
        *_defaults(launcher, overrides, len(jobs)),
        *nodes,
        *overrides,
        *search_path(),
    ]
    try:
        launch()
    except SemkvError:
        raise
    except Exception as error:
        if problem := wrong_configuration(error):
            raise problem from error
        if launcher == _HERE:
            raise
        reason = " ".join(str(error).split())
        raise SemkvError(
            f"a job of hydra/launcher={launcher} was lost ({type(error).__name__}: {reason[:300]}); "
            "what is recorded is safe, run the same command again to continue"
        ) from error
    finally:
        sys.argv = own
    _tell_failed(failed)
    return 0


def _method_nodes(jobs: Sequence[DictConfig], overrides: Sequence[str]) -> list[str]:
    """The overrides by which Hydra composes the methods of every job, which must be the same ones."""
    lists = {tuple(job.methods or ()) for job in jobs}
    if len(lists) > 1:
        raise UsageError(
            "-m runs sweeps of one list of methods; start a sweep for each list, or take one list for all"
        )
    options = [override for override in overrides if override.lstrip("+~").startswith("method.")]
    return method_nodes(jobs[0], options)


def _check_plans(configs: Sequence[DictConfig]) -> None:
    """Raise for what would end any of the jobs before its weights are loaded."""
    # Shards of one sweep have one plan.
    for config in {to_yaml(without(config, "shard")): config for config in configs}.values():
        check_writable(Path(config.out or RUNS).expanduser())
        make_plan(config)


def _collecting(failed: list[tuple[str, Exception]]) -> Callable[[DictConfig], None]:
    """A job that notes its error in ``failed``; Hydra would tell the first one only, in words of its own."""

    def job(config: DictConfig) -> None:
        try:
            _job(config)
        except Exception as error:
            context: Any = HydraConfig.get()
            failed.append((f"job {context.job.num} ({context.job.override_dirname})", error))

    return job


def _tell_failed(failed: Sequence[tuple[str, Exception]]) -> None:
    """Raise the first error of a multirun, after a line for each of the others."""
    for job, error in failed[1:]:
        log.warning("%s failed: %s", job, error)
    if failed:
        job, error = failed[0]
        raise type(error)(f"{job} failed: {error}") if isinstance(error, SemkvError) else error


def _defaults(launcher: str, overrides: Sequence[str], jobs: int) -> list[str]:
    """Overrides of Hydra itself where the user gave none."""
    given = {override.lstrip("+").partition("=")[0] for override in overrides}
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    # Workers may start in another folder, so that a relative path would not do.
    folder = str(Path("results/multirun").resolve() / stamp).replace("'", r"\'")
    defaults = {"hydra.output_subdir": "null", "hydra.sweep.dir": f"'{folder}'"}
    if launcher == "joblib":
        defaults["hydra.launcher.n_jobs"] = str(min(jobs, _gpus() or os.cpu_count() or 1))
    if launcher == "ray":
        defaults["+hydra.launcher.ray.init.include_dashboard"] = "false"
        if _gpus():
            defaults["+hydra.launcher.ray.remote.num_gpus"] = "1"
    return [f"{key}={value}" for key, value in defaults.items() if key.lstrip("+") not in given]


def _gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _job(config: DictConfig) -> None:
    from semkv_bench.console import set_up_output
    from semkv_bench.sweep.command import sweep_once

    context: Any = HydraConfig.get()
    in_worker = context.runtime.choices.get("hydra/launcher", _HERE) != _HERE
    os.chdir(context.runtime.cwd)
    if in_worker:
        # The parent ends its workers; a Ctrl-C that reaches all would print a traceback for each.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        set_up_output()
    try:
        sweep_once(check_config("sweep", config), worker=int(context.job.num) if in_worker else None)
    finally:
        # A worker process takes the next job with the memory of the last one given back.
        gc.collect()
        if torch := sys.modules.get("torch"):
            torch.cuda.empty_cache()
