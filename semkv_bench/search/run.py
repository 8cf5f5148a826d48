"""The search as a command: sensitivity, choice, fresh examples, outcome."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from semkv_bench.checks import number, whole
from semkv_bench.config.compose import build
from semkv_bench.errors import SemkvError, UsageError
from semkv_bench.files import check_writable
from semkv_bench.grid.levels import check_levels
from semkv_bench.plan.plan import Plan, fresh, make_plan
from semkv_bench.plan.settings import plain_node, quantizers
from semkv_bench.quantizers.base import pair_label
from semkv_bench.records.folder import read_run
from semkv_bench.report.command import run_report
from semkv_bench.report.files import write_all
from semkv_bench.search.layers import PAIRS, Cache, LevelsBySide, Part
from semkv_bench.search.nodes import layered, yaml_text
from semkv_bench.search.outcome import Candidate, outcome
from semkv_bench.settings import GridOnly, ReadAll
from semkv_bench.settings.one_at_a_time import OneAtATime, alone
from semkv_bench.sweep.command import run_plan

__all__ = ["RESULTS", "run_search"]

RESULTS = Path("results/search")
_OWN_KEYS = ("target_bits", "tokens", "calibration_seeds", "calibration_per_task")


@dataclass(frozen=True)
class _Search:
    """What all steps need. label: of the method; losses: mean KL by part and levels."""

    config: DictConfig
    cache: Cache
    label: str
    out: Path


def run_search(config: DictConfig, console: Console) -> Path:
    """Both sweeps, their folders and the outcome in ``out``; returns that folder.

    ``out/quantizer/NAME.yaml`` is what was found: ``--conf out quantizer=NAME``.

    Raises:
        UsageError: a budget that no levels meet or that leaves nothing to choose, a quantizer without levels to choose,
            no example that shares neither prompt nor document with the calibration.
    """
    _check(config)
    keys, values = quantizers(config)
    trial = make_plan(_plain_sweep(config))
    if not trial.engine.simulates:
        raise UsageError(
            f"search simulates every layer by itself, which engine={trial.engine.name} does not; leave it out"
        )
    calibration = _calibration_config(config, trial.shape.quantized_layers, trial.shape.layers)
    first = make_plan(calibration)
    tokens = config.tokens or round(sum(len(e.input_ids) - 1 for e in first.examples) / len(first.examples))
    cache = Cache.of(keys, values, _levels(config), trial.shape.cache, tokens)
    cache.budget(config.target_bits)
    left_out = len(trial.examples) - len(fresh(trial.examples, first.examples))
    label = pair_label(keys, values)
    out = Path(config.out or RESULTS / f"{trial.source.name}-{label}-{config.target_bits:g}").expanduser()
    check_writable(out)
    search = _Search(config, cache, label, out)

    calibration.out = str(out / "sensitivity")
    console.print(
        f"1 of 2: {len(cache.parts)} layers and sides at {len(cache.grid)} level counts on {len(first.examples)} "
        "calibration prompts",
        highlight=False,
    )
    run_plan(first, calibration, judged=False)
    losses, measured = _losses(search)
    candidates = _candidates(search, losses)
    second_config = _confirming(search, candidates)
    second = make_plan(second_config, used=first.examples)
    console.print(
        f"2 of 2: {', '.join(c.setting for c in candidates)} beside uniform levels on {len(second.examples)} fresh "
        f"examples{_left_out_words(left_out)}",
        highlight=False,
    )
    run_plan(second, second_config)
    result, _ = run_report(out / "confirm", console)
    found = outcome(result, out / "confirm", second, candidates, cache, losses)
    name = _name(search)
    files = {
        f"quantizer/{name}.yaml": yaml_text(candidates[0].node, _about(search, trial)),
        "sensitivity.csv": measured.to_csv(index=False, float_format="%.6g"),
        "search.json": found.as_json(config.target_bits, trial.source.name),
        "search.md": found.as_markdown(config.target_bits, trial.source.name, name),
    }
    write_all(out, {path: text.encode() for path, text in files.items()})
    for line in found.words():
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"written: {out / 'quantizer' / name}.yaml; next: semkv-bench sweep --conf {shlex.quote(str(out))} "
        f"quantizer={name}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    return out


def _left_out_words(count: int) -> str:
    return f"; {count} left out, whose prompt or document calibration has" if count else ""


def _check(config: DictConfig) -> None:
    if config.target_bits is None:
        raise UsageError("search needs a budget in bits per value, metadata included: target_bits=3.0")
    number("target_bits", config.target_bits, 0, 16)
    whole("tokens", config.tokens, 2, or_null=True)
    whole("calibration_per_task", config.calibration_per_task, 1)
    if config.grid.key_levels is not None or config.grid.value_levels is not None:
        raise UsageError(
            "search chooses the levels of keys and values itself; leave grid.key_levels and value_levels out"
        )
    if config.fresh:
        raise UsageError("fresh=true names new folders; search goes on in its own: give another by out=DIR")
    for name, plain in (("allocation", GridOnly), ("read", ReadAll)):
        if not isinstance(build(config[name], name), plain):
            raise UsageError(
                f"search compares levels that all tokens of a layer have, and reads all of them: leave {name}=... out"
            )
    for name in ("looks", "race"):
        if config.stats[name]:
            raise UsageError(f"stats.{name} plans a sweep; search confirms at one size: leave it out")
    if len(set(check_levels(plain_node(config.grid.levels)))) < 2:
        raise UsageError("search chooses among grid.levels, which must hold two level counts or more")
    both = sorted(set(config.calibration_seeds) & set(config.seeds))
    if both or not config.calibration_seeds:
        raise UsageError(
            f"calibration_seeds={list(config.calibration_seeds)} and seeds={list(config.seeds)} must differ and hold "
            "one at least: the prompts that levels are chosen by cannot confirm the choice"
        )


def _levels(config: DictConfig) -> list[int]:
    return sorted(config.grid.levels, reverse=True)


def _plain_sweep(config: DictConfig) -> DictConfig:
    """The sweep's part of the configuration."""
    return OmegaConf.masked_copy(config, [key for key in config if key not in _OWN_KEYS])


