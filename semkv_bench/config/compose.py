"""The Hydra configuration: found from anywhere, composed, and checked before anything heavy is loaded."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import (
    HydraException,
    InstantiationException,
    MissingConfigException,
    OverrideParseException,
)
from hydra.utils import instantiate
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)
from yaml import YAMLError

from semkv_bench.config.choices import check_choices, conf_dir, did_you_mean, search_path
from semkv_bench.config.keys import known_keys
from semkv_bench.config.methods import check_methods, method_nodes, without_options
from semkv_bench.config.own import import_own
from semkv_bench.config.shard import Shard
from semkv_bench.errors import SemkvError, UsageError

__all__ = [
    "build",
    "check_config",
    "check_sweeps",
    "compose_config",
    "to_yaml",
    "without",
    "wrong_configuration",
]


@dataclass
class _Grid:
    levels: Any = MISSING
    key_levels: Any = None
    value_levels: Any = None


@dataclass
class _Stats:
    margin: float = MISSING
    alpha: float = MISSING
    average: str = MISSING
    resamples: int = MISSING
    seed: int = MISSING
    confidence: float = MISSING
    unpaired: str = MISSING
    sensitivity: str = MISSING
    looks: list[int] | None = None
    race: bool = MISSING
    at_bits: list[float] = MISSING


@dataclass
class _Sweep:
    model: dict[str, Any] = MISSING
    quantizer: dict[str, Any] | None = MISSING
    value_quantizer: dict[str, Any] | None = None
    methods: Any = None
    method: dict[str, Any] | None = None
    grid: _Grid = field(default_factory=_Grid)
    allocation: dict[str, Any] = MISSING
    read: dict[str, Any] = MISSING
    protocol: dict[str, Any] = MISSING
    task: dict[str, Any] = MISSING
    stats: _Stats = field(default_factory=_Stats)
    engine: dict[str, Any] = MISSING
    seeds: list[int] = MISSING
    per_task: int | None = None
    subset: Any = None
    prompts: str = MISSING
    max_prompt_tokens: int | None = None
    max_new_tokens: int | None = None
    out: str | None = None
    fresh: bool = MISSING
    shard: str | None = None


@dataclass
class _Recipe(_Sweep):
    context: list[int] = MISSING


@dataclass
class _Search(_Sweep):
    target_bits: float | None = None
    tokens: int | None = None
    calibration_seeds: list[int] = MISSING
    calibration_per_task: int = MISSING


@dataclass
class _Judge:
    false_alarm: float = MISSING
    kl_tolerance: float = MISSING
    min_examples: int = MISSING


@dataclass
class _Regress(_Sweep):
    run: str | None = None
    baseline: str | None = None
    quick: bool = False
    judge: _Judge = field(default_factory=_Judge)


@dataclass
class _CliffReport:
    stats: _Stats = field(default_factory=_Stats)
    run: str | None = None
    runs: Any = None
    records: str | None = None
    records_model: str | None = None
    out: str | None = None
    export: Any = None
    log: dict[str, Any] | None = None


@dataclass
class _Compare:
    stats: _Stats = field(default_factory=_Stats)
    runs: Any = None
    out: str = MISSING


@dataclass
class _Storage:
    quantizer: dict[str, Any] = MISSING
    value_quantizer: dict[str, Any] | None = None
    grid: _Grid = field(default_factory=_Grid)
    allocation: dict[str, Any] = MISSING
    model: dict[str, Any] | None = None
    head_dim: int | None = None
    kv_heads: int | None = None
    tokens: int | None = None
    context: list[int] = MISSING


@dataclass
class _Measure:
    run: str | None = None
    setting: str | None = None
    examples: int = MISSING
    attention: str = MISSING


@dataclass
class _Calibrate:
    model: dict[str, Any] = MISSING
    quantizer: dict[str, Any] = MISSING
    text: str | None = None
    sequences: int = MISSING
    length: int = MISSING
    seed: int = MISSING
    out: str | None = None


_SCHEMAS = {
    "sweep": _Sweep,
    "recipe": _Recipe,
    "search": _Search,
    "regress": _Regress,
    "cliff_report": _CliffReport,
    "compare": _Compare,
    "storage": _Storage,
    "measure": _Measure,
    "calibrate": _Calibrate,
}


_EXAMPLES = {
    "looks": "[40,80,120]",
    "at_bits": "[2.5,3.5]",
    "context": "[8192,32768]",
    "types": "[f16,q8_0,q4_0]",
}


def compose_config(name: str, overrides: Sequence[str] = ()) -> DictConfig:
    """Compose ``name`` with ``overrides`` and check every value's type.

    Raises:
        UsageError: an override that does not parse, an unknown key or choice, a value of the wrong type.
    """
    check_choices(name, overrides)
    others = GlobalHydra.instance().hydra  # a program around this one may compose by Hydra, too
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            composed = compose(name, overrides=[*without_options(overrides), *search_path()])
            if nodes := method_nodes(composed, overrides):
                composed = compose(name, overrides=[*nodes, *overrides, *search_path()])
            return check_config(name, composed)
    except (HydraException, OmegaConfBaseException, ValueError, YAMLError) as error:
        raise UsageError(_problem(error, name, overrides)) from error
    finally:
        GlobalHydra.instance().hydra = others


def check_config(name: str, composed: DictConfig) -> DictConfig:
    """The composed configuration with every value's type checked and every interpolation resolved.

    Raises:
        UsageError: a value of the wrong type, or one that must be given and is not.
    """
    import_own()
    try:
        typed = OmegaConf.merge(OmegaConf.structured(_SCHEMAS[name]), composed)
        OmegaConf.resolve(typed)
        _require_given(typed)
        if typed.get("shard") is not None:
            Shard.parse(typed.shard)
            if name != "sweep":
                raise UsageError(f"{name} judges whole sweeps; leave shard out")
            if typed.fresh:
                raise UsageError("fresh=true would give every shard a folder; name a new one by out=DIR")
        check_methods(name, typed)
        _check_prompts(typed)
        _one_length(typed)
        if typed.get("fresh") and typed.out is not None and name != "regress":
            raise UsageError(
                "fresh=true names a new folder by itself; leave one of fresh=true and out=... out"
            )
        return typed
    except OmegaConfBaseException as error:
        raise UsageError(_problem(error, name, [])) from error


def _check_prompts(config: DictConfig) -> None:
    """A task that takes ``prompts`` checks it; what another is given would have no effect."""
    wording = config.get("prompts", "auto")
    if wording not in ("auto", "own") and "prompts" not in config.task:
        raise UsageError(
            f"prompts={wording} has no effect on this task, which writes its prompts itself; leave it out"
        )


def _one_length(config: DictConfig) -> None:
    """A list of one length is that length: the same prompts, and so the same protocol."""
    length = (config.get("task") or {}).get("length")
    if isinstance(length, ListConfig) and len(length) == 1:
        config.task.length = length[0]


def check_sweeps(name: str, overrides: Sequence[str]) -> list[DictConfig]:
    """Compose every combination of a multirun's comma-separated ``overrides`` once, to fail before the first job.

    Returns the configurations. Raises UsageError as ``compose_config`` does, and where a folder would have to
    hold several sweeps; shards of one sweep may share it.
    """
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        jobs = product(
            *{override.get_key_element(): _given_in_turn(override) for override in parsed}.values()
        )
        configs = [compose_config(name, job) for job in jobs]
    except HydraException as error:
        raise UsageError(_in_one_line(error)) from error
    for out in dict.fromkeys(config.out for config in configs if config.out is not None):
        same = [config for config in configs if config.out == out]
        if len(same) == 1:
            continue
        shards = [config.shard for config in same]
        sweeps = {to_yaml(without(config, "shard")) for config in same}
        if len(sweeps) > 1 or None in shards:
            raise UsageError(f"-m runs {len(same)} sweeps, and out={out} can hold one; leave out=... out")
        if len(set(shards)) < len(shards):
            raise UsageError(f"-m names a shard twice: shard={','.join(shards)}")
    return configs


def _given_in_turn(override: Override) -> list[str]:
    """The override once for each of the choices between its commas."""
    key = override.get_key_element()
    if not override.is_sweep_override():
        return [f"{key}={override.get_value_element_as_str()}"]
    if not override.is_discrete_sweep():
        raise UsageError(f"-m takes the choices of {key} with commas between them, not as a range")
    return [f"{key}={value}" for value in override.sweep_string_iterator()]


def without(config: DictConfig, key: str) -> DictConfig:
    """The configuration but for its entry ``key``."""
    return OmegaConf.masked_copy(config, [name for name in config if name != key])


def wrong_configuration(error: BaseException) -> UsageError | None:
    """What Hydra or OmegaConf found wrong, in one line; None for any other error."""
    known = isinstance(error, HydraException | OmegaConfBaseException)
    return UsageError(_in_one_line(error)) if known else None


def build(node: DictConfig, what: str) -> Any:
    """Instantiate the ``_target_`` of a group's node; ``what`` names the group in errors."""
    try:
        return instantiate(node, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, SemkvError):
            raise cause from None
        raise UsageError(f"{what}: {_in_one_line(cause or error)}") from error
    except (HydraException, OmegaConfBaseException) as error:
        raise UsageError(f"{what}: {_in_one_line(error)}") from error


