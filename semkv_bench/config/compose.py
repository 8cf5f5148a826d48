"""The Hydra configuration: found from anywhere, composed, and checked before anything heavy is loaded."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, InstantiationException, OverrideParseException
from hydra.utils import instantiate
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import YAMLError

import semkv_bench
from semkv_bench.config.own import check_names, import_own, own_folders
from semkv_bench.config.shard import Shard
from semkv_bench.errors import SemkvError, UsageError

__all__ = [
    "build",
    "check_config",
    "check_sweeps",
    "choice_file",
    "choices",
    "compose_config",
    "conf_dir",
    "search_path",
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
    looks: list[int] | None = None


@dataclass
class _Sweep:
    model: dict[str, Any] = MISSING
    quantizer: dict[str, Any] = MISSING
    value_quantizer: dict[str, Any] | None = None
    grid: _Grid = field(default_factory=_Grid)
    allocation: dict[str, Any] = MISSING
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


@dataclass
class _Storage:
    quantizer: dict[str, Any] = MISSING
    value_quantizer: dict[str, Any] | None = None
    grid: _Grid = field(default_factory=_Grid)
    allocation: dict[str, Any] = MISSING
    model: dict[str, Any] | None = None
    head_dim: int | None = None
    context: list[int] = MISSING


_SCHEMAS = {
    "sweep": _Sweep,
    "recipe": _Recipe,
    "regress": _Regress,
    "cliff_report": _CliffReport,
    "storage": _Storage,
}


_EXAMPLES = {"looks": "[40,80,120]", "context": "[8192,32768]"}


def conf_dir() -> Path:
    """Folder of the Hydra groups: inside the installed package, or at the top of a source tree."""
    package = Path(semkv_bench.__file__).resolve().parent
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "sweep.yaml").exists():
            return folder
    raise SemkvError("the configuration files are missing from this installation; reinstall semkv-bench")


def search_path() -> list[str]:
    """The override that lets Hydra find choices in the user's own folders too; none where there are no such.

    Raises:
        MissingError: such a folder is not there.
        UsageError: it holds a choice that the package has already.
    """
    folders = own_folders()
    if not folders:
        return []
    check_names(conf_dir())
    quoted = ["'file://" + str(folder).replace("'", r"\'") + "'" for folder in folders]
    return [f"hydra.searchpath=[{','.join(quoted)}]"]


def compose_config(name: str, overrides: Sequence[str] = ()) -> DictConfig:
    """Compose ``name`` with ``overrides`` and check every value's type.

    Raises:
        UsageError: an override that does not parse, an unknown key or choice, a value of the wrong type.
    """
    _check_choices(name, overrides)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            return check_config(name, compose(name, overrides=[*overrides, *search_path()]))
    except (HydraException, OmegaConfBaseException, ValueError, YAMLError) as error:
        raise UsageError(_in_one_line(error)) from error


def _check_choices(name: str, overrides: Sequence[str]) -> None:
    """Hydra passes over a choice that an optional group does not have."""
    groups = choices(name)
    for override in overrides:
        group, _, choice = override.partition("=")
        if group in groups and re.fullmatch(r"[\w/.-]+", choice) and choice not in (*groups[group], "null"):
            known = ", ".join(groups[group])
            raise UsageError(f"there is no {group.rpartition('@')[2]} {choice!r}; choose from {known}")


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
        _check_prompts(typed)
        if typed.get("fresh") and typed.out is not None and name != "regress":
            raise UsageError(
                "fresh=true names a new folder by itself; leave one of fresh=true and out=... out"
            )
        return typed
    except OmegaConfBaseException as error:
        raise UsageError(_in_one_line(error)) from error


def _check_prompts(config: DictConfig) -> None:
    """A task that takes ``prompts`` checks it; what another is given would have no effect."""
    wording = config.get("prompts", "auto")
    if wording not in ("auto", "own") and "prompts" not in config.task:
        raise UsageError(
            f"prompts={wording} has no effect on this task, which writes its prompts itself; leave it out"
        )


def check_sweeps(name: str, overrides: Sequence[str]) -> list[DictConfig]:
    """Compose every combination of a multirun's comma-separated ``overrides`` once, to fail before the first job.

    Returns the configurations. Raises UsageError as ``compose_config`` does, and where a folder would have to
    hold several sweeps; shards of one sweep may share it.
    """
    try:
        jobs = BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(list(overrides)), None)
    except HydraException as error:
        raise UsageError(_in_one_line(error)) from error
    configs = [compose_config(name, job) for batch in jobs for job in batch]
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


def choices(name: str) -> dict[str, list[str]]:
    """Groups that the configuration ``name`` chooses from, each with its choices."""
    defaults = OmegaConf.load(conf_dir() / f"{name}.yaml").get("defaults", [])
    if "sweep" in defaults:
        return choices("sweep")
    groups = [
        re.sub(r"^(optional |override )", "", str(key))
        for entry in defaults
        if entry != "_self_"
        for key in entry
    ]
    found = {}
    for group in dict.fromkeys(groups):
        folders = [folder / group.partition("@")[0] for folder in (conf_dir(), *own_folders())]
        found[group] = sorted(
            str(path.relative_to(folder).with_suffix(""))
            for folder in folders
            for path in folder.rglob("*.yaml")
            if path.is_file()
        )
    return found


def choice_file(group: str, choice: str) -> Path:
    """The YAML file of a choice of the package's or of the user's own."""
    folders = (conf_dir(), *own_folders())
    return next(path for folder in folders if (path := folder / group / f"{choice}.yaml").exists())


def to_yaml(config: DictConfig) -> str:
    """The resolved configuration as YAML."""
    return OmegaConf.to_yaml(config, resolve=True)


def _require_given(config: DictConfig) -> None:
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise MissingMandatoryValue(f"{', '.join(missing)} must be given, for example {missing[0]}=...")


def _in_one_line(error: BaseException) -> str:
    """Hydra's and OmegaConf's messages span lines; keep what a person needs, with the key in front."""
    text = str(error)
    if found := re.search(
        r"Could not find '(?:.*/)?([^/']+)/([^/']+)'\s+Available options in '.*?':\n((?:\s+\S+\n?)+)", text
    ):
        group, choice, options = found.groups()
        known = choices("sweep").get(group, options.split())
        return f"there is no {group} {choice!r}; choose from {', '.join(known)}"
    if found := re.search(r"Could not override '([^']+)'", text):
        return f"there is no key {found[1]!r} (the command's --help lists groups and keys)"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    key = next((line.partition(":")[2].strip() for line in lines if line.startswith("full_key:")), "")
    if "is not a ListConfig" in text:
        return f"{key} must be a list, for example {key}={_EXAMPLES.get(key.rpartition('.')[2], '[0]')}"
    noise = (
        "full_key:",
        "object_type=",
        "reference_type=",
        "See https",
        "To append",
        "Config search path",
        "provider=",
    )
    kept = " ".join(line for line in lines if not line.startswith(noise))
    if isinstance(error, OverrideParseException):
        return f"cannot read the override {error.override!r}: {kept}"
    return f"{key}: {kept}" if key and key not in kept else kept
