"""``semkv_bench.sweep(...)``: a sweep from Python, of a model that may be in memory already."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import DictConfig

from semkv_bench.config.compose import compose_config
from semkv_bench.config.overrides import as_overrides, override
from semkv_bench.errors import UsageError
from semkv_bench.files import cache_dir, check_writable, write_atomically
from semkv_bench.models.memory import ModelInMemory
from semkv_bench.plan.plan import make_plan
from semkv_bench.quantizers.base import Sides
from semkv_bench.sweep.command import run_plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["sweep"]

# What a configuration takes by these keys comes by arguments.
_ARGUMENTS = frozenset({"model", "quantizer", "methods", "method", "task", "task.path"})
_ARGUMENT_OF = {"quantizer": "methods", "method": "methods", "task.path": "task"}

Method = str | Sides
Task = str | Sequence[Mapping[str, Any]]


def sweep(
    model: "PreTrainedModel | str" = "smollm2",
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    *,
    methods: Method | Sequence[Method] = ("affine",),
    levels: Sequence[int] | None = None,
    task: Task = "synthetic",
    per_task: int | None = None,
    seeds: Sequence[int] | None = None,
    out: str | Path | None = None,
    name: str | None = None,
    overrides: Sequence[str] = (),
) -> Path:
    """Run a sweep, or go on with it where ``out`` holds a part of it; returns the run folder.

    model: a transformers model in memory, with its ``tokenizer``; or what ``model=`` takes on the command line, a
        choice, a hub name or a folder.
    methods: choices of the quantizer group, or quantizers: instances of frozen dataclasses.
    levels: level counts of the uniform grid. task: a choice of the task group; or prompts of your own, a mapping with
        ``prompt`` and ``answers`` each, or a DataFrame of such columns. name: the model's in records and reports.
    overrides: whatever else the command line takes, for example ``["allocation=two_level", "stats.margin=0.05"]``.

    Raises:
        UsageError: what the command ``sweep`` refuses, a model without a tokenizer, a quantizer that no other process
            could build again.
        MissingError: model or data that are not there.
    """
    asked = list(methods) if isinstance(methods, list | tuple) else [methods]
    if not asked:
        raise UsageError("methods is empty; name a quantizer, or give one")
    asides = {"grid.levels": _listed(levels), "per_task": per_task, "seeds": _listed(seeds), "out": out}
    given = [override(key, value) for key, value in asides.items() if value is not None]
    given += _task_overrides(task)
    given += [f"model={model}"] if isinstance(model, str) else []
    named = [method for method in asked if isinstance(method, str)]
    given += [override("methods", named)] if named else []
    more = [overrides] if isinstance(overrides, str) else list(overrides)
    for key in _ARGUMENTS & {each.partition("=")[0].lstrip("+~") for each in more}:
        raise UsageError(
            f"overrides names {key}, for which sweep has the argument {_ARGUMENT_OF.get(key, key)}"
        )
    config = compose_config("sweep", as_overrides([*given, *more], "sweep"))
    _add_methods(config, named, [method for method in asked if not isinstance(method, str)])
    if isinstance(model, str):
        if tokenizer is not None or name is not None:
            raise UsageError(f"tokenizer and name are for a model in memory; model={model} brings its own")
        return _run(config, None)
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"model is {model!r}; give a transformers model, or a name as model= takes it")
    if tokenizer is None:
        raise UsageError("a model in memory needs its tokenizer: sweep(model, tokenizer, ...)")
    if not callable(tokenizer):
        raise UsageError(
            f"tokenizer is {tokenizer!r}; load it first: AutoTokenizer.from_pretrained({tokenizer!r})"
        )
    source = ModelInMemory(model, tokenizer, name or _name_of(model))
    config.model = source.node
    with _as_it_was(model):
        return _run(config, source)


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, int) else value


def _run(config: DictConfig, source: ModelInMemory | None) -> Path:
    if config.out is not None:
        check_writable(Path(config.out).expanduser())
    return run_plan(make_plan(config, source=source), config).path


def _task_overrides(task: Task) -> list[str]:
    if isinstance(task, str):
        return [f"task={task}"]
    rows = task.to_dict("records") if hasattr(task, "to_dict") else task
    if not isinstance(rows, Sequence) or not all(isinstance(row, Mapping) for row in rows):
        raise UsageError("task takes a name, or a list of prompts: [{'prompt': ..., 'answers': [...]}, ...]")
    if not rows:
        raise UsageError("task is an empty list of prompts")
    text = "".join(_line(number, row) for number, row in enumerate(rows, 1))
    path = cache_dir() / "prompts" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.jsonl"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    return ["task=jsonl", f"task.path={path}"]


def _line(number: int, row: Mapping[str, Any]) -> str:
    """A prompt as a line of JSON; numbers of numpy count as what they hold."""
    try:
        line = json.dumps(
            {"task": "prompts", **row}, ensure_ascii=False, default=lambda value: value.tolist()
        )
        line.encode()
    except (AttributeError, TypeError, ValueError) as error:
        raise UsageError(f"prompt {number} of task is no plain data: {str(error).splitlines()[0]}") from error
    return f"{line}\n"


def _add_methods(config: DictConfig, named: Sequence[str], own: Sequence[Sides]) -> None:
    """Put quantizers of the caller's beside those of the configuration, as what builds them again."""
    if not own:
        return
    nodes = dict(config.method or {})
    for quantizer in own:
        if not isinstance(quantizer, Sides):
            raise UsageError(f"methods takes names and quantizers, not {quantizer!r}")
        alike = sum(key.partition("#")[0] == quantizer.name for key in nodes)
        nodes[f"{quantizer.name}#{alike + 1}" if alike else quantizer.name] = _node(quantizer)
    config.methods = list(nodes)
    config.method = nodes
    config.quantizer = None
    config.value_quantizer = None


def _node(part: Any) -> Any:
    """What Hydra builds ``part`` from: its class, and the fields that are not at their defaults."""
    if isinstance(part, Mapping):
        return {key: _node(value) for key, value in part.items()}
    if isinstance(part, list | tuple):
        return [_node(value) for value in part]
    if not is_dataclass(part):
        return part
    cls = type(part)
    if "<locals>" in cls.__qualname__:
        raise UsageError(
            f"{cls.__name__} is defined inside a function, where no other process finds it; define it at the top of a "
            "module or of a notebook cell"
        )
    held = {f.name: getattr(part, f.name) for f in fields(part) if f.init}
    first = {f.name: _default(f) for f in fields(part) if f.init}
    return {
        "_target_": f"{cls.__module__}.{cls.__qualname__}",
        **{key: _node(value) for key, value in held.items() if first[key] is MISSING or value != first[key]},
    }


def _default(given: Any) -> Any:
    return given.default if given.default_factory is MISSING else given.default_factory()


def _name_of(model: Any) -> str:
    return Path(getattr(getattr(model, "config", None), "_name_or_path", "") or type(model).__name__).name


@contextmanager
def _as_it_was(model: Any) -> Iterator[None]:
    training = {part: part.training for part in model.modules()}
    try:
        yield
    finally:
        for part, was in training.items():
            part.training = was
