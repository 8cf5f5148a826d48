"""How a sweep spells settings; names are read only where records have no fields that say what a setting is."""

import re
from typing import Any

__all__ = ["DESCRIBED", "describe", "kind_of"]

# What a setting is, as the charter and every record give it.
DESCRIBED = ("family", "levels", "high", "low", "fraction", "keep", "metric", "scope", "options")

_SPELLED = {
    "mixed": re.compile(
        r"^(?:(?P<family>.+)-)?L(?P<high>\d+)/(?P<low>\d+)@(?P<share>[^:]+):(?P<metric>[^:+]+)(?::(?P<scope>[^+]+))?(?:\+(?P<values>.+))?$"
    ),
    "prune": re.compile(
        r"^(?:(?P<family>.+)-)?(?:prune|evict)@(?P<share>[^:]+):(?P<metric>[^:]+)(?::(?P<scope>.+))?$"
    ),
    "read": re.compile(r"^(?:(?P<family>.+)-)?read@(?P<share>[^:]+):(?P<metric>[^:]+):(?P<scope>.+)$"),
    "uniform": re.compile(r"^(?:(?P<family>.+)-)?L(?P<levels>\d+)$"),
}
_FAMILY = re.compile(r"^(?P<family>.+?)-[LK]\d")
_OPTIONS = re.compile(r"^(?P<family>[^\[\]]+)\[(?P<options>[^\[\]]+)\]$")


def describe(name: str, kind: str) -> dict[str, Any]:
    """The fields ``DESCRIBED`` of setting ``name``, as far as its spelling tells; None for what it does not."""
    found: dict[str, Any] = dict.fromkeys(DESCRIBED)
    match = _match(name, kind)
    if match is not None:
        parts = match.groupdict()
        found |= {key: parts.get(key) for key in ("family", "metric", "scope")}
        if parts.get("values"):
            found["metric"] += f"+{parts['values']}"
        found |= {key: int(parts[key]) for key in ("levels", "high", "low") if parts.get(key)}
        if "share" in parts:
            found["fraction" if kind == "mixed" else "keep"] = float(parts["share"])
    elif start := _FAMILY.match(name):
        found["family"] = start["family"]
    if found["family"] and (options := _OPTIONS.match(found["family"])):
        found |= options.groupdict()
    return found


def kind_of(name: str) -> str:
    """mixed, prune or read where ``name`` is spelled like one, else uniform."""
    return next((kind for kind in ("mixed", "prune", "read") if _match(name, kind)), "uniform")


def _match(name: str, kind: str) -> re.Match[str] | None:
    match = _SPELLED[kind].match(name) if kind in _SPELLED else None
    return match if match and _is_share(match.groupdict().get("share", "0")) else None


def _is_share(text: str) -> bool:
    try:
        return 0 <= float(text) <= 1
    except ValueError:
        return False