def _calibration_config(config: DictConfig, coded: tuple[int, ...], layers: int) -> DictConfig:
    changed = _plain_sweep(config)
    changed.grid.levels = _levels(config)
    changed.allocation = {
        "_target_": f"{OneAtATime.__module__}.{OneAtATime.__qualname__}",
        "layers": layers,
        "coded": list(coded),
        "levels": _levels(config),
    }
    changed.seeds, changed.per_task = list(config.calibration_seeds), config.calibration_per_task
    # KL is measured on the reference answer; what a row would say by itself is not asked.
    changed.max_new_tokens = 1
    changed.engine.noise_examples = 0
    changed.stats.looks = None
    return changed


def _losses(search: _Search) -> tuple[dict[tuple[Part, int], float], pd.DataFrame]:
    """Mean KL of every part at every level count, and the table of it with standard errors."""
    frame, _ = read_run(search.out / "sensitivity")
    by_setting = frame.groupby("setting")["kl"]
    mean, error, count = by_setting.mean(), by_setting.sem(), by_setting.count()
    losses, rows = {}, []
    for layer, side in search.cache.parts:
        for levels in search.cache.grid:
            name = alone(search.label, layer, side, levels)
            if not count[name]:
                raise SemkvError(
                    f"{name} has no KL: the calibration prompts have no reference answer to measure it on"
                )
            losses[(layer, side), levels] = float(mean[name])
            bits = search.cache.bits((layer, side), levels)
            rows.append(
                {
                    "layer": layer,
                    "side": side,
                    "levels": levels,
                    "bits": bits,
                    "kl": mean[name],
                    "kl_se": error[name],
                }
            )
    return losses, pd.DataFrame(rows)


def _candidates(search: _Search, losses: Mapping[tuple[Part, int], float]) -> list[Candidate]:
    """What was found first, then what it is confirmed against."""
    cache, target = search.cache, search.config.target_bits
    chosen: dict[str, tuple[str, LevelsBySide | None]] = {
        f"search-{target:g}": ("levels by layer and side", cache.least_loss(losses, target)),
        f"even-{target:g}": ("two uniform levels spread evenly", cache.evenly(target)),
        f"kvtuner-{target:g}": (
            "KVTuner's pairs by layer, by the same sensitivities",
            cache.by_pairs(losses, target),
        ),
    }
    if {n for pair in PAIRS.values() for n in pair} <= set(cache.grid):
        plain = {name: cache.one_pair(name) for name in ("K8V4", "K4V2")}
        near = min(plain, key=lambda name: abs(cache.cache_bits(plain[name]) - target))
        chosen[near] = (f"KVTuner's {near} in every layer", plain[near])
    config = search.config
    return [
        Candidate(
            called,
            about,
            levels,
            layered(config.quantizer, config.value_quantizer, levels, called),
            cache.cache_bits(levels),
        )
        for called, (about, levels) in chosen.items()
        if levels is not None
    ]


def _confirming(search: _Search, candidates: list[Candidate]) -> DictConfig:
    """The sweep on fresh examples: the candidates, the uniform points around the budget, and a positive control."""
    changed = _plain_sweep(search.config)
    target, levels = search.config.target_bits, sorted(search.cache.grid)
    low = max(n for n in levels if search.cache.uniform_bits(n) <= target + 1e-9)
    changed.grid.levels = sorted({levels[0], low, levels[levels.index(low) + 1]}, reverse=True)
    base = {"uniform": _both(search.config)}
    changed.method = {**base, **{c.called: c.node for c in candidates}}
    changed.methods = list(changed.method)
    changed.quantizer = changed.value_quantizer = None
    changed.out = str(search.out / "confirm")
    return changed


def _both(config: DictConfig) -> Any:
    """The method without levels of its own, as one node."""
    if config.value_quantizer is None:
        return config.quantizer
    return layered(config.quantizer, config.value_quantizer, {}, "")


def _name(search: _Search) -> str:
    plain = "".join(c if c.isalnum() or c in "-." else "_" for c in search.label)
    return f"{plain}-search-{search.config.target_bits:g}"


def _about(search: _Search, trial: Plan) -> str:
    return (
        f"{search.label} with levels by layer and side, found for {trial.source.name} at "
        f"{search.config.target_bits:g} bits a value ({search.cache.tokens} tokens)."
    )
