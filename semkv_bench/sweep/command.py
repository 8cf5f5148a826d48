"""The sweep as a command: its run folder, a GPU of its own, progress, and what is said at the end."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from semkv_bench.console import ERR, OUT, LastingConsole

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from rich.console import Console

    from semkv_bench.plan.plan import Plan
    from semkv_bench.records.folder import RunFolder

__all__ = ["run_plan", "sweep_once"]


def sweep_once(config: "DictConfig", worker: int | None = None) -> None:
    """Run or resume the sweep of a checked configuration, with progress.

    worker: number of the job where several run side by side; they show plain lines and take a GPU each.
    """
    from semkv_bench.config.shard import Shard
    from semkv_bench.files import check_writable
    from semkv_bench.plan.plan import make_plan
    from semkv_bench.records.runs import RUNS

    check_writable(Path(config.out or RUNS).expanduser())
    turn = worker if config.shard is None else Shard.parse(config.shard).index - 1
    with _own_gpu(config, turn):
        folder = run_plan(make_plan(config), config, plain=worker is not None)
    planned = folder.charter["examples"]["count"]
    missing = 0 if folder.complete else planned - folder.recorded
    if missing > 0:
        OUT.print(f"{missing} of the run's {planned} examples are left to other shards", highlight=False)
    if missing <= 0 or worker is None:
        run = shlex.quote(f"run={folder.path}")
        OUT.print(f"next: semkv-bench cliff-report {run}", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _own_gpu(config: "DictConfig", turn: int | None) -> Iterator[None]:
    """Give process number ``turn`` of several a GPU of its own, where there are several and none is asked for."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if turn is None or count < 2 or config.model.get("device_map", "") is not None:
        yield
        return
    from semkv_bench.sweep.gpus import free_gpu

    with free_gpu(turn, count) as number:
        config.model.device_map = f"cuda:{number}"
        yield


def run_plan(
    plan: "Plan", config: "DictConfig", plain: bool = False, out: "Console" = OUT, judged: bool = True
) -> "RunFolder":
    """Run what a plan still lacks, with its progress, and return its folder.

    judged: are verdicts to come of it, so that one wants to know how it stands?
    """
    from semkv_bench.console import track
    from semkv_bench.plan.plan import too_few
    from semkv_bench.sweep.live import live
    from semkv_bench.sweep.run import open_run, run_sweep

    folder = open_run(plan, config)
    shard = "" if plan.shard is None else f" (shard {plan.shard}: {len(plan.share)} of {len(plan.examples)})"
    examples = f"{len(plan.share)} examples{shard}"
    ERR.print(
        f"{plan.source.name}: {len(plan.settings)} settings on {examples}, run folder {folder.path}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    if judged and (warning := too_few(plan)):
        ERR.print(warning, markup=False, highlight=False, soft_wrap=True, style="yellow")
    console = LastingConsole(stderr=True, force_terminal=False) if plain else ERR
    what = "examples" if plan.shard is None else f"shard {plan.shard}: examples"
    ran = run_sweep(
        plan, folder, partial(track, what=what, console=console, beside=live(folder) if judged else None)
    )
    out.print(_ran_words(ran, folder, config), markup=False, highlight=False, soft_wrap=True)
    if plan.stages:
        from semkv_bench.sweep.interim import progress_words

        out.print(progress_words(folder), highlight=False, soft_wrap=True)
    return folder


def _ran_words(ran: int, folder: "RunFolder", config: "DictConfig") -> str:
    if ran or not folder.complete:
        return f"ran {ran} example{'s' if ran > 1 else ''}" if ran else "nothing left to run"
    again = "; fresh=true runs it once more" if config.out is None else ""
    return f"nothing left to run: {folder.path} is complete{again}"
