"""Several quantizers in one sweep: ``methods=[affine,kivi]``, and their options as ``method.kivi.KEY=...``."""

from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, ListConfig

from semkv_bench.config.choices import did_you_mean, names_of
from semkv_bench.errors import UsageError

__all__ = ["check_methods", "method_nodes", "without_options"]

_GROUP = "quantizer"
_PLACE = "method"
_INSTEAD = (_GROUP, "value_quantizer", f"{_GROUP}@value_quantizer")


def without_options(overrides: Sequence[str]) -> list[str]:
    """``overrides`` but for the options of single methods, which have no place before the methods are known."""
    return [override for override in overrides if not _key(override).startswith(f"{_PLACE}.")]


def method_nodes(config: DictConfig, overrides: Sequence[str]) -> list[str]:
    """Overrides that put the file of every method in ``config.methods`` below ``method``; none where there are none.

    ``overrides`` are those that were given, options of methods among them.

    Raises:
        UsageError: a method that is no choice of the quantizer group or is named twice, ``quantizer=`` beside
            ``methods=``, options of a method that is not in the list.
    """
    methods = config.get("methods")
    options = [key for key in map(_key, overrides) if key.startswith(f"{_PLACE}.")]
    if methods is None:
        if options:
            raise UsageError(f"{options[0]} is an option of one of several methods; give methods=[...] too")
        return []
    names = _names(methods)
    for key in map(_key, overrides):
        if key in _INSTEAD or key.startswith(tuple(f"{group}." for group in _INSTEAD)):
            raise UsageError(
                f"methods=[{','.join(names)}] takes the place of {key}; leave one out (options of one method are "
                f"{_PLACE}.{names[0]}.KEY=...)"
            )
    for key in options:
        if (name := key.split(".")[1]) not in names:
            raise UsageError(
                f"{key}: {name} is not in methods=[{','.join(names)}]{did_you_mean(name, names)}"
            )
    return [f"+{_GROUP}@{_PLACE}.{name}={name}" for name in names]


def check_methods(name: str, config: DictConfig) -> None:
    """See to it that a configuration says its quantizers once: ``quantizer``, or ``methods``.

    Raises:
        UsageError: methods of the command ``name``, which follows one quantizer.
    """
    if config.get("methods") is None:
        return
    if name != "sweep":
        raise UsageError(f"{name} follows one quantizer; give quantizer=NAME in place of methods=[...]")
    config.quantizer = None
    config.value_quantizer = None


def _names(methods: Any) -> list[str]:
    known = names_of(_GROUP)
    if not isinstance(methods, list | tuple | ListConfig) or not methods:
        raise UsageError(
            f"methods={methods} must be a list of quantizers, for example methods=[{','.join(known[:2])}]"
        )
    names = [str(name) for name in methods]
    for name in names:
        if name not in known:
            raise UsageError(
                f"methods: there is no {_GROUP} {name!r}{did_you_mean(name, known)}; choose from {', '.join(known)}"
            )
        if names.count(name) > 1:
            raise UsageError(f"methods names {name} twice")
    return names


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]
