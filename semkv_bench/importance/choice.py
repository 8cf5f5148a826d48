"""Metrics by name: the choices of the group ``metric``, the package's and those of the user's own folders."""

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import OmegaConf

from semkv_bench.config.choices import choice_file, did_you_mean, names_of
from semkv_bench.config.compose import build
from semkv_bench.config.own import import_own
from semkv_bench.errors import UsageError

if TYPE_CHECKING:
    from semkv_bench.importance.base import Metric

__all__ = ["choices", "metric"]

_GROUP = "metric"


def choices() -> list[str]:
    """Names of all metrics."""
    return names_of(_GROUP)


def metric(label: str) -> "Metric":
    """The metric that ``label`` names: ``key_norm``, ``attention_window``, ``attention_window-64``.

    Raises:
        UsageError: there is no such metric (the message lists the choices), or its file makes none.
    """
    name, dash, option = str(label).partition("-")
    known = choices()
    if name not in known:
        raise UsageError(
            f"no importance metric {label!r}{did_you_mean(name, known)}; choose from {', '.join(known)}"
        )
    found = _of_file(choice_file(_GROUP, name))
    return found.with_option(option) if dash else found


@lru_cache(maxsize=256)
def _of_file(path: Path) -> "Metric":
    from semkv_bench.importance.base import Metric

    import_own()
    try:
        made = build(OmegaConf.load(path), _GROUP)
    except Exception as error:  # whatever the user's module raises
        raise UsageError(f"{path}: {' '.join(str(error).split())}") from error
    if not isinstance(made, Metric):
        raise UsageError(f"{path}: _target_ must name a subclass of semkv_bench.importance.Metric")
    if made.name != path.stem:
        raise UsageError(f"{path}: its metric is called {made.name}; name the file {made.name}.yaml")
    return made
