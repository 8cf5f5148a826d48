"""Every key of a configuration with its default and one line of meaning, from the comments of the YAML files."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from semkv_bench.config.choices import choice_file, choices, conf_dir, defaults

__all__ = ["Group", "Key", "completions", "groups_of", "help_lines", "known_keys", "own_keys", "read_keys"]

_LINE = re.compile(r"(?P<indent> *)(?P<key>[\w@/]+):(?: +(?P<value>[^#]*?))?(?: +# *(?P<meaning>.*))?")


@dataclass(frozen=True)
class Key:
    """A key as it is given on the command line, the text of its default, and what it means.

    only: the choices of its group that have it; empty where all have.
    """

    name: str
    default: str
    meaning: str
    only: tuple[str, ...] = ()


@dataclass(frozen=True)
class Group:
    """A group: the choice that is made unless told otherwise, all its choices, and the keys in them."""

    name: str
    default: str
    choices: tuple[str, ...]
    keys: tuple[Key, ...]


def own_keys(name: str, composed: DictConfig | None = None) -> list[Key]:
    """Keys at the top of the configuration ``name``.

    composed: that configuration without overrides, for the defaults in force, and not those of the files.
    """
    found = {}
    for file in _files(name):
        found |= {key.name: key for key in read_keys(file)}
    groups = {group.partition("@")[0] for group in defaults(name)}
    return [_in_force(key, composed) for key in found.values() if key.name.partition(".")[0] not in groups]


def groups_of(name: str, composed: DictConfig | None = None) -> list[Group]:
    """Groups of the configuration ``name`` with the keys of all their choices; ``composed`` as in ``own_keys``."""
    made = defaults(name)
    found = []
    for group, names in choices(name).items():
        folder, _, place = group.partition("@")
        keys = () if place or group == "experiment" else _keys_of_group(folder, names, made[group], composed)
        found.append(Group(group, str(made[group] or "null"), tuple(names), keys))
    return found


def _keys_of_group(group: str, names: list[str], made: Any, composed: DictConfig | None) -> tuple[Key, ...]:
    """The union over the choices; a key means the same in all of them, so one of them explains it."""
    found: dict[str, Key] = {}
    # The default's own values first.
    order = sorted(names, key=lambda choice: choice != made)
    for choice in order:
        for key in read_keys(choice_file(group, choice), f"{group}."):
            before = found.get(key.name, replace(key, only=()))
            found[key.name] = replace(
                before, meaning=before.meaning or key.meaning, only=(*before.only, choice)
            )
    whole = {name for name, key in found.items() if len(key.only) == len(names)}
    return tuple(
        _in_force(replace(key, only=() if name in whole else tuple(sorted(key.only))), composed)
        for name, key in found.items()
    )


def read_keys(file: Path, prefix: str = "") -> list[Key]:
    """Keys of a YAML file in its order, nested ones with dots; a comment stands behind a key or above it.

    The comment that a file begins with is about the file.
    """
    keys: list[Key] = []
    parents: list[tuple[int, str]] = []
    above: list[str] = []
    begun = False
    for line in file.read_text().splitlines():
        stripped = line.strip()
        if stripped.startswith("#"):
            above.append(stripped.lstrip("# "))
            continue
        found = _LINE.fullmatch(line.rstrip())
        told, above = (" ".join(above) if begun else ""), []
        begun = True
        if found is None or found["key"].startswith("_"):
            continue
        indent = len(found["indent"])
        parents = [(at, name) for at, name in parents if at < indent]
        value = (found["value"] or "").strip()
        if not value:
            parents.append((indent, found["key"]))
            continue
        name = ".".join([*(name for _, name in parents), found["key"]])
        if not name.startswith("defaults"):
            keys.append(Key(prefix + name, value, found["meaning"] or told))
    return keys


def known_keys(name: str) -> list[Key]:
    """All groups and keys that ``name`` takes, whatever is chosen."""
    groups = groups_of(name)
    found = [Key(group.name.partition("@")[2] or group.name, group.default, "") for group in groups]
    found += own_keys(name)
    for group in groups:
        folder, _, place = group.name.partition("@")
        keys = next(other.keys for other in groups if other.name == folder)
        found += [replace(k, name=k.name.replace(folder, place, 1)) for k in keys] if place else keys
    return found


def completions(name: str) -> list[str]:
    """What may stand on a command line: ``group=choice`` in full, and ``key=``."""
    groups = choices(name)
    given = [f"{group}={choice}" for group, names in groups.items() for choice in names]
    places = {group.partition("@")[2] or group for group in groups}
    return given + [f"{key.name}=" for key in known_keys(name) if key.name not in places]


def _files(name: str) -> list[Path]:
    """The file of ``name`` after those that it builds on."""
    path = conf_dir() / f"{name}.yaml"
    bases = [entry for entry in OmegaConf.load(path).get("defaults", []) if isinstance(entry, str)]
    return [*(file for base in bases if base != "_self_" for file in _files(base)), path]


def _in_force(key: Key, composed: DictConfig | None) -> Key:
    """The key with the value that it has where nothing is given, also where an experiment sets it."""
    if key.default.startswith("${"):
        return replace(key, meaning=key.meaning or f"what {key.default[2:-1]} says")
    if composed is None:
        return key
    here = OmegaConf.select(composed, key.name, default=key.default)
    return key if here is key.default else replace(key, default=_shown(here))


def _shown(value: Any) -> str:
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value)
    if isinstance(value, list):
        return "[" + ",".join(map(_shown, value)) + "]"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return str(value)


def help_lines(name: str, composed: DictConfig) -> list[str]:
    """Groups, choices and keys of the configuration ``name``, each key with its default and meaning.

    composed: as in ``own_keys``.
    """
    lines = ["", "Groups (group=CHOICE), and the keys in them (group.key=VALUE):"]
    for group in groups_of(name, composed):
        lines += ["", f"  {group.name}={group.default}", f"      choices: {', '.join(group.choices)}"]
        lines += [_line(key, 4) for key in group.keys]
        if "@" in group.name:
            folder, _, place = group.name.partition("@")
            lines.append(f"      the same for {place}: keys {place}.key as those of {folder}")
    return [*lines, "", "Keys (key=VALUE):", "", *(_line(key, 2) for key in own_keys(name, composed))]


def _line(key: Key, indent: int) -> str:
    of = f" (of {', '.join(key.only)})" if key.only else ""
    return f"{' ' * indent}{f'{key.name}={key.default}':<{34 - indent}}  {key.meaning}{of}"
