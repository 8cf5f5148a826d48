"""From configuration to plan: the settings, the examples and the protocol they are fixed in."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any

from omegaconf import DictConfig

from semkv_bench.config.compose import build
from semkv_bench.config.own import fingerprints
from semkv_bench.config.shard import Shard
from semkv_bench.engine.backend import Backend
from semkv_bench.engine.forced import forced_limit
from semkv_bench.errors import UsageError
from semkv_bench.importance import metric
from semkv_bench.models.embedded import EmbeddedModel
from semkv_bench.models.load import PretrainedModel
from semkv_bench.models.memory import ModelInMemory
from semkv_bench.models.shape import ModelShape
from semkv_bench.plan.calibrations import calibrated, calibrations_told, check_text
from semkv_bench.plan.cost import costs_at_contexts, typical_tails
from semkv_bench.plan.settings import plain_node, planned_settings
from semkv_bench.plan.stages import PlannedLook, arrange, cluster_of, described
from semkv_bench.protocols import Protocol
from semkv_bench.records.schema import Unit
from semkv_bench.settings.setting import Setting
from semkv_bench.stats import StatsOptions
from semkv_bench.stats.operating_point import clusters_needed_at_best
from semkv_bench.stats.options import stats_options
from semkv_bench.stats.pairing import SettingInfo
from semkv_bench.tasks import Example, Task
from semkv_bench.tasks.context import context_tokens

__all__ = [
    "Plan",
    "fresh",
    "make_plan",
    "most_tokens",
    "prompt_hash",
    "too_few",
]

# Where a model runs changes no result by more than rounding.
_NOT_PROTOCOL = {"model": ("device_map", "_target_")}
# Null changes nothing, and runs from before these keys go on.
_UNLESS_GIVEN = ("perturb",)


@dataclass(frozen=True)
class Plan:
    """Everything a sweep needs to know before weights are loaded."""

    source: PretrainedModel | EmbeddedModel | ModelInMemory
    shape: ModelShape
    settings: tuple[Setting, ...]
    task: Task
    examples: tuple[Example, ...]
    protocol: Protocol
    engine: Backend
    charter: dict[str, Any]
    shard: Shard | None = None
    stages: tuple[PlannedLook, ...] = ()
    tokenizer: Any = None

    @cached_property
    def prompts(self) -> dict[Unit, str]:
        """Hash of every example's prompt."""
        return {(e.task, e.example_id, e.seed): prompt_hash(e) for e in self.examples}

    @property
    def share(self) -> tuple[Example, ...]:
        """The examples that this process is to run: all, or those of its shard."""
        if self.shard is None:
            return self.examples
        if not self.repeats_alike:
            return self.shard.take(self.examples)
        return self.shard.take(self.examples, lambda e: (e.example_id, prompt_hash(e)))

    @property
    def repeats_alike(self) -> bool:
        """Would an item that several seeds drew give the same records again?"""
        return not self.engine.temperature and not any(setting.seeded for setting in self.settings)


