"""A dry run in words: what a sweep would do and what its rows need."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from semkv_bench.console import human_bytes
from semkv_bench.plan.cost import mean_cache_bits
from semkv_bench.plan.memory import Memory
from semkv_bench.plan.plan import Plan, too_few
from semkv_bench.plan.roofline import Roofline
from semkv_bench.plan.timing import Duration
from semkv_bench.tasks import Example

__all__ = ["plan_content", "show_plan"]

_NAME_WIDTH = 16  # of a setting or task, however narrow the terminal
_AS_CODES = "as packed codes "
_CALIBRATE = "add --calibrate once: it loads the model, runs one example and keeps how long that took"


def _table(title: str, columns: Sequence[str]) -> Table:
    """A table of numbers by name, whose headings give way before names do."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column(columns[0], overflow="fold", min_width=_NAME_WIDTH)
    for column in columns[1:]:
        table.add_column(column, justify="right")
    return table


def show_plan(
    plan: Plan,
    memory: Memory | None,
    duration: Duration | None,
    rooflines: Sequence[Roofline],
    console: Console,
) -> None:
    """Settings with their bits, examples per sub-task with their tokens, memory and time."""
    console.print(_settings_table(plan))
    console.print(
        "cache: all that a cache holds when an answer at its limit ends, mean over the examples; "
        "the other columns are the price of a coded value",
        highlight=False,
    )
    console.print(_tasks_table(plan))
    needs = (
        (_memory_line(memory), _time_line(duration))
        if memory is not None
        else (f"memory, time: engine={plan.engine.name} loads the model itself; neither is estimated for it",)
    )
    protocol = f"protocol {plan.protocol.name}: {plan.protocol.stores}"
    for line in (protocol, _amount_line(plan), *needs, *_roofline_lines(rooflines)):
        console.print(line, markup=False, highlight=False)
    if plan.stages:
        looks = ", ".join(str(stage.examples) for stage in plan.stages)
        console.print(f"sequential: looks at {looks} examples; {_look_words(plan)}", highlight=False)
    if warning := too_few(plan):
        console.print(warning, markup=False, highlight=False, style="yellow")


def _settings_table(plan: Plan) -> Table:
    settings = _table(
        f"{len(plan.settings)} settings of {plan.source.name}",
        ("setting", "code bits", "effective bits", "smaller", "cache bits", "cache smaller"),
    )
    for setting in plan.settings:
        cost = setting.storage_in(plan.shape.cache)
        bits = mean_cache_bits(setting, plan.shape, plan.protocol, plan.examples)
        settings.add_row(
            Text(setting.name),
            f"{cost.code_bits:.3f}",
            f"{cost.effective_bits:.3f}",
            f"{cost.compression:.2f}x",
            f"{bits:.3f}",
            f"{16 / bits:.2f}x",
        )
    return settings


def _tasks_table(plan: Plan) -> Table:
    tasks = _table(
        f"{len(plan.examples)} examples",
        ("task", "examples", "turns", "mean prompt tokens", "longest", "answer limit"),
    )
    for name in sorted({example.task for example in plan.examples}):
        mine = [example for example in plan.examples if example.task == name]
        lengths = [len(example.input_ids) for example in mine]
        limit = max(turn.max_new_tokens for example in mine for turn in (example, *example.follow_ups))
        turns = str(max(example.turns for example in mine))
        tasks.add_row(
            Text(name),
            str(len(mine)),
            turns,
            f"{sum(lengths) / len(mine):.0f}",
            str(max(lengths)),
            str(limit),
        )
    return tasks


def _amount_line(plan: Plan) -> str:
    """What is quantized, and how many tokens this process runs."""
    quantized = f"{len(plan.shape.quantized_layers)} of {plan.shape.layers} layers quantized"
    if plan.shape.described:
        quantized = f"{quantized} ({plan.shape.described})"
    share = plan.share
    tokens = f"{_prompt_tokens(share):,} prompt tokens, at most {_answer_tokens(plan, share):,} of answers"
    own = "" if plan.shard is None else f"; shard {plan.shard} runs {len(share)} examples"
    return f"{quantized}{own}; {tokens}"


def _look_words(plan: Plan) -> str:
    stats = plan.charter["stats"]
    leave = "settings shown degraded leave, so rows and times here are the most there can be"
    words = ["stops once all is decided"] if "looks" in stats else []
    return "; ".join(words + [leave] * bool(stats.get("race")))


