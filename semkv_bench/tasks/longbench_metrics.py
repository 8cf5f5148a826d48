"""LongBench's metrics (Bai et al., 2024), each a score from 0 to 1 for one prediction and one reference."""

import difflib
import functools
import logging
import re
import string
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from types import ModuleType

from rouge import Rouge

__all__ = [
    "chinese_f1",
    "chinese_rouge_l",
    "classification",
    "code_similarity",
    "number_share",
    "paragraph_share",
    "rouge_l",
    "word_f1",
]

_ASCII_PUNCTUATION = set(string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
# Full-width forms, CJK and general punctuation that the benchmark drops; opening angle brackets are not
# among them.
_CHINESE_RANGES = (
    (0xFF01, 0xFF0D), (0xFF0F, 0xFF0F), (0xFF1A, 0xFF20), (0xFF3B, 0xFF40), (0xFF5B, 0xFF64),
    (0x3001, 0x3003), (0x300B, 0x3011), (0x3014, 0x301F), (0x3030, 0x3030), (0x303E, 0x303F),
    (0x2013, 0x2014), (0x2018, 0x2019), (0x201B, 0x201F), (0x2026, 0x2027), (0xFE4F, 0xFE4F),
)  # fmt: skip
_CHINESE_PUNCTUATION = _ASCII_PUNCTUATION | {
    chr(code) for first, last in _CHINESE_RANGES for code in range(first, last + 1)
}

Metric = Callable[[str, str, Sequence[str] | None], float]


def word_f1(prediction: str, reference: str, all_classes: Sequence[str] | None = None) -> float:
    """F1 over words, without case, punctuation and English articles."""
    return _f1(_english_words(prediction), _english_words(reference))


def chinese_f1(prediction: str, reference: str, all_classes: Sequence[str] | None = None) -> float:
    """F1 over jieba's words, without case, punctuation and spaces."""
    return _f1(_chinese_words(prediction), _chinese_words(reference))


def rouge_l(prediction: str, reference: str, all_classes: Sequence[str] | None = None) -> float:
    """ROUGE-L F of the ``rouge`` package; 0 where it raises, as for empty text and for "."."""
    rouge = Rouge(metrics=["rouge-l"], stats=["f"])
    limit = sys.getrecursionlimit()
    # The package recurses once a word; counting from here keeps the score free of the caller's depth.
    sys.setrecursionlimit(limit + _stack_depth())
    try:
        return rouge.get_scores([prediction], [reference])[0]["rouge-l"]["f"]
    except (ValueError, RecursionError):
        return 0.0
    finally:
        sys.setrecursionlimit(limit)


def chinese_rouge_l(prediction: str, reference: str, all_classes: Sequence[str] | None = None) -> float:
    """ROUGE-L F over jieba's words."""
    cut = _jieba().lcut
    return rouge_l(" ".join(cut(prediction)), " ".join(cut(reference)))


def classification(prediction: str, reference: str, all_classes: Sequence[str] | None = None) -> float:
    """1 over the number of class names in the prediction if the right one is among them, else 0.

    Names that are a part of the right one do not count, save for one that follows such a part in the list:
    the benchmark skips it, and scores must be comparable.
    """
    found = [name for name in all_classes or () if name in prediction]
    i = 0
    while i < len(found):
        if found[i] in reference and found[i] != reference:
            del found[i]
        i += 1
    return 1.0 / len(found) if reference in found else 0.0


def paragraph_share(prediction: str, reference: str, all_classes: Sequence[str] | None = None) -> float:
    """Share of the numbers in the prediction that are the reference's paragraph number."""
    return number_share(prediction, paragraph_number(reference) or "")


def paragraph_number(reference: str) -> str | None:
    """The number in "Paragraph 3" or "段落3", None where there is none."""
    match = re.search(r"(?:Paragraph |段落)(\d+)", reference)
    return match and match.group(1)


def number_share(prediction: str, reference: str, all_classes: Sequence[str] | None = None) -> float:
    """Share of the numbers in the prediction that equal the reference, 0 without numbers."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(reference) / len(numbers) if numbers else 0.0


def code_similarity(prediction: str, reference: str, all_classes: Sequence[str] | None = None) -> float:
    """difflib's ratio of the first line that holds no comment or code fence, rounded to a whole per cent."""
    lines = prediction.lstrip("\n").split("\n")
    code = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(100 * difflib.SequenceMatcher(None, code, reference).ratio()) / 100


def _f1(prediction: list[str], reference: list[str]) -> float:
    common = (Counter(prediction) & Counter(reference)).total()
    return 2 * common / (len(prediction) + len(reference)) if common else 0.0


def _english_words(text: str) -> list[str]:
    bare = "".join(ch for ch in text.lower() if ch not in _ASCII_PUNCTUATION)
    return _ARTICLES.sub(" ", bare).split()


def _chinese_words(text: str) -> list[str]:
    bare = ("".join(ch for ch in w.lower() if ch not in _CHINESE_PUNCTUATION) for w in _jieba().cut(text))
    return [word for w in bare if (word := "".join(w.split()))]


@functools.cache
def _jieba() -> ModuleType:
    """jieba, without its import warnings and its notes on building a dictionary."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import jieba
    jieba.setLogLevel(logging.CRITICAL)
    return jieba


def _stack_depth() -> int:
    depth, frame = 0, sys._getframe()
    while frame is not None:
        depth, frame = depth + 1, frame.f_back
    return depth
