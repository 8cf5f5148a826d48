"""What ``semkv-bench measure`` left in a run folder: read again, and said in words."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from semkv_bench.console import human_bytes
from semkv_bench.files import parse_json
from semkv_bench.records.charter import MARK_LENGTH, settings_by_mark
from semkv_bench.stats.result import Measured

__all__ = ["MEASURED", "measured_words", "read_measured"]

MEASURED = "measure.json"
_16_BITS = ("float16", "bfloat16")


def read_measured(path: Path, charter: Mapping[str, Any]) -> Measured | None:
    """What was measured on the run in folder ``path``; None where nothing was, or on a run of another ``charter``.

    What was measured before the charter was amended counts.
    """
    try:
        content = parse_json((path / MEASURED).read_bytes())
        known = settings_by_mark(charter).get(content["charter"][:MARK_LENGTH], ())
        if content["setting"] not in known:
            return None
        smaller, bits = content["times_smaller"], content["cache_bits"]
        speed, same = content["tokens_per_second"], content["answers_as_in_sweep"]
        return Measured(
            setting=content["setting"],
            examples=len(content["examples"]),
            device=content["device"],
            dtype=content["dtype"],
            nbytes=content["bytes"]["total"],
            plain_nbytes=content["plain_bytes"],
            cache_bits=bits["measured"],
            predicted_cache_bits=bits["recorded"],
            times_smaller=smaller["measured"],
            predicted_times_smaller=smaller["predicted"],
            tokens_per_second=speed["packed"],
            plain_tokens_per_second=speed["plain"],
            answers_as_in_sweep=same["packed"],
            plain_answers_as_in_sweep=same["plain"],
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def measured_words(content: Mapping[str, Any]) -> list[str]:
    """What was measured, in lines for people."""
    held, smaller, count = content["bytes"], content["times_smaller"], len(content["examples"])
    parts = ", ".join(
        f"{part} {human_bytes(size)}" for part, size in held.items() if part != "total" and size
    )
    predicted = "not recorded" if smaller["predicted"] is None else f"predicted {smaller['predicted']:.2f}x"
    speed, same = content["tokens_per_second"], content["answers_as_in_sweep"]
    wide = "" if content["dtype"] in _16_BITS else f"; here tokens in full are {content['dtype']}"
    lines = [
        f"{content['setting']} on {count} examples of {content['model']}, {content['device']}, {content['dtype']}",
        f"bytes held{', all caches together' if count > 1 else ''}: {human_bytes(held['total'])} ({parts}); "
        f"by plain ones {human_bytes(content['plain_bytes'])}",
        f"codes in the {content.get('layout', 'dense')} layout; what was predicted is of the dense one",
        f"smaller: measured {smaller['measured']:.2f}x, {predicted}; tokens in full counted in 16 bits{wide}",
        f"decoding: {speed['packed']:.1f} tokens a second packed, {speed['plain']:.1f} plain, "
        f"{speed['ratio']:.2f} times as fast",
        f"answers as in the sweep: {same['packed']} of {count} packed, {same['plain']} of {count} plain",
    ]
    for row in content["examples"]:
        if not row["packed"]["as_in_sweep"]:
            at = row["packed"]["first_difference"]
            lines.append(f"first difference: {row['task']} {row['example_id']} after {at} tokens")
            break
    return lines
