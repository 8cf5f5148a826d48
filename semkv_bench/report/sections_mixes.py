"""Sections on mixes against the line between their ends, on metrics ranked, and on deletion against retention."""

from typing import Any

from semkv_bench.report.formatting import (
    DASH,
    clean,
    first_names,
    fixed,
    interval,
    known,
    p_value,
    percent,
    signed,
    signed_interval,
)
from semkv_bench.report.section import (
    DIFFERENCE,
    NAME,
    P_ALIKE,
    P_DIFFERENT,
    VERDICT,
    Section,
    verdict_counts,
)
from semkv_bench.report.tables import Column, table_of, with_interval
from semkv_bench.stats.further import Ranking
from semkv_bench.stats.result import Report

__all__ = ["deletion_section", "interpolation_section", "rankings_section"]

_MOST_NAMED = 3


_LINE = (
    NAME,
    VERDICT,
    Column("effective bits", lambda row: fixed(row.effective_bits), optional=True, short="eff. bits"),
    Column("score", lambda row: fixed(row.score)),
    Column("line", lambda row: fixed(row.line)),
    DIFFERENCE,
    P_ALIKE,
    P_DIFFERENT,
    Column("high end", lambda row: fixed(row.high_score), detail=True),
    Column("low end", lambda row: fixed(row.low_score), detail=True),
    Column(
        "ends differ",
        lambda row: "yes" if row.ends_differ else "not shown",
        numeric=False,
        short="ends differ",
        detail=True,
    ),
)


def _paid(row: Any, of: str = "") -> float | None:
    """Bits of the whole cache where they are known, else the price of a value."""
    whole = getattr(row, f"{of}cache_bits")
    return whole if known(whole) else getattr(row, f"{of}effective_bits")


_RETAINED = (
    Column("deleted", lambda row: clean(row.setting), numeric=False),
    Column("retained", lambda row: clean(row.against) if row.against else DASH, numeric=False),
    VERDICT,
    Column("bits of the deleted", lambda row: fixed(_paid(row)), short="its bits"),
    Column("bits of the retained", lambda row: fixed(_paid(row, "against_")), short="kept bits"),
    Column("score of the deleted", lambda row: fixed(row.score), short="its score"),
    Column("score of the retained", lambda row: fixed(row.against_score), short="kept score"),
    DIFFERENCE,
    P_ALIKE,
    P_DIFFERENT,
)


def interpolation_section(report: Report) -> Section | None:
    """Mixes against the line between their ends; None without mixes."""
    rows = report.interpolation
    if not rows:
        return None
    flat = sum(not row.ends_differ for row in rows)
    note = (
        "A mix keeps a fraction of the tokens at the levels of its high end and the rest at those of its low "
        "end. The line is fraction x score(high end) + (1 - fraction) x score(low end), example by example: "
        "what a mix scores if every token counts the same. Above it, the metric finds the tokens that matter; "
        "below it, the tokens left at few levels do more harm than their share. p-values are Holm-adjusted "
        "over all mixes."
    )
    if flat:
        note += (
            f" Where the ends are not shown to differ ({flat} of {len(rows)}) the line is flat, and being on it "
            "says little."
        )
    return Section(
        "interpolation",
        "Mixes against the line between their ends",
        verdict_counts(
            rows, ("on the line", "above the line", "below the line", "not decided"), "mix", "mixes"
        ),
        note,
        tables=(("", table_of(rows, _LINE)),),
    )


def rankings_section(report: Report) -> Section | None:
    """Importance metrics ranked; None where fewer than two share an allocation."""
    groups = report.rankings
    if not groups:
        return None
    note = (
        "Metrics that share an allocation store the same bits and differ only in which tokens they favour. "
        "p-values are Holm-adjusted over all pairs of the group; metrics that share a letter are not separated, "
        "and the rank is the range of places that the data leave open. Intervals are for one comparison each. "
        "The best is the best of this sample."
    )
    return Section(
        "rankings",
        "Importance metrics ranked",
        " ".join(_group_words(group) for group in groups[:_MOST_NAMED]),
        note,
        tables=tuple(
            (_group_caption(group), table_of(group.metrics, _ranking_columns(group))) for group in groups
        ),
    )


def _group_words(group: Ranking) -> str:
    first = [row for row in group.metrics if row.rank[0] == 1]
    name = clean(group.group)
    if len(first) == len(group.metrics) and all(row.rank[1] == len(first) for row in first):
        return f"{name}: no two of {len(first)} metrics are separated."
    return f"{name}: none is shown to be better than {first_names([row.metric for row in first], last='or')}."


def _group_caption(group: Ranking) -> str:
    bits = group.effective_bits
    price = f", {fixed(bits)} effective bits" if known(bits) else ""
    if group.kind == "prune":
        return f"{clean(group.group)}: {percent(group.keep)} of the tokens kept, the rest deleted{price}"
    return (
        f"{clean(group.group)}: {percent(group.fraction)} of the tokens at {group.high} levels, the rest "
        f"at {group.low}{price}"
    )


def _ranking_columns(group: Ranking) -> tuple[Column, ...]:
    shown = "random" if group.control else "best"

    def against(name: str) -> Column:
        """Difference to the metric or control ``name``, with its interval."""
        return Column(
            f"difference to {'the best' if name == 'best' else name}",
            lambda row: with_interval(
                signed(getattr(row, f"diff_{name}")), signed_interval(getattr(row, f"diff_{name}_ci"))
            ),
            optional=True,
            measured=False,
            short=f"to {name}",
            detail=name != shown,
        )

    def chance(name: str) -> Column:
        """Adjusted p-value of that difference."""
        return Column(
            f"p against {'the best' if name == 'best' else name}",
            lambda row: p_value(getattr(row, f"p_{name}")),
            optional=True,
            measured=False,
            short=f"p {name}",
            detail=name != shown,
        )

    return (
        Column("metric", lambda row: clean(row.metric), numeric=False),
        Column("rank", lambda row: _rank(row.rank), keep=True),
        Column("group", lambda row: row.letters, numeric=False, keep=True),
        Column("score", lambda row: fixed(row.score), keep=True),
        Column("score interval", lambda row: interval(row.score_ci), short="interval", detail=True),
        against("best"),
        chance("best"),
        against("random"),
        chance("random"),
    )


def _rank(ends: list[int]) -> str:
    return str(ends[0]) if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"


def deletion_section(report: Report) -> Section | None:
    """Deletion against coded settings of as many bits; None without deletion."""
    rows = report.deletion
    if not rows:
        return None
    matched = [row for row in rows if row.against]
    verdicts = ("deletion loses more", "deletion loses less", "alike within the margin", "not decided")
    finding = verdict_counts(matched, verdicts, "comparison", "comparisons")
    note = (
        "Deleting tokens and keeping the rest, against keeping all tokens at fewer bits in as much memory or less: the "
        "coded settings nearest in bits from below, of the whole cache where these are recorded, half a percent above "
        "counted as equal. p-values are Holm-adjusted over all comparisons."
    )
    return Section(
        "deletion",
        "Deletion against low-precision retention",
        finding if matched else "No coded setting takes as little memory as the pruned ones.",
        note,
        tables=(("", table_of(rows, _RETAINED)),),
    )