def make_plan(config: DictConfig, used: Sequence[Example] = (), source: ModelInMemory | None = None) -> Plan:
    """Build and check all parts; the tokenizer is loaded, weights are not.

    used: examples by which something was chosen that these are to confirm (see ``fresh``). source: the model, where it
    is in memory and not to be made of the configuration.

    Raises:
        UsageError: a value that cannot work, for example a group that does not divide the head.
        MissingError: model or data files that are not there.
    """
    shard = None if config.get("shard") is None else Shard.parse(config.shard)
    engine = build(config.engine, "engine")
    if config.get("methods") and not engine.simulates:
        raise UsageError(
            f"methods=[...] are simulated, and engine={engine.name} stores caches as it does itself; leave methods out"
        )
    settings = tuple(engine.settings(partial(planned_settings, config)))
    stats = stats_options(config)
    protocol = engine.protocol(build(config.protocol, "protocol"))
    task = build(config.task, "task")
    source = build(config.model, "model") if source is None else source
    if engine.simulates:
        settings = calibrated(settings, source)
        check_text(settings, task)
    shape = engine.shape(source)
    engine.check(source, settings, protocol)
    _check_numbers(config, task, source.name, shape)
    tokenizer = engine.tokenizer(source)
    examples = task.examples(
        tokenizer,
        list(config.seeds),
        config.per_task,
        config.max_prompt_tokens,
        config.max_new_tokens,
    )
    examples = fresh(examples, used)
    engine = _with_forced(engine, examples)
    if engine.simulates:
        _check_vocabulary(examples, source)
    forced = forced_limit(engine.teacher_tokens, protocol.rule) if engine.simulates else 0
    _check_lengths(examples, shape, protocol.own_history, forced)
    if any(setting.scored["unseen"] for setting in settings):
        examples = [replace(e, context_tokens=context_tokens(tokenizer, e)) for e in examples]
    protocol.check(settings, examples)
    protocol.check_evictions(settings, examples)
    protocol.check_reads(settings, examples)
    _check_replays(settings, examples, shape, tokenizer)
    stages = arrange(examples, stats)
    plan = Plan(
        source, shape, settings, task, tuple(examples), protocol, engine, {}, shard, stages, tokenizer
    )
    engine.check_prompts(settings, plan.share)
    return replace(plan, charter=_charter(config, plan, stats))


def fresh(examples: Sequence[Example], used: Sequence[Example]) -> list[Example]:
    """Those of ``examples`` that share name, prompt or document with none of ``used``.

    Raises UsageError where that leaves none.
    """
    seen = {mark for example in used for mark in _marks(example)}
    left = [example for example in examples if not used or seen.isdisjoint(_marks(example))]
    if examples and not left:
        raise UsageError(
            f"none of the {len(examples)} examples is fresh: each shares its prompt or document with one that the "
            "choice is made by, and cannot confirm it; lower per_task (of search: calibration_per_task), or give a "
            "task with more documents"
        )
    return left


def _marks(example: Example) -> set[Any]:
    """What examples have in common that are no evidence apart from each other: see ``stats.pairing.cluster_labels``."""
    marks = {(example.task, example.example_id), cluster_of(example), prompt_hash(example)}
    # A cluster that is the prompt's own name says nothing of another task.
    if example.cluster not in ("", example.example_id.removesuffix(f"~{example.perturb}")):
        marks.add(example.cluster)
    return marks


def _check_numbers(config: DictConfig, task: Task, model: str, shape: ModelShape) -> None:
    length = max(getattr(task, "lengths", None) or [getattr(task, "length", None) or 0])
    if length and shape.max_positions is not None and length > shape.max_positions:
        raise UsageError(f"task.length={length} is beyond the {shape.max_positions} positions of {model}")
    if any(not -(2**63) <= seed < 2**63 for seed in config.seeds):
        raise UsageError(f"seeds={list(config.seeds)} must be whole numbers of at most 64 bits")


def _charter(config: DictConfig, plan: Plan, stats: StatsOptions) -> dict[str, Any]:
    """All that decides the results of ``plan``, as it is sealed before the first record."""
    engine, protocol, task = plan.engine, plan.protocol, plan.task
    tails = typical_tails(plan.examples, protocol.own_history)
    charter = {
        "model": plan.source.name,
        "model_config": _decided(config, "model"),
        **engine.weights(plan.source),
        "quantizer": _decided(config, "quantizer") if engine.simulates else None,
        "value_quantizer": _decided(config, "value_quantizer") if engine.simulates else None,
        **({"methods": _decided(config, "method")} if config.get("methods") else {}),
        "protocol": protocol.name,
        **({"protocol_config": _decided(config, "protocol")} if protocol.variant else {}),
        "layers": {"total": plan.shape.layers, "quantized": len(plan.shape.quantized_layers)},
        "head_dim": plan.shape.head_dim,
        "settings": {
            setting.name: {
                **_described(setting, plan.shape),
                "cache_at": costs_at_contexts(setting, plan.shape, plan.protocol, tails),
            }
            for setting in plan.settings
        },
        "task": _decided(config, "task"),
        "tasks": sorted({example.task for example in plan.examples}),
        "chance": {name: float(task.chance[name]) for name in task.names if name in task.chance},
        "prompts": task.prompt_source,
        "seeds": list(config.seeds),
        "per_task": config.per_task,
        "max_prompt_tokens": config.max_prompt_tokens,
        "max_new_tokens": config.max_new_tokens,
        "examples": {"count": len(plan.examples), "sha256": _digest(plan.examples)},
        "engine": engine.decided(),
        "stats": _sealed(stats, plan.settings),
        **calibrations_told(plan.settings),
        **_own_code(plan.settings, task, protocol),
    }
    if plan.stages:
        if stats.looks is not None:
            charter["stats"]["looks"] = list(stats.looks)
        if stats.race:
            charter["stats"]["race"] = True
        charter["looks"] = described(plan.stages)
    return charter


