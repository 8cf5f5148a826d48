"""The arguments of a command as Hydra reads them: paths need no quotes of Hydra's, a hub name is a model."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from semkv_bench.config.choices import choices, defaults
from semkv_bench.errors import UsageError

__all__ = ["as_overrides", "override"]

_VERBATIM = ("command", "baseline", "dir", "out", "path", "prompts_path", "records", "records_model", "run")


def as_overrides(
    arguments: Sequence[str], config: str | None = None, bare: str | None = None, several: bool = False
) -> list[str]:
    """Overrides of the configuration ``config`` (None: of a model alone) from the arguments ``key=value``.

    bare: the key that an argument without ``=`` is a value of, None where there is none; several: commas
    separate the choices of a multirun.

    Raises:
        UsageError: an argument of another form.
    """
    keyed = [_with_key(argument, bare) for argument in arguments]
    if bare is not None and sum(argument.startswith(f"{bare}=") for argument in keyed) > 1:
        raise UsageError(f"one {bare} at a time; several side by side are {bare}s=[DIR,DIR]")
    if config is None or "model" in defaults(config):
        keyed = [override for argument in keyed for override in _model(argument, several)]
    return [_path_as_given(argument, several) for argument in keyed]


def _with_key(argument: str, bare: str | None) -> str:
    key, equals, _ = argument.partition("=")
    if argument.startswith("~") and not argument.startswith("~/"):
        return argument
    # A folder's name may hold an equals sign.
    named = equals and not (bare is not None and key != bare and Path(argument).expanduser().exists())
    if named:
        return argument
    if bare is None:
        raise UsageError(f"{argument!r} is not of the form key=value")
    return f"{bare}={argument}"


def _model(argument: str, several: bool) -> list[str]:
    """``model=org/name`` and ``model=FOLDER`` as what loads them, where no choice has that name."""
    key, _, value = argument.partition("=")
    if key != "model" or "/" not in value or set(value) & set("'\"{$") or value in choices("sweep")["model"]:
        return [argument]
    if several and "," in value:
        raise UsageError(f"-m takes hub names and folders by model=custom model.path={value}")
    return ["model=custom", f"model.path={value}"]


def _path_as_given(argument: str, several: bool) -> str:
    """A path or a command in Hydra's quotes, so that spaces, brackets and accents in it need none from the user."""
    key, equals, value = argument.partition("=")
    plain = value not in ("", "null", "???") and not value.startswith(("'", '"')) and not set(value) & {"\\"}
    if key.lstrip("+").rpartition(".")[2] not in _VERBATIM or not plain or "${" in value:
        return argument
    if several and "," in value:
        return argument
    return key + equals + _quoted(value)


def override(key: str, value: Any) -> str:
    """``key=value`` for a value from Python: null, a truth value, a number, a text, or a list of these.

    Numbers and arrays of numpy and pandas count as what they hold.

    Raises UsageError for anything else.
    """
    return f"{key}={_written(key, value)}"


def _written(key: str, value: Any) -> str:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | Path):
        return _quoted(str(value))
    if isinstance(value, list | tuple | range | set | frozenset):
        return f"[{','.join(_written(key, each) for each in value)}]"
    raise UsageError(f"{key} takes numbers, texts and lists of them, not {type(value).__name__}")


def _quoted(text: str) -> str:
    """A text in Hydra's single quotes, within which backslashes count only before a quote or the end."""
    text = re.sub(r"(\\*)(?='|$)", r"\1\1", text)
    return "'" + text.replace("'", "\\'") + "'"
