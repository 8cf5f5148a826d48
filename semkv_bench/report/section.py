"""A section of a report, and the columns and words that several sections share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from semkv_bench.report.examples import Example
from semkv_bench.report.formatting import (
    clean,
    first_names,
    p_value,
    plural,
    signed,
    signed_interval,
)
from semkv_bench.report.plot_style import Drawn
from semkv_bench.report.tables import Column, Table, with_interval

__all__ = [
    "DIFFERENCE",
    "NAME",
    "P_ALIKE",
    "P_DIFFERENT",
    "VERDICT",
    "Section",
    "difference",
    "setting_names",
    "verdict_counts",
]


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it, each part where there is something to say.

    ``finding`` is what was found in words, ``note`` how to read it, ``points`` single statements, ``terms`` pairs of
    a name and its words, ``texts`` pairs of a heading and a long text. A ``folded`` section is opened by who wants
    it and is not printed.
    """

    name: str
    title: str
    finding: str = ""
    note: str = ""
    points: tuple[str, ...] = ()
    tables: tuple[tuple[str, Table], ...] = ()
    figures: tuple[Drawn, ...] = ()
    examples: tuple[Example, ...] = ()
    terms: tuple[tuple[str, str], ...] = ()
    texts: tuple[tuple[str, str], ...] = ()
    folded: bool = False

    @property
    def empty(self) -> bool:
        """Is there nothing under the heading?"""
        return not (self.points or self.tables or self.figures or self.examples or self.terms or self.texts)


def difference(row: Any) -> str:
    """The paired difference of a row with its interval."""
    return with_interval(signed(row.diff), signed_interval(row.diff_ci))


NAME = Column("setting", lambda row: clean(row.setting), numeric=False)
VERDICT = Column("finding", lambda row: row.verdict, numeric=False, keep=True)
DIFFERENCE = Column("difference [interval]", difference)
P_ALIKE = Column("p within margin", lambda row: p_value(row.p_equivalence), short="p within", detail=True)
P_DIFFERENT = Column("p different", lambda row: p_value(row.p_difference), short="p diff.")


def verdict_counts(rows: Sequence[Any], verdicts: tuple[str, ...], one: str, many: str) -> str:
    """How many rows there are of each verdict, as a sentence."""
    found = [(verdict, [row for row in rows if row.verdict == verdict]) for verdict in verdicts]
    words = [f"{verdict} {len(some)}" for verdict, some in found if some]
    return f"{plural(len(rows), one) if len(rows) == 1 else f'{len(rows)} {many}'}: {', '.join(words)}."


def setting_names(rows: Sequence[Any]) -> str:
    """The first settings of ``rows``, as words."""
    return first_names([row.setting for row in rows])
