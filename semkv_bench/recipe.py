"""The whole method in one command: find the uniform cliff, mix the two precisions just above it, pick the cheapest."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from semkv_bench import report
from semkv_bench.config.choices import conf_dir
from semkv_bench.console import human_bytes
from semkv_bench.errors import CheckFailed, UsageError
from semkv_bench.files import check_writable
from semkv_bench.plan.plan import Plan, make_plan
from semkv_bench.records.folder import charter_hash
from semkv_bench.records.runs import RUNS, new_folder, one_at_a_time
from semkv_bench.report.command import run_report
from semkv_bench.report.files import write_all
from semkv_bench.settings.sets import GridOnly
from semkv_bench.settings.setting import FULL
from semkv_bench.stats.plain import plain
from semkv_bench.stats.result import Report
from semkv_bench.sweep.command import run_plan
from semkv_bench.sweep.measure import measure_run
from semkv_bench.sweep.measured import measured_words

__all__ = ["Chosen", "choose_levels", "run_recipe"]

_OF_RECIPE = "recipe-"
_MEASURED_EXAMPLES = 8


@dataclass(frozen=True)
class Chosen:
    """Levels read off the uniform map: the two just above the cliff, and one below it as positive control."""

    high: int
    low: int
    control: int


def choose_levels(result: Report, levels: dict[str, int]) -> Chosen:
    """The two grid points just above the cliff of a uniform report; ``levels`` maps its settings to level counts.

    Raises:
        CheckFailed: no cliff was located, or only one grid point holds.
    """
    cliff = result.cliff
    if cliff.status != "located":
        raise CheckFailed(
            f"the uniform sweep did not locate a cliff (status {cliff.status}), so there is nothing to build on; "
            "see its report: more examples (per_task, seeds) or other grid.levels may settle it"
        )
    grid = sorted(levels.values())
    low, control = levels[cliff.upper_setting], levels[cliff.lower_setting]
    above = [count for count in grid if count > low]
    if not above:
        raise CheckFailed(
            f"only the highest grid point, L={low}, holds; add higher ones to grid.levels to have two above the cliff"
        )
    return Chosen(high=above[0], low=low, control=control)


def run_recipe(config: DictConfig, console: Console) -> Path:
    """Both sweeps, their reports, ``recipe.json`` and ``recipe.md`` in ``out``; returns that folder.

    Raises:
        CheckFailed: no cliff, or no setting is equivalent on the fresh examples.
        UsageError: the data hold no fresh examples for the second sweep.
    """
    if config.grid.key_levels is not None or config.grid.value_levels is not None:
        raise UsageError(
            "recipe mixes one pair of levels for keys and values; leave grid.key_levels and value_levels out"
        )
    default = OmegaConf.load(conf_dir() / "allocation" / "two_level.yaml")
    if any(config.allocation.get(end, default[end]) != default[end] for end in ("high", "low")):
        raise UsageError("recipe finds allocation.high and allocation.low itself; leave them out")
    check_writable(Path(config.out or RUNS).expanduser())
    uniform = _uniform_config(config)
    first = make_plan(uniform)
    out = _folder(config, first, _trial_of_second(config, first))
    uniform.out = str(out / "uniform")
    console.print(f"1 of 2: the uniform cliff of {first.source.name}", highlight=False)
    run_plan(first, uniform)
    uniform_result, _ = run_report(out / "uniform", console)
    chosen = choose_levels(
        uniform_result, {s.name: s.keys.allocation.count for s in first.settings if s.keys}
    )
    mixes = _mixed_config(config, chosen)
    mixes.out = str(out / "mixes")
    second = make_plan(mixes, used=first.examples)
    console.print(
        f"2 of 2: mixes of L={chosen.high} and L={chosen.low} on {len(second.examples)} fresh examples, "
        f"L={chosen.control} as positive control",
        highlight=False,
    )
    run_plan(second, mixes)
    result, _ = run_report(out / "mixes", console)
    summary = _summary(second, result, chosen, list(config.context))
    written = {
        "recipe.json": json.dumps(summary, indent=1, sort_keys=True) + "\n",
        "recipe.md": _markdown(summary, report.headline(result)),
    }
    write_all(out, {name: text.encode() for name, text in written.items()})
    console.print("\n" + _sentence(summary), highlight=False, soft_wrap=True)
    if summary["operating_point"] is None:
        raise CheckFailed(
            f"no setting is equivalent on the fresh examples; see {out / 'mixes' / 'report.html'}"
        )
    _measure(out / "mixes", second, summary["operating_point"]["setting"], console)
    return out


def _measure(path: Path, plan: Plan, setting: str, console: Console) -> None:
    """Tell what the operating point takes in the packed cache, or why it cannot be measured."""
    try:
        content, _ = measure_run(path, plan, setting, _MEASURED_EXAMPLES)
    except UsageError as error:
        console.print(
            f"not measured in the packed cache: {error}", markup=False, highlight=False, soft_wrap=True
        )
        return
    for line in measured_words(content):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    # Once more, with what was measured in it.
    run_report(path, Console(quiet=True))


def _folder(config: DictConfig, first: Plan, second: Plan) -> Path:
    """``out``, else the newest folder of a recipe of these two plans, or a new one."""
    if config.out is not None:
        return Path(config.out).expanduser()
    short = charter_hash({"uniform": first.charter, "mixes": second.charter})[:10]
    with one_at_a_time():
        before = [] if config.fresh else sorted(RUNS.glob(f"{_OF_RECIPE}[0-9]*-{short}"))
        folder = before[-1] if before else new_folder(short, _OF_RECIPE)
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def _trial_of_second(config: DictConfig, first: Plan) -> Plan:
    """A plan of the second sweep as if the grid's ends had been chosen.

    Raises for what could only fail in the second sweep, before the first is run.
    """
    grid = sorted({s.keys.allocation.count for s in first.settings if s.keys}, reverse=True)
    if len(grid) < 3:
        raise UsageError(
            "recipe needs three grid points or more: two above the cliff and one below; see grid.levels"
        )
    if any(tokens < 1 for tokens in config.context):
        raise UsageError(f"context={list(config.context)} must hold numbers of tokens of at least 1")
    return make_plan(_mixed_config(config, Chosen(grid[0], grid[1], grid[-1])), used=first.examples)


def _uniform_config(config: DictConfig) -> DictConfig:
    changed = OmegaConf.masked_copy(config, [key for key in config if key != "context"])
    changed.allocation = {"_target_": f"{GridOnly.__module__}.{GridOnly.__name__}"}
    return changed


def _mixed_config(config: DictConfig, chosen: Chosen) -> DictConfig:
    changed = OmegaConf.masked_copy(config, [key for key in config if key != "context"])
    changed.grid.levels = [chosen.high, chosen.low, chosen.control]
    if "low" not in changed.allocation:
        raise UsageError("recipe builds mixes of two levels; leave allocation=two_level as it is")
    changed.allocation.high, changed.allocation.low = chosen.high, chosen.low
    shift = max(config.seeds) + 1
    changed.seeds = [seed + shift for seed in config.seeds]
    return changed


def _summary(plan: Plan, result: Report, chosen: Chosen, contexts: list[int]) -> dict[str, Any]:
    point = result.operating_point
    setting = next((s for s in plan.settings if point is not None and s.name == point.setting), None)
    sizes = {} if setting is None else {str(n): setting.planned(plan.shape.cache, n).nbytes for n in contexts}
    return {
        "model": plan.source.name,
        "high": chosen.high,
        "low": chosen.low,
        "control": chosen.control,
        "operating_point": point and plain(point),
        "cache_bytes": sizes,
        "full_bytes": {str(n): FULL.planned(plan.shape.cache, n).nbytes for n in contexts},
    }


def _sentence(summary: dict[str, Any]) -> str:
    point = summary["operating_point"]
    if point is None:
        return f"{summary['model']}: no setting is shown to be equivalent to the full-precision cache."
    sizes = ", ".join(
        f"{human_bytes(size)} at {int(tokens):,} tokens (full {human_bytes(summary['full_bytes'][tokens])})"
        for tokens, size in summary["cache_bytes"].items()
    )
    return (
        f"{summary['model']}: operating point {point['setting']}, {point['code_bits']:.3f} code bits, "
        f"{point['effective_bits']:.3f} effective bits of the coded part; the whole cache is "
        f"{point['compression']:.2f}x smaller at this run's lengths{sizes and f', and takes {sizes}'}."
    )


def _markdown(summary: dict[str, Any], headline: str) -> str:
    rows = [
        f"| {int(tokens):,} | {human_bytes(summary['full_bytes'][tokens])} | {human_bytes(size)} |"
        for tokens, size in summary["cache_bytes"].items()
    ]
    table = ["", "| tokens | full | operating point |", "|---:|---:|---:|", *rows] if rows else []
    steps = (
        f"Uniform cliff first (`uniform/report.md`), then mixes of L={summary['high']} and L={summary['low']} on "
        f"fresh examples with L={summary['control']} as positive control (`mixes/report.md`)."
    )
    return "\n".join(["# Recipe", "", _sentence(summary), "", headline, "", steps, *table]) + "\n"