def to_yaml(config: DictConfig) -> str:
    """The resolved configuration as YAML."""
    return OmegaConf.to_yaml(config, resolve=True)


def _require_given(config: DictConfig) -> None:
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise MissingMandatoryValue(f"{', '.join(missing)} must be given, for example {missing[0]}=...")


def _chain(error: BaseException | None) -> Iterable[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _problem(error: BaseException, name: str, overrides: Sequence[str]) -> str:
    """One line for what composing ``name`` ended in; an unknown key comes with the one that may be meant."""
    missing = next((e for e in _chain(error) if isinstance(e, ConfigKeyError | ConfigAttributeError)), None)
    if group := re.match(r"Could not override '([\w/]+)'\. No match in the defaults list", str(error)):
        command = name.replace("_", "-")
        if group[1] in {key.name for key in known_keys(name)}:
            return f"{group[1]} is added by a plus: +{group[1]}=..."
        return f"{command} takes no {group[1]}; semkv-bench {command} --help lists its keys"
    if missing is None or not missing.full_key:
        return _in_one_line(error)
    keys = [override.lstrip("+~").partition("=")[0] for override in overrides]
    key = next((k for k in keys if f"{k}.".startswith(f"{missing.full_key}.")), missing.full_key)
    known = {known.name: known for known in known_keys(name)}
    if key in known:
        group = key.partition(".")[0]
        owners = (
            f" of {group}={' or '.join(known[key].only)}"
            if known[key].only
            else f", once {group}=... is given"
        )
        return f"there is no key {key!r} here; it is one{owners}"
    near = did_you_mean(key, [other for other in known if ("." in other) == ("." in key)])
    return f"there is no key {key!r}{near}; semkv-bench {name.replace('_', '-')} --help lists them"


def _in_one_line(error: BaseException) -> str:
    """What a person needs of Hydra's and OmegaConf's messages, which span lines, with the key in front."""
    if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
        group, _, choice = error.missing_cfg_file.removesuffix(".yaml").partition("/")
        known = ", ".join(error.options)
        return f"there is no {group} {choice!r}{did_you_mean(choice, error.options)}; choose from {known}"
    about = next((e for e in _chain(error) if isinstance(e, OmegaConfBaseException) and e.full_key), None)
    key = "" if about is None else about.full_key
    text = str(error if about is None else about.msg or about)
    if "is not a ListConfig" in text or "Cannot merge DictConfig with ListConfig" in text:
        return f"{key} must be a list, for example {key}={_EXAMPLES.get(key.rpartition('.')[2], '[0]')}"
    if found := re.search(r"field '([\w.]+)' is not Optional", text):
        return f"{key or found[1]} takes no null; leave it out for its default"
    noise = (
        "full_key:",
        "object_type=",
        "reference_type=",
        "See https",
        "To append",
        "Config search path",
        "provider=",
    )
    kept = " ".join(
        line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith(noise)
    )
    if isinstance(error, OverrideParseException):
        return f"cannot read the override {error.override!r}: {kept}"
    return f"{key}: {kept}" if key and key not in kept else kept
