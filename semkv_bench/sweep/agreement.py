"""Where an answer parts from that of ``full``, by token ids."""

from typing import Any

from semkv_bench.engine.outcome import Outcome

__all__ = ["agreement"]


def agreement(full: Outcome, other: Outcome) -> dict[str, Any]:
    """Fields of the record of ``other``: ``agreement``, ``parted_at`` and ``parted_by``.

    agreement: share of the longer answer that is equal, token by token from its start; parted_at: place of the first
    token that differs, None where none does; parted_by: ``token``, or ``end`` where one of them ended there. All are
    None where an engine tells no token ids, since a text cut into tokens again is another answer.
    """
    if full.tokens is None or other.tokens is None:
        return {"agreement": None, "parted_at": None, "parted_by": None}
    longest = max(len(full.tokens), len(other.tokens))
    pairs = zip(full.tokens, other.tokens, strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(full.tokens), len(other.tokens)))
    whole = place == longest and full.ended == other.ended
    by = "token" if place < min(len(full.tokens), len(other.tokens)) else "end"
    return {
        "agreement": round(place / longest, 6) if longest else float(whole),
        "parted_at": None if whole else place,
        "parted_by": None if whole else by,
    }
