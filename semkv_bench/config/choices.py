"""Groups of the configuration and their choices: the package's and those of the user's own folders."""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

import semkv_bench
from semkv_bench.config.own import check_names, own_folders
from semkv_bench.errors import SemkvError, UsageError

__all__ = [
    "check_choices",
    "choice_file",
    "choices",
    "conf_dir",
    "defaults",
    "did_you_mean",
    "names_of",
    "search_path",
]


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


def defaults(name: str) -> dict[str, Any]:
    """Groups that the configuration ``name`` chooses from, each with the choice that it makes (or None)."""
    found: dict[str, Any] = {}
    for entry in OmegaConf.load(conf_dir() / f"{name}.yaml").get("defaults", []):
        if entry == "_self_":
            continue
        if isinstance(entry, str):
            found |= defaults(entry)
        else:
            found |= {re.sub(r"^(optional |override )", "", str(group)): entry[group] for group in entry}
    return found


def choices(name: str) -> dict[str, list[str]]:
    """Groups that the configuration ``name`` chooses from, each with its choices."""
    return {group: names_of(group.partition("@")[0]) for group in defaults(name)}


def names_of(group: str) -> list[str]:
    """Choices of a group, whatever configuration it is of."""
    folders = [folder / group for folder in (conf_dir(), *own_folders())]
    return sorted(
        str(path.relative_to(folder).with_suffix(""))
        for folder in folders
        for path in folder.rglob("*.yaml")
        if path.is_file()
    )


def choice_file(group: str, choice: str) -> Path:
    """The YAML file of a choice of the package's or of the user's own."""
    folders = (conf_dir(), *own_folders())
    return next(path for folder in folders if (path := folder / group / f"{choice}.yaml").exists())


def check_choices(name: str, overrides: Iterable[str]) -> None:
    """Raise UsageError for a choice that its group does not have; Hydra passes over one of an optional group."""
    groups = defaults(name)
    for override in overrides:
        group, _, choice = override.lstrip("+").partition("=")
        if group not in groups or choice == "null" or not re.fullmatch(r"[\w/.-]+", choice):
            continue
        if choice not in (known := names_of(group.partition("@")[0])):
            raise UsageError(
                f"there is no {group.rpartition('@')[2]} {choice!r}{did_you_mean(choice, known)}; "
                f"choose from {', '.join(known)}"
            )


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`` (did you mean affine?)``; empty where nothing known is near ``word``."""
    near = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {near[0]}?)" if near else ""
