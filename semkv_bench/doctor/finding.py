"""What a check of this machine found."""

from dataclasses import dataclass

__all__ = ["MISSING", "NOTE", "OK", "Finding"]


OK, NOTE, MISSING = "ok", "note", "missing"


@dataclass(frozen=True)
class Finding:
    """What one check found.

    state: ``ok``; ``note`` for what is useful but not needed; ``missing`` for what a sweep cannot do without.
    mend: what to do about it, a command where there is one.
    """

    name: str
    state: str
    found: str
    mend: str | None = None
