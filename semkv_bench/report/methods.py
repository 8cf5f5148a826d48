"""Several methods in one report: the table of pairs at equal bits, as text, CSV and LaTeX."""

import csv
import io
from collections.abc import Sequence
from typing import Any

from semkv_bench.report.formatting import (
    DASH,
    bits_text,
    clean,
    fixed,
    interval_words,
    join,
    known,
    p_value,
    plural,
    signed,
    signed_interval,
)
from semkv_bench.report.lookup import cliffs_of
from semkv_bench.report.tables import Column, Table, table_of, with_interval
from semkv_bench.stats.further import MethodPair, MethodPoint
from semkv_bench.stats.result import Cliff, Report

__all__ = ["METHOD_FILES", "method_files", "method_parts", "unit_words"]

METHOD_FILES = ("methods.csv", "methods.tex")

_PAIRS = (
    Column("bits", lambda row: bits_text(row.bits), keep=True),
    Column("first", lambda row: clean(row.first), numeric=False, keep=True),
    Column("second", lambda row: clean(row.second), numeric=False, keep=True),
    Column("finding", lambda row: row.verdict, numeric=False, keep=True),
    Column("score of the first", lambda row: fixed(row.first_score), short="1st"),
    Column("score of the second", lambda row: fixed(row.second_score), short="2nd"),
    Column(
        "difference [interval]", lambda row: with_interval(signed(row.diff), signed_interval(row.diff_ci))
    ),
    Column("interval over all pairs", lambda row: signed_interval(row.diff_ci_all), detail=True),
    Column("p different", lambda row: p_value(row.p_difference), short="p diff."),
    Column("p within margin", lambda row: p_value(row.p_equivalence), short="p within", detail=True),
)


def unit_words(priced_by: str) -> str:
    """What bits are counted over, in words."""
    return (
        "bits per value of the whole cache" if priced_by == "cache_bits" else "effective bits per coded value"
    )


def method_parts(report: Report) -> tuple[str, str, tuple[tuple[str, Table], ...]]:
    """What was found, how to read it, and tables: cliffs, scores at equal bits, every pair of methods."""
    found = report.methods
    unit = unit_words(found.priced_by)
    decided = sum(row.verdict in ("first is better", "second is better") for row in found.pairs)
    alike = sum(row.verdict == "alike within the margin" for row in found.pairs)
    finding = (
        f"{plural(len(found.pairs), 'pair')} at equal bits: {decided} shown to differ, {alike} alike within the "
        f"margin, {len(found.pairs) - decided - alike} not decided."
        if found.pairs
        else f"No two methods reach the same of {join([bits_text(bits) for bits in found.at_bits])} bits."
    )
    note = (
        f"Bits are {unit}. At given bits a method scores, example by example, what the line between the neighbouring "
        "points of its own grid says; a method whose grid does not reach there has no entry. p-values are "
        "Holm-adjusted over all pairs at all bits, the interval over all pairs is Bonferroni's; the other interval is "
        f"of a pair by itself. On the front of score and bits: {join([clean(name) for name in found.front])}."
    )
    tables = [("Cliff of each method", table_of(_cliff_rows(report), _CLIFFS))]
    tables.append(
        (f"Score at equal bits ({unit})", table_of(_by_method(report), _score_columns(found.at_bits)))
    )
    if found.pairs:
        tables.append(("Pairs of methods", table_of(found.pairs, _PAIRS)))
    return finding, note, tuple(tables)


_CLIFFS = (
    Column("method", lambda row: clean(row[0]), numeric=False, keep=True),
    Column("cliff", lambda row: row[1].status.replace("_", " "), numeric=False),
    Column("code bits", lambda row: interval_words(row[1].lower_bits, row[1].upper_bits), numeric=False),
    Column("collapses", lambda row: _priced(row[1].lower_setting, row[2]), numeric=False),
    Column("holds", lambda row: _priced(row[1].upper_setting, row[3]), numeric=False),
)


