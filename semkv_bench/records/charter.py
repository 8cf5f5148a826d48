"""The charter of a run: its sealed plan, written before the first record and never changed (protocol.yaml)."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from semkv_bench.errors import UsageError
from semkv_bench.files import locked, write_atomically
from semkv_bench.records.values import short

__all__ = [
    "CHARTER",
    "SHARED_LOCK",
    "changes",
    "charter_hash",
    "charter_mark",
    "read_charter",
    "require_same",
    "seal",
]

CHARTER = "protocol.yaml"
SHARED_LOCK = ".shared.lock"  # held by whoever changes what all writers share
_MENDED = "put a copy of it back, or run the sweep again into another out=DIR"
_MOST_NAMED = 3
_ABSENT = object()
# The parser in C where PyYAML was built with it.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def charter_hash(charter: Mapping[str, Any]) -> str:
    """SHA-256 of a charter's content (keys sorted, its own ``hash`` left out)."""
    content = {key: value for key, value in charter.items() if key != "hash"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def charter_mark(charter: Mapping[str, Any]) -> str:
    """What every record of the run carries: the beginning of the charter's hash."""
    return charter["hash"][:16]


def read_charter(path: Path) -> dict[str, Any]:
    """The charter of the run folder ``path``. Raises UsageError where it is damaged or was changed."""
    charter = _parsed(path / CHARTER)
    missing = next((name for name in ("hash", "settings") if name not in charter), None)
    if missing is not None or not isinstance(charter["settings"], dict):
        raise UsageError(f"{path / CHARTER} is damaged: no {missing or 'settings'}; {_MENDED}")
    if charter_hash(charter) != charter["hash"]:
        raise UsageError(
            f"{path / CHARTER} was changed after it was written: its hash does not match; {_MENDED}"
        )
    return charter


def require_same(path: Path, sealed: Mapping[str, Any]) -> None:
    """Raise UsageError, naming what differs, unless the folder's charter is ``sealed``."""
    present = _parsed(path / CHARTER)
    if present.get("hash") != charter_hash(present):
        raise UsageError(f"{path / CHARTER} was changed after it was written; choose another out=DIR")
    if present["hash"] == sealed["hash"]:
        return
    changed = list(changes({**present, "hash": 0}, {**sealed, "hash": 0}))
    more = f"; and {len(changed) - _MOST_NAMED} more" if len(changed) > _MOST_NAMED else ""
    raise UsageError(
        f"{path} holds a run of another protocol (different: {'; '.join(changed[:_MOST_NAMED])}{more}); choose "
        "another out=DIR"
    )


def seal(path: Path, sealed: Mapping[str, Any], config_yaml: str) -> None:
    """Write the charter, and the configuration it came from, unless another process was first."""
    with locked(path / SHARED_LOCK):
        if not (path / CHARTER).exists():
            write_atomically(path / "config.yaml", config_yaml)
            text = yaml.safe_dump(dict(sealed), sort_keys=False, allow_unicode=True, width=110)
            write_atomically(path / CHARTER, text)


def _parsed(path: Path) -> dict[str, Any]:
    try:
        charter = yaml.load(path.read_text(), Loader=_LOADER)
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise UsageError(f"{path} is damaged: {str(error).splitlines()[0]}; {_MENDED}") from error
    if not isinstance(charter, dict):
        raise UsageError(f"{path} is damaged: it holds no protocol; {_MENDED}")
    return charter


def changes(
    before: Any, now: Any, key: str = "", where: tuple[str, str] = ("there", "here")
) -> Iterator[str]:
    """What differs, as ``weights.bytes: 5 there, 6 here``."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in sorted({*before, *now}, key=str):
            below = f"{key}.{name}" if key else str(name)
            yield from changes(before.get(name, _ABSENT), now.get(name, _ABSENT), below, where)
    elif before != now:
        there, here = ("absent" if value is _ABSENT else _brief(value) for value in (before, now))
        yield f"{key}: {there} {where[0]}, {here} {where[1]}"


def _brief(value: Any) -> str:
    return value if isinstance(value, str) and len(value) <= 40 else short(value)
