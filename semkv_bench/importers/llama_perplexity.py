"""What ``llama-perplexity --kl-divergence`` prints: running means of KL and of the share of equal top tokens."""

import math
import re
from pathlib import Path

from semkv_bench.errors import UsageError
from semkv_bench.importers.rows import Imported, Options, Row

__all__ = ["looks_like", "read"]

_NUMBER = r"-?(?:\d+\.\d+|nan|inf)"
_PAIR = rf"({_NUMBER})\s*±\s*{_NUMBER}"
# chunk, PPL, ln(PPL(Q)/PPL(base)), KL divergence, Δp RMS in %, same top p in %
_LINE = re.compile(rf"^\s*(\d+)\s+{_PAIR}\s+{_PAIR}\s+{_PAIR}\s+{_PAIR}\s*%\s+{_PAIR}\s*%\s*$")
_TASK = "text"


def looks_like(path: Path) -> bool:
    """Is ``path`` such a text?"""
    if not path.is_file():
        return False
    try:
        return any(_LINE.match(line) for line in path.read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError):
        return False


def read(path: Path, options: Options) -> Imported:
    """Rows of every chunk of the text: the score is the share of tokens whose likeliest next token is the base's.

    The base, whose logits the file was compared with, is ``full``: its share is 1 and its divergence 0. The lines are
    running means of five decimals, from which those of a chunk are taken back; of chunk i this leaves an error of
    about i units of the last decimal.
    """
    if path.is_dir():
        raise UsageError(f"{path} is a folder; give the text that llama-perplexity --kl-divergence printed")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text") from error
    matches = [match for line in text.splitlines() if (match := _LINE.match(line))]
    if not matches:
        raise UsageError(
            f"{path} holds no line of llama-perplexity --kl-divergence (chunk, PPL, KL, same top)"
        )
    rows, bases, before = [], [], (0, 0.0, 0.0)
    for match in matches:
        chunk, divergence, same = int(match[1]), float(match[4]), float(match[6]) / 100
        if chunk != before[0] + 1:
            raise UsageError(
                f"{path}: chunk {chunk} follows chunk {before[0]}; give the text of one run, whole"
            )
        if not (divergence == divergence and same == same):
            raise UsageError(f"{path}: chunk {chunk} is not a number; the cache type broke the model")
        kl = chunk * divergence - before[0] * before[1]
        share = chunk * same - before[0] * before[2]
        rows.append(
            Row(_TASK, f"chunk-{chunk:05d}", _clip(share), kl=max(0.0, kl), top1_agreement=_clip(share))
        )
        bases.append(_base(float(match[2]), float(match[3])))
        before = (chunk, divergence, same)
    reference = [
        Row(row.task, row.example_id, 1.0, kl=0.0, top1_agreement=1.0, nll=base)
        for row, base in zip(rows, bases, strict=True)
    ]
    return Imported(
        rows,
        notes=["the score is the share of tokens whose likeliest next token is the base's"],
        reference_rows=reference,
    )


def _base(perplexity: float, ratio: float) -> float | None:
    """The base's mean negative log likelihood up to a chunk: that of the file less its logarithm of the ratio."""
    return math.log(perplexity) - ratio if 0 < perplexity < math.inf and math.isfinite(ratio) else None


def _clip(share: float) -> float:
    return min(1.0, max(0.0, share))
