"""Logs of other harnesses, read into the records that the statistics work on: one function from path to rows each."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from semkv_bench.errors import UsageError
from semkv_bench.importers import (
    inspect_ai,
    kvpress,
    lighteval,
    llama_perplexity,
    lm_eval,
    longbench,
    opencompass,
)
from semkv_bench.importers.rows import Importer, Options, Setting, table
from semkv_bench.records.schema import REFERENCE

__all__ = ["FORMATS", "Options", "Setting", "import_logs", "split_arguments"]

FORMATS = {
    "lm-eval": lm_eval,
    "kvpress": kvpress,
    "longbench": longbench,
    "inspect": inspect_ai,
    "lighteval": lighteval,
    "opencompass": opencompass,
    "llama-perplexity": llama_perplexity,
}
AUTO = "auto"
_OPTIONS = ("metric", "filter", "task")
_OTHER_SOURCES = ("run", "runs", "records", "model", "records_model")


def split_arguments(
    arguments: Sequence[str], known: Sequence[str]
) -> tuple[str, list[Setting], Options, list[str]]:
    """The parts of ``cliff-report import=FORMAT full=PATH NAME:BITS=PATH [metric=] [filter=] [task=] ...``.

    known: keys that are the command's own, which stay. Returns format, settings, options and what stays.

    Raises UsageError for a setting without a path, bits that are no number, a name given twice, another source of
    records.
    """
    kind, settings, options, rest = "", [], {}, []
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key == "import":
            kind = value
        elif key in _OPTIONS:
            options[key] = value
        elif key.lstrip("+").partition(".")[0] in known:
            rest.append(argument)
        elif key in _OTHER_SOURCES:
            raise UsageError(f"{argument}: import=... says where the records are; leave {key} out")
        else:
            settings.append(_setting(key, value))
    names = [setting.name for setting in settings]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(
            f"{', '.join(repeated)} is named more than once; every setting needs a name of its own"
        )
    if kind not in (*FORMATS, AUTO):
        raise UsageError(f"import={kind} is not known; choose from {', '.join((*FORMATS, AUTO))}")
    return kind, settings, Options(**options), rest


def import_logs(kind: str, settings: Sequence[Setting], options: Options) -> tuple[pd.DataFrame, list[str]]:
    """Records of the logs of all settings, and what there is to say of them.

    Raises UsageError or MissingError, as :func:`semkv_bench.importers.rows.table`.
    """
    if not settings:
        raise UsageError(
            "import=... needs logs: full=PATH NAME:BITS=PATH, for example full=out/f16 fp8:8=out/fp8"
        )
    return table(settings, _reader(kind, settings), options, f"import={kind}")


def _setting(key: str, value: str) -> Setting:
    name, colon, bits = key.partition(":")
    if not name or not value:
        raise UsageError(f"{key}={value} is neither a key of cliff-report nor NAME:BITS=PATH of a log")
    if not colon:
        return Setting(name, Path(value).expanduser())
    try:
        number = float(bits)
    except ValueError:
        raise UsageError(f"{key}={value}: {bits!r} is no number of bits; write {name}:8=PATH") from None
    if name == REFERENCE or not 0 < number <= 32:
        raise UsageError(
            f"{key}={value}: {REFERENCE} takes no bits, and others take more than 0 and at most 32"
        )
    return Setting(name, Path(value).expanduser(), number)


def _reader(kind: str, settings: Sequence[Setting]) -> Importer:
    if kind != AUTO:
        return FORMATS[kind].read
    fitting = [
        name
        for name, module in FORMATS.items()
        if all(setting.path.exists() and module.looks_like(setting.path) for setting in settings)
    ]
    if len(fitting) != 1:
        found = (
            f"they look like {' and '.join(fitting)}" if fitting else "none of the known formats fits them"
        )
        raise UsageError(f"import=auto: {found}; name the format: import={'|'.join(FORMATS)}")
    return FORMATS[fitting[0]].read
