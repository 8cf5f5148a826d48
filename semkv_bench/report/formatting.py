"""How one value of a report is written: enough digits to decide by, none that mean nothing."""

import math
import unicodedata
from collections.abc import Sequence

__all__ = [
    "CLIFF_MEANS",
    "DASH",
    "bits_text",
    "clean",
    "cliff_text",
    "count",
    "divergence",
    "divergences",
    "effective_text",
    "first_names",
    "fixed",
    "grid_point",
    "interval",
    "interval_words",
    "join",
    "known",
    "p_value",
    "percent",
    "percents",
    "plain_data",
    "plural",
    "ratio",
    "shorten",
    "signed",
    "signed_interval",
]

_MOST_NAMED = 3

DASH = "–"

# The one definition of a cliff, for everything that names one.
CLIFF_MEANS = (
    "A cliff lies between two points of the uniform grid, as the verdicts put it: the upper and all above it hold "
    "(a drop beyond the margin is ruled out), the lower and all below it collapse (such a drop is shown); what lies "
    "between them is undecided."
)
_CLIFF_STATUS = {
    "above_grid": "above the grid",
    "below_grid": "below the grid",
    "undetermined": "not determined",
}

# What whole numbers of bits are called elsewhere.
_INTEGERS = {4: "int2", 16: "int4", 256: "int8"}
_TURNS_TEXT = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