def _cliff_rows(report: Report) -> list[tuple[str, Cliff, Any, Any]]:
    rows = {row.setting: row for row in report.settings}
    return [
        (method, cliff, rows.get(cliff.lower_setting), rows.get(cliff.upper_setting))
        for method, cliff in cliffs_of(report)
        if method
    ]


def _priced(name: str | None, row: Any) -> str:
    """A setting with the bits of its whole cache, or else of a coded value."""
    if name is None or row is None:
        return DASH
    bits = row.paid_bits
    return clean(name) + (f" at {bits_text(bits)} bits" if known(bits) else "")


def _by_method(report: Report) -> list[tuple[str, dict[float, MethodPoint]]]:
    found = report.methods
    return [
        (method, {point.bits: point for point in found.points if point.method == method})
        for method in found.methods
    ]


def _score_columns(at_bits: Sequence[float]) -> tuple[Column, ...]:
    def score(bits: float) -> Any:
        return lambda row: fixed(row[1][bits].score) if bits in row[1] else DASH

    return (
        Column("method", lambda row: clean(row[0]), numeric=False, keep=True),
        *(Column(bits_text(bits), score(bits)) for bits in at_bits),
        Column(
            "grid reaches",
            lambda row: next(
                (f"{bits_text(at.least_bits)} to {bits_text(at.most_bits)}" for at in row[1].values()), DASH
            ),
            numeric=False,
        ),
    )


_FIELDS = (
    "bits", "first", "second", "n_clusters", "first_score", "second_score", "diff", "diff_low", "diff_high",
    "diff_low_all", "diff_high_all", "p_difference", "p_difference_raw", "p_equivalence", "p_equivalence_raw",
    "verdict",
)  # fmt: skip


def method_files(report: Report) -> dict[str, bytes]:
    """``methods.csv`` and ``methods.tex``, every pair of methods at every number of bits; none where there is none."""
    found = report.methods
    if found is None or not found.pairs:
        return {}
    return {"methods.csv": _csv(found.pairs), "methods.tex": _latex(report)}


def _csv(pairs: Sequence[MethodPair]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_FIELDS)
    for row in pairs:
        ends = {"diff_low": row.diff_ci[0], "diff_high": row.diff_ci[1]}
        ends |= {"diff_low_all": row.diff_ci_all[0], "diff_high_all": row.diff_ci_all[1]}
        values = [ends[name] if name in ends else getattr(row, name) for name in _FIELDS]
        writer.writerow(["" if value is None else value for value in values])
    return text.getvalue().encode()


_TEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"} | {
    sign: f"\\{sign}" for sign in "&%$#_{}"
}


def _tex(text: str) -> str:
    return "".join(_TEX.get(sign, sign) for sign in text)


def _latex(report: Report) -> bytes:
    """A table for ``booktabs``; it says its own unit, margin and adjustment."""
    found = report.methods
    lines = [
        f"% {unit_words(found.priced_by)}; guarded paired intervals, each of a pair by itself; p Holm-adjusted over "
        f"{len(found.pairs)} comparisons; margin {report.margin:g}, alpha {report.alpha:g}, "
        f"{report.n_clusters} clusters",
        r"\begin{tabular}{rllrrrrl}",
        r"\toprule",
        r"bits & first & second & first & second & difference & $p$ & finding \\",
        r"\midrule",
    ]
    for before, row in zip((None, *found.pairs), found.pairs, strict=False):
        if before is not None and before.bits != row.bits:
            lines.append(r"\midrule")
        low, high = row.diff_ci
        interval = "" if low is None or high is None else f" [{low:+.3f}, {high:+.3f}]"
        difference = "" if row.diff is None else f"${row.diff:+.3f}$" + interval.replace("-", "$-$")
        cells = [
            f"{row.bits:g}",
            _tex(row.first),
            _tex(row.second),
            *("" if score is None else f"{score:.3f}" for score in (row.first_score, row.second_score)),
            difference,
            p_value(row.p_difference).replace("<", "$<$"),
            row.verdict,
        ]
        lines.append(" & ".join(cells) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""]).encode()