def too_few(plan: Plan) -> str | None:
    """A sentence where the plan has too few examples to call any setting equivalent, whatever comes out."""
    settings = [
        SettingInfo(
            setting.name,
            setting.kind,
            setting.quantizer,
            cost.code_bits,
            cost.packed_bits,
            cost.effective_bits,
        )
        for setting in plan.settings
        for cost in [setting.storage_in(plan.shape.cache)]
    ]
    options = StatsOptions(**plan.charter["stats"])
    least = clusters_needed_at_best(settings, options)
    count = len({(example.task, example.example_id) for example in plan.examples})
    # Questions about one document, and a prompt as it is and mistyped, are one piece of evidence.
    have = len(set(map(cluster_of, plan.examples)))
    if have >= least:
        return None
    examples = f"{count} example{'' if count == 1 else 's'}"
    if have < count:
        examples += f" about {have} document{'' if have == 1 else 's'}"
    return (
        f"{examples} cannot show that any setting is equivalent at stats.margin={options.margin:g}, even if "
        f"every answer stays the same: that takes {least} (more per_task or seeds, or a wider margin)"
    )


def prompt_hash(example: Example) -> str:
    """Short SHA-256 of the token ids that are fed, those of later turns included."""
    fed = list(example.input_ids)
    if example.follow_ups:
        fed = [fed, *(list(later.input_ids) for later in example.follow_ups)]
    return hashlib.sha256(json.dumps(fed).encode()).hexdigest()[:16]


def most_tokens(example: Example, own_history: bool = True, forced: int = 0) -> int:
    """Tokens that a row holds at most: prompt, questions and answers of all turns.

    forced: tokens of a reference answer that are forced on the model at most, before its own answer.
    """
    total = most = 0
    for turn, asked in enumerate((example, *example.follow_ups)):
        total += len(asked.input_ids)
        most = max(most, total + min(forced, len(asked.target_ids)))
        answer = asked.max_new_tokens
        if not own_history:
            # The reference answer takes the place of the row's own, except in the last turn.
            answer = max(answer, len(asked.target_ids)) if turn + 1 < example.turns else answer
        total += answer
    return max(most, total)


def _check_lengths(examples: Sequence[Example], shape: ModelShape, own_history: bool, forced: int) -> None:
    if not examples:
        raise UsageError("no examples: the task, subset and per_task chosen leave nothing to run")
    longest = max(examples, key=lambda example: most_tokens(example, own_history, forced))
    needed = most_tokens(longest, own_history, forced)
    if shape.max_positions is not None and needed > shape.max_positions:
        room = shape.max_positions - needed + len(longest.input_ids)
        hint = f"cap the prompts with max_prompt_tokens={room}" if room > 1 else "shorten max_new_tokens"
        raise UsageError(
            f"{longest.task} {longest.example_id} needs {needed} positions, the model has {shape.max_positions}; "
            f"{hint}"
        )
    short = next((example for example in examples if len(example.input_ids) < 2), None)
    if short is not None:
        raise UsageError(f"{short.task} {short.example_id} has a prompt of fewer than two tokens")