def plan_content(
    plan: Plan, memory: Memory | None, duration: Duration | None, rooflines: Sequence[Roofline]
) -> dict[str, Any]:
    """The same as data; ``memory`` and ``time`` are null for an engine that loads the model itself."""
    return {
        "model": plan.source.name,
        "protocol": plan.protocol.name,
        "layers": {"total": plan.shape.layers, "quantized": len(plan.shape.quantized_layers)},
        "settings": [
            {
                "setting": s.name,
                "kind": s.kind,
                **asdict(s.storage_in(plan.shape.cache)),
                "cache_bits": mean_cache_bits(s, plan.shape, plan.protocol, plan.examples),
                "cache_at": plan.charter["settings"][s.name]["cache_at"],
            }
            for s in plan.settings
        ],
        "tasks": {
            name: _numbers([e for e in plan.examples if e.task == name])
            for name in sorted({e.task for e in plan.examples})
        },
        "examples": len(plan.examples),
        "too_few": too_few(plan),
        "looks": [stage.examples for stage in plan.stages],
        "race": bool(plan.charter["stats"].get("race")),
        "shard": None if plan.shard is None else {"shard": str(plan.shard), "examples": len(plan.share)},
        "prompt_tokens": _prompt_tokens(plan.share),
        "answer_tokens_at_most": _answer_tokens(plan, plan.share),
        "memory": None
        if memory is None
        else {**asdict(memory), "needed": memory.needed, "fits": memory.fits},
        "time": None
        if duration is None
        else {
            "least_s": round(duration.least, 3),
            "most_s": round(duration.most, 3),
            "basis": duration.basis,
        },
        "estimated_on": {
            each.accelerator.name: {
                **asdict(each.stages),
                "least_s": each.seconds[0],
                "most_s": each.seconds[1],
                "batch_rows": each.batch_rows,
                "store": each.store,
                "fits": each.fits,
            }
            for each in rooflines
        },
    }


def _roofline_lines(rooflines: Sequence[Roofline]) -> list[str]:
    lines = []
    for each in rooflines:
        stages, name = each.stages, each.accelerator.name
        if not each.fits:
            lines.append(f"on {name}: weights and one row do not fit its memory")
            continue
        lines.append(
            f"on {name}: {_span(each.seconds)}; prefill {_short_time(stages.prefill)}, coding "
            f"{_short_time(stages.coding)}, forced pass {_short_time(stages.forced)}, decoding "
            f"{_span(stages.decoding)}; {each.batch_rows} rows {_AS_CODES * (each.store == 'packed')}a batch"
        )
    if lines:
        lines.append(
            "these are estimates from arithmetic and bandwidth, not measurements: kernel launches, Python and "
            "tokenizing are not in them"
        )
    return lines


def _span(ends: tuple[float, float]) -> str:
    return f"{_short_time(ends[0])} to {_short_time(ends[1])}"


def _short_time(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 10 else _human_time(seconds)


def _numbers(examples: list[Example]) -> dict[str, Any]:
    lengths = [len(example.input_ids) for example in examples]
    return {
        "examples": len(examples),
        "mean_prompt_tokens": sum(lengths) / len(lengths),
        "longest_prompt_tokens": max(lengths),
        "turns": max(example.turns for example in examples),
        "answer_limit": max(
            turn.max_new_tokens for example in examples for turn in (example, *example.follow_ups)
        ),
    }


def _prompt_tokens(examples: tuple[Example, ...]) -> int:
    return sum(len(turn.input_ids) for example in examples for turn in (example, *example.follow_ups))


def _answer_tokens(plan: Plan, examples: tuple[Example, ...]) -> int:
    """Of all settings together, every answer at its limit."""
    limits = (turn.max_new_tokens for example in examples for turn in (example, *example.follow_ups))
    return len(plan.settings) * sum(limits)


def _memory_line(memory: Memory) -> str:
    parts = (
        f"weights {human_bytes(memory.weights)}, prompt {human_bytes(memory.prompt)}, "
        f"{memory.batch_rows} cache rows {_AS_CODES * (memory.store == 'packed')}{human_bytes(memory.rows)}, "
        f"activations about {human_bytes(memory.activations)}"
    )
    have = f"{human_bytes(memory.available)} on {memory.device}"
    if not memory.fits:
        return f"memory: does not fit {have}: needs {human_bytes(memory.needed)} ({parts}); {memory.advice}"
    how = "all settings in one batch" if memory.batches == 1 else f"settings in {memory.batches} batches"
    return f"memory: fits, {human_bytes(memory.needed)} of {have} ({parts}); {how}"


def _time_line(duration: Duration | None) -> str:
    if duration is None:
        return f"time: not known for a model of this size on this machine; {_CALIBRATE}"
    return (
        f"time: {_human_time(duration.least)} if every answer ends at once, {_human_time(duration.most)} if all run to "
        f"their limit; measured with {duration.basis}"
    )


def _human_time(seconds: float) -> str:
    """``45 s``, ``12 min``, ``3.5 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"
