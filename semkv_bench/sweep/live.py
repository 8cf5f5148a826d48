"""How a running sweep stands: scores so far by setting, and which settings are still open. No verdicts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from semkv_bench.console import Progressing
from semkv_bench.records.folder import RunFolder
from semkv_bench.records.schema import REFERENCE

__all__ = ["Standing", "live"]

_ABOVE, _BELOW, _OPEN = "within the margin", "below the margin", "open"
_SHOWN_IN_A_LINE = 4
_LEAST = 10


@dataclass
class _Sums:
    """Running sums of a setting: answers, scores, differences from the reference and their squares."""

    answers: int = 0
    score: float = 0.0
    pairs: int = 0
    difference: float = 0.0
    squares: float = 0.0


class Standing:
    """Sums over the records that were seen, a few numbers a setting; what they say is no verdict.

    The interval is that of the mean difference over answers, one more pair at each end of the scale added, without
    regard to tasks, clusters and how often one has looked.
    """

    def __init__(self, settings: Sequence[str], margin: float, alpha: float) -> None:
        self.margin = margin
        self._width = _normal_quantile(1 - alpha)
        self._sums = {name: _Sums() for name in settings}

    def add(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Take in the records of one example, each of them once."""
        references = {record["turn"]: record["score"] for record in records if record["setting"] == REFERENCE}
        for record in records:
            sums = self._sums.get(record["setting"])
            if sums is None or record["score"] is None:
                continue
            sums.answers += 1
            sums.score += record["score"]
            if (reference := references.get(record["turn"])) is not None:
                difference = record["score"] - reference
                sums.pairs += 1
                sums.difference += difference
                sums.squares += difference * difference

    def difference(self, setting: str) -> tuple[float, float] | None:
        """Mean difference from the reference and half the width of its interval; None without pairs."""
        sums = self._sums[setting]
        if not sums.pairs:
            return None
        n = sums.pairs + 2
        mean = sums.difference / n
        spread = max(0.0, (sums.squares + 2) / n - mean * mean)
        return sums.difference / sums.pairs, self._width * math.sqrt(spread / n)

    def word(self, setting: str) -> str:
        """Where the interval lies by now."""
        found = self.difference(setting)
        if found is None or self._sums[setting].pairs < _LEAST:
            return _OPEN
        mean, half = found
        return _ABOVE if mean - half > -self.margin else _BELOW if mean + half < -self.margin else _OPEN

    @property
    def compared(self) -> list[str]:
        """The settings but for the reference."""
        return [name for name in self._sums if name != REFERENCE]

    @property
    def open(self) -> list[str]:
        """Settings of which the scores so far leave open whether they lose more than the margin."""
        return [name for name in self.compared if self.word(name) == _OPEN]

    def line(self) -> str:
        """The same in a line: scores of a few settings, those that are open first."""
        if not self._sums.get(REFERENCE, _Sums()).answers:
            return ""
        still = self.open
        first = [REFERENCE, *still, *(name for name in self.compared if name not in still)][
            : 1 + _SHOWN_IN_A_LINE
        ]
        scores = ", ".join(f"{name} {self._score(name)}" for name in first)
        more = len(self._sums) - len(first)
        left = f" and {more} more" if more > 0 else ""
        return f"so far {scores}{left}; {len(still)} of {len(self.compared)} settings open"

    def table(self, rows: int) -> Table:
        """Scores so far of at most ``rows`` settings, those that are open first."""
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("so far", overflow="fold")
        for title in ("score", "from full", "+/-"):
            table.add_column(title, justify="right", no_wrap=True)
        table.add_column("")
        still = self.open
        others = [name for name in self.compared if name not in still]
        shown = [REFERENCE, *still, *others][: max(2, rows)]
        for name in [name for name in self._sums if name in shown]:
            found = None if name == REFERENCE else self.difference(name)
            cells = ("", "") if found is None else (f"{found[0]:+.3f}", f"{found[1]:.3f}")
            word = "" if name == REFERENCE else self.word(name)
            table.add_row(
                Text(name), self._score(name), *cells, Text(word, style="" if word == _OPEN else "dim")
            )
        left = len(self._sums) - len(shown)
        words = f"{len(still)} of {len(self.compared)} settings open" + (
            f", {left} not shown" if left > 0 else ""
        )
        table.add_row(Text(words, style="dim"))
        return table

    def _score(self, setting: str) -> str:
        sums = self._sums[setting]
        return f"{sums.score / sums.answers:.3f}" if sums.answers else "-"


def live(folder: RunFolder) -> Progressing:
    """What a progress display says of a run: of all that it holds, and of what is added."""
    stats = folder.charter["stats"]
    standing = Standing(list(folder.charter["settings"]), stats["margin"], stats["alpha"])
    folder.watch(standing.add)
    return Progressing(standing.line, standing.table)


def _normal_quantile(p: float) -> float:
    from statistics import NormalDist

    return NormalDist().inv_cdf(p)