def known(value: object) -> bool:
    """Whether ``value`` is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def fixed(value: float | None, digits: int = 3) -> str:
    """``digits`` decimals, an en dash for a missing value, never a negative zero."""
    if not known(value):
        return DASH
    return f"{round(value, digits) + 0.0:.{digits}f}"


def signed(value: float | None, digits: int = 3) -> str:
    """Like ``fixed`` with a plus sign, for differences."""
    if not known(value):
        return DASH
    rounded = round(value, digits) + 0.0
    return f"{rounded:+.{digits}f}" if rounded else f"{0.0:.{digits}f}"


def interval(pair: object, digits: int = 3) -> str:
    """``[low, high]``, or an en dash where an end is missing."""
    return _interval(pair, digits, fixed)


def signed_interval(pair: object, digits: int = 3) -> str:
    """``[-low, +high]``, or an en dash where an end is missing."""
    return _interval(pair, digits, signed)


def _interval(pair, digits, write) -> str:
    if not pair or not all(known(end) for end in pair):
        return DASH
    return f"[{write(pair[0], digits)}, {write(pair[1], digits)}]"


def p_value(value: float | None) -> str:
    """Three decimals, with ``<0.001`` and ``>0.999`` at the ends."""
    if not known(value):
        return DASH
    if value < 0.001:
        return "<0.001"
    return ">0.999" if value > 0.999 else f"{value:.3f}"


def percent(value: float | None) -> str:
    """A share between 0 and 1 as a percentage with one decimal."""
    return f"{100 * value:.1f}%" if known(value) else DASH


def percents(pair: object) -> str:
    """``[low, high]`` in percent, or an en dash where an end is missing."""
    if not pair or not all(known(end) for end in pair):
        return DASH
    return f"[{100 * pair[0]:.1f}, {100 * pair[1]:.1f}]"


def ratio(value: float | None, digits: int = 2) -> str:
    """A compression ratio such as ``4.57x``."""
    return f"{fixed(value, digits)}x" if known(value) else DASH


def divergence(value: float | None) -> str:
    """A KL divergence in nats: three significant digits, small ones with an exponent."""
    if not known(value):
        return DASH
    if value == 0:
        return "0"
    if abs(value) < 0.001:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def divergences(pair: object) -> str:
    """``[low, high]`` of a divergence, or an en dash where an end is missing."""
    return f"[{divergence(pair[0])}, {divergence(pair[1])}]" if pair and all(map(known, pair)) else DASH


def count(value: int | None) -> str:
    """A whole number with thousands separators."""
    return f"{value:,}" if known(value) else DASH


def plural(number: int, noun: str) -> str:
    """``1 task``, ``2 tasks``."""
    return f"{count(number)} {noun}" if number == 1 else f"{count(number)} {noun}s"


def bits_text(value: float | None) -> str:
    """Code bits inside a sentence: three decimals, trailing zeros dropped down to one."""
    return _trimmed(value, 1)


def effective_text(value: float | None) -> str:
    """Effective bits inside a sentence: three decimals, trailing zeros dropped down to two."""
    return _trimmed(value, 2)


def _trimmed(value: float | None, fewest: int) -> str:
    if not known(value):
        return DASH
    whole, decimals = f"{value:.3f}".split(".")
    return f"{whole}.{decimals[:fewest]}{decimals[fewest:].rstrip('0')}"


def grid_point(levels: int | None, setting: str | None, code_bits: float | None, unit: str = " bits") -> str:
    """A point of the uniform grid in words, such as ``2.807 bits (L=7)``, ``4.0 bits (L=16, int4)``.

    Bits do not tell the levels: a format of 4 bits, such as a floating-point one, need not have 16; without
    ``levels`` the setting's name stands there.
    """
    if levels is None:
        return f"{bits_text(code_bits)}{unit}" + (f" ({clean(setting)})" if setting else "")
    also = f", {_INTEGERS[levels]}" if levels in _INTEGERS else ""
    return f"{bits_text(code_bits)}{unit} (L={levels}{also})"


def interval_words(lower: float | None, upper: float | None) -> str:
    """A grid interval such as ``(2.0, 2.322]``, ``at most 1.0`` or ``above 4.0``, in code bits."""
    if known(lower) and known(upper):
        return f"({bits_text(lower)}, {bits_text(upper)}]"
    if known(lower):
        return f"above {bits_text(lower)}"
    if known(upper):
        return f"at most {bits_text(upper)}"
    return "not located"


def cliff_text(status: str, lower: float | None, upper: float | None) -> str:
    """Where a cliff is: ``(2.0, 2.322]`` code bits, or beside which end of the grid."""
    return interval_words(lower, upper) if status == "located" else _CLIFF_STATUS[status]


def join(words: list[str], last: str = "and") -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} {last} {words[-1]}"


def first_names(names: Sequence[object], more: str = "more", last: str = "and") -> str:
    """Three names joined; of a longer list two, and how many ``more``."""
    shown = [clean(name) for name in names[:_MOST_NAMED]]
    if len(names) > _MOST_NAMED:
        shown = [*shown[:-1], f"{len(names) - _MOST_NAMED + 1} {more}"]
    return join(shown, last)


def clean(text: object, keep_lines: bool = False) -> str:
    """Text of a user without what could act on a terminal or break a file.

    Control and direction-changing characters and lone surrogates become U+FFFD, line breaks a space
    unless ``keep_lines``.
    """
    text = str(text)
    if keep_lines:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return "".join(_safe(character, keep_lines) for character in text)


def _safe(character: str, keep_lines: bool) -> str:
    if character in "\n\r\t":
        return character if keep_lines else " "
    if unicodedata.category(character) in ("Cc", "Cs") or character in _TURNS_TEXT:
        return "\ufffd"
    return character


def shorten(text: str, width: int) -> str:
    """``text`` with its middle left out where it is longer than ``width`` characters."""
    if len(text) <= width:
        return text
    head = (width - 1) * 2 // 3
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def plain_data(value: object) -> object:
    """``value`` as JSON data: numpy scalars unwrapped, NaN and infinity as None, other types as text."""
    if isinstance(value, dict) or hasattr(value, "items"):
        return {str(key): plain_data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = sorted(value, key=str) if isinstance(value, (set, frozenset)) else value
        return [plain_data(item) for item in items]
    if hasattr(value, "tolist"):
        return plain_data(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return str(value)
