"""The charter of a run: its sealed plan, written before the first record (protocol.yaml).

It is never changed but for one thing: more examples, seeds or settings may be added. Such an amendment is written into
it with its time and what was known then, and records keep the mark of the charter that they were made under.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from semkv_bench.errors import UsageError
from semkv_bench.files import locked, write_atomically
from semkv_bench.records.values import short

__all__ = [
    "CHARTER",
    "MARK_LENGTH",
    "SHARED_LOCK",
    "agree",
    "changes",
    "charter_hash",
    "charter_mark",
    "read_charter",
    "require_same",
    "settings_by_mark",
    "without_path",
]

CHARTER = "protocol.yaml"
MARK_LENGTH = 16  # letters of a charter's hash
SHARED_LOCK = ".shared.lock"  # held by whoever changes what all writers share
_MENDED = "put a copy of it back, or run the sweep again into another out=DIR"
_MOST_NAMED = 3
_ABSENT = object()
_MAY_GROW = ("per_task", "seeds", "examples", "settings")
# The parser in C where PyYAML was built with it.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def charter_hash(charter: Mapping[str, Any]) -> str:
    """SHA-256 of a charter's content (keys sorted, its own ``hash`` left out)."""
    content = {key: value for key, value in charter.items() if key != "hash"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def charter_mark(charter: Mapping[str, Any]) -> str:
    """What every record of the run carries: the beginning of the charter's hash."""
    return charter["hash"][:MARK_LENGTH]


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


def require_same(path: Path, sealed: Mapping[str, Any]) -> dict[str, Any]:
    """The folder's charter; UsageError, naming what differs, unless it is ``sealed``, amendments aside."""
    present = _parsed(path / CHARTER)
    if present.get("hash") != charter_hash(present):
        raise UsageError(f"{path / CHARTER} was changed after it was written; choose another out=DIR")
    if _compared(present) == _compared(sealed):
        return present
    changed = _contradictions(_compared(present), _compared(sealed))
    more = f"; and {len(changed) - _MOST_NAMED} more" if len(changed) > _MOST_NAMED else ""
    raise UsageError(
        f"{path} holds a run of another protocol (different: {'; '.join(changed[:_MOST_NAMED])}{more}); choose "
        "another out=DIR"
    )


def agree(
    path: Path,
    sealed: Mapping[str, Any],
    config_yaml: str,
    recorded: Callable[[Mapping[str, Any]], int],
    used: Callable[[str], bool],
) -> dict[str, Any]:
    """The charter in force: ``sealed``, written if there is none, and as an amendment where it adds to the one there.

    An amendment under which nothing was recorded is taken back by the charter from before it. config_yaml: the
    configuration ``sealed`` came from. recorded: how many examples the run of a charter holds by now. used: whether any
    record carries a mark.

    Raises UsageError, naming what differs, for the charter of another run.
    """
    with locked(path / SHARED_LOCK):
        if not (path / CHARTER).exists():
            return _write(path, dict(sealed), config_yaml)
        present = _parsed(path / CHARTER)
        before = _amended(present, sealed)
        if before is not None and not used(charter_mark(present)):
            return _write(path, before, config_yaml)
        added = None if _compared(present) == _compared(sealed) else _added(present, sealed)
        if added is None or present.get("hash") != charter_hash(present):
            return require_same(path, sealed)
        amendment = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "examples": [present["examples"]["count"], sealed["examples"]["count"]],
            "settings": added,
            "recorded": recorded(present),
            "reported": (path / "report.json").exists(),
            "before": charter_mark(present),
        }
        grown = {**_content(sealed), "amendments": [*present.get("amendments", []), amendment]}
        return _write(path, {**grown, "hash": charter_hash(grown)}, config_yaml)


def _amended(present: Mapping[str, Any], sealed: Mapping[str, Any]) -> dict[str, Any] | None:
    """The charter that the last amendment of ``present`` amended, where ``sealed`` is its content."""
    *earlier, last = present.get("amendments") or [None]
    if last is None or present.get("hash") != charter_hash(present):
        return None
    content = {
        **_content(sealed),
        "task": present.get("task"),
        **({"amendments": earlier} if earlier else {}),
    }
    before = {**content, "hash": charter_hash(content)}
    return before if charter_mark(before) == last["before"] else None


def settings_by_mark(charter: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """The settings of every charter that records of the run may carry the mark of, the one in force among them."""
    settings = tuple(charter["settings"])
    found = {charter_mark(charter): settings}
    for amendment in reversed(charter.get("amendments", [])):
        settings = tuple(name for name in settings if name not in amendment["settings"])
        found[amendment["before"]] = settings
    return found


def _added(present: Mapping[str, Any], sealed: Mapping[str, Any]) -> list[str] | None:
    """Settings that ``sealed`` has and ``present`` has not; None where it differs in more than what is added."""
    if "looks" in present or "looks" in sealed:
        return None
    before, now = _compared(present), _compared(sealed)
    for name in ("per_task", "seeds", "examples", "settings"):
        if name not in before or name not in now:
            return None
    kept = {name: _described(now["settings"].get(name)) for name in before["settings"]}
    grows = (
        before["examples"]["count"] <= now["examples"]["count"]
        and set(before["seeds"]) <= set(now["seeds"])
        and kept == {name: _described(told) for name, told in before["settings"].items()}
    )
    rest = ({k: v for k, v in each.items() if k not in _MAY_GROW} for each in (before, now))
    if not grows or next(rest) != next(rest):
        return None
    return [name for name in now["settings"] if name not in before["settings"]]


def _contradictions(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs, without what may grow where something else differs too."""
    changed = list(changes(before, now))
    rest = [told for told in changed if re.split("[.:]", told)[0] not in _MAY_GROW]
    return rest or changed


def _described(setting: Any) -> Any:
    """A setting without the sizes of its caches, which are those of the middle one of the planned examples."""
    return {k: v for k, v in setting.items() if k != "cache_at"} if isinstance(setting, dict) else setting


def _content(charter: Mapping[str, Any]) -> dict[str, Any]:
    content = {key: value for key, value in charter.items() if key not in ("hash", "amendments")}
    # What is read back from a file has lists where the plan may have tuples.
    return json.loads(json.dumps(content))


def _compared(charter: Mapping[str, Any]) -> dict[str, Any]:
    """A charter's content without the place of the prompts, whose hashes stand in it."""
    content = _content(charter)
    return {**content, "task": without_path(content.get("task"))}


def without_path(config: Any) -> Any:
    """A part's configuration without the place of its file, where its content is known otherwise."""
    return {k: v for k, v in config.items() if k != "path"} if isinstance(config, Mapping) else config


def _write(path: Path, charter: dict[str, Any], config_yaml: str) -> dict[str, Any]:
    write_atomically(path / "config.yaml", config_yaml)
    text = yaml.safe_dump(charter, sort_keys=False, allow_unicode=True, width=110)
    write_atomically(path / CHARTER, text)
    return charter


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
