"""How a sweep spells the names of mixes and pruned settings; foreign records follow the same spelling."""

import re

__all__ = ["kind_of", "parts"]

_SPELLED = {
    "mixed": re.compile(r"^(?:(?P<family>.+)-)?L(?P<high>\d+)/(?P<low>\d+)@(?P<share>[^:]+):(?P<metric>.+)$"),
    "prune": re.compile(r"^(?:(?P<family>.+)-)?prune@(?P<share>[^:]+):(?P<metric>.+)$"),
}


def parts(name: str, kind: str) -> re.Match[str] | None:
    """The parts of the name of a setting of ``kind`` mixed or prune, None where it is spelled otherwise."""
    match = _SPELLED[kind].match(name) if kind in _SPELLED else None
    return match if match and _is_share(match["share"]) else None


def kind_of(name: str) -> str:
    """mixed or prune where ``name`` is spelled like one, else uniform."""
    return next((kind for kind in _SPELLED if parts(name, kind)), "uniform")


def _is_share(text: str) -> bool:
    try:
        return 0 <= float(text) <= 1
    except ValueError:
        return False