def _check_replays(
    settings: Sequence[Setting], examples: Sequence[Example], shape: ModelShape, tokenizer: Any
) -> None:
    """Raise UsageError where a score that feeds the prompt once more has no room for it, or states in its way."""
    longest = max(examples, key=lambda example: len(example.input_ids))
    for label in sorted(set().union(*(setting.metrics for setting in settings))):
        if not metric(label).replays:
            continue
        if shape.state_values:
            raise UsageError(
                f"{label} feeds the prompt twice, which the states of this model cannot undo; use another score"
            )
        ids = longest.input_ids[:-1]
        needed = len(ids) + max(len(asked) for _, asked in metric(label).orders(tokenizer, ids))
        if shape.max_positions is not None and needed > shape.max_positions:
            raise UsageError(
                f"{label} repeats the prompt, which takes {needed} positions for {longest.task} {longest.example_id}; "
                f"the model has {shape.max_positions}: shorten the prompts, or name a smaller chunk as in {label}-512"
            )


def _with_forced(engine: Backend, examples: Sequence[Example]) -> Backend:
    """The engine, forcing as many tokens as the examples are scored by.

    Raises UsageError for an engine that tells no distributions.
    """
    longest = max((len(example.target_ids) for example in examples if example.forced), default=0)
    if not longest:
        return engine
    if not engine.simulates:
        raise UsageError(
            f"{examples[0].task} is scored by the model's distributions, which engine={engine.name} does not tell; use "
            "engine=transformers"
        )
    return replace(engine, teacher_tokens=max(engine.teacher_tokens, longest))


def _check_vocabulary(examples: Sequence[Example], source: PretrainedModel | EmbeddedModel) -> None:
    rows = source.vocabulary()
    for example in examples:
        for asked in (example, *example.follow_ups):
            highest = max((*asked.input_ids, *asked.target_ids))
            if rows is not None and highest >= rows:
                raise UsageError(
                    f"{source.name}: the tokenizer writes token {highest}, but the model's embedding has {rows} rows; "
                    "tokenizer and model do not belong together"
                )


def _decided(config: DictConfig, group: str) -> Any:
    node = plain_node(config[group])
    if not isinstance(node, dict):
        return node
    dropped = (*_NOT_PROTOCOL.get(group, ()), *(key for key in _UNLESS_GIVEN if node.get(key) is None))
    return {key: value for key, value in node.items() if key not in dropped}


def _sealed(stats: StatsOptions, settings: Sequence[Setting]) -> dict[str, Any]:
    """The options that decide something: the bits of comparisons only where there are methods to compare."""
    sealed = asdict(stats)
    del sealed["looks"], sealed["race"]
    at_bits = list(sealed.pop("at_bits"))
    several = len({setting.quantizer for setting in settings if setting.kind == "uniform"}) > 1
    return {**sealed, "at_bits": at_bits} if several else sealed


def _own_code(settings: Sequence[Setting], *parts: Any) -> dict[str, Any]:
    """Checksums of code that is not the package's: records of two versions of it must not mix in one run."""
    sides = [side for setting in settings for side in (setting.keys, setting.values) if side is not None]
    used = [*parts, *(side.quantizer for side in sides), *(side.allocation for side in sides)]
    used += [metric(label) for setting in settings for label in sorted(setting.metrics)]
    found = fingerprints(used)
    return {"own_code": found} if found else {}


def _described(setting: Setting, shape: ModelShape) -> dict[str, Any]:
    cost = setting.storage_in(shape.cache)
    return {**setting.describe(), "quantizer": setting.quantizer, **asdict(cost)}


def _digest(examples: Sequence[Example]) -> str:
    content = [
        (
            *(e.task, e.example_id, e.seed, e.turn, e.input_ids, e.max_new_tokens, e.answers, e.cluster),
            *((f.input_ids, f.max_new_tokens, f.answers, f.target_ids) for f in e.follow_ups),
        )
        for e in examples
    ]
    return hashlib.sha256(json.dumps(content, ensure_ascii=False).encode()).hexdigest()
