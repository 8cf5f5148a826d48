"""Stock scorers of short answers, by name: each a score from 0 to 1 of one prediction against one reference."""

import re
import unicodedata
from collections.abc import Callable, Sequence

from semkv_bench.errors import UsageError
from semkv_bench.tasks.longbench_metrics import rouge_l, word_f1

__all__ = ["SCORERS", "Scorer", "chosen_first", "last_number"]

Scorer = Callable[[str, str, Sequence[str]], float]

# Digits with separators of thousands or a decimal point; a comma before three digits separates.
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:[, \u00a0\u202f_]\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?")
_CLOSE = 1e-6


def _normal_text(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def exact(prediction: str, reference: str, choices: Sequence[str]) -> float:
    """1 where the whole prediction is the reference, but for case, width, white space and a full stop at its end."""
    return float(_normal_text(prediction).rstrip(".") == _normal_text(reference).rstrip("."))


def contains(prediction: str, reference: str, choices: Sequence[str]) -> float:
    """1 where the reference stands in the prediction and not as a part of a longer word or number."""
    wanted = re.escape(_normal_text(reference))
    return float(re.search(rf"(?<!\w){wanted}(?!\w)", _normal_text(prediction)) is not None)


def f1(prediction: str, reference: str, choices: Sequence[str]) -> float:
    """F1 over words, without case, punctuation and English articles."""
    return word_f1(prediction, reference)


def rouge(prediction: str, reference: str, choices: Sequence[str]) -> float:
    """ROUGE-L F."""
    return rouge_l(prediction, reference)


def choice(prediction: str, reference: str, choices: Sequence[str]) -> float:
    """1 where the choice that the prediction names first is the reference."""
    return float(chosen_first(prediction, choices) == reference)


def numeric(prediction: str, reference: str, choices: Sequence[str]) -> float:
    """1 where the last number of the prediction equals the reference's, whatever separates its thousands."""
    wanted, found = last_number(reference), last_number(prediction)
    if wanted is None or found is None:
        return 0.0
    return float(abs(found - wanted) <= _CLOSE * max(1.0, abs(wanted)))


def regex(prediction: str, reference: str, choices: Sequence[str]) -> float:
    """1 where the reference, a regular expression, is found in the prediction."""
    return float(re.search(reference, prediction) is not None)


SCORERS: dict[str, Scorer] = {
    "exact": exact,
    "contains": contains,
    "f1": f1,
    "rouge_l": rouge,
    "choice": choice,
    "numeric": numeric,
    "regex": regex,
}


def chosen_first(prediction: str, choices: Sequence[str]) -> str | None:
    """The choice that stands first in ``prediction``, of two at one place the longer one; None where none does."""
    text = _normal_text(prediction)
    places = []
    for option in choices:
        match = re.search(rf"(?<!\w){re.escape(_normal_text(option))}(?!\w)", text)
        if match:
            places.append((match.start(), -len(option), option))
    return min(places)[2] if places else None


def last_number(text: str) -> float | None:
    """The last number in ``text``, full-width digits included; None where there is none."""
    numbers = _NUMBER.findall(unicodedata.normalize("NFKC", text))
    if not numbers:
        return None
    return float(re.sub(r"[, \u00a0\u202f_](?=\d{3})", "", numbers[-1]))


def check_references(scorer: str, references: Sequence[str], choices: Sequence[str], where: str) -> None:
    """Raise UsageError for references that ``scorer`` could never match."""
    for reference in references:
        if scorer == "regex":
            try:
                re.compile(reference)
            except re.error as error:
                raise UsageError(f"{where}: {reference!r} is no regular expression ({error})") from error
        if scorer == "numeric" and last_number(reference) is None:
            raise UsageError(
                f"{where}: the answer {reference!r} holds no number, which task.scorer=numeric needs"
            )
        if scorer == "choice" and reference not in choices:
            raise UsageError(f"{where}: the answer {reference!r} is none of its choices")
