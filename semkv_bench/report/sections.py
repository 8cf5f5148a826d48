"""Parts of a report beyond the grid: what is left above the cliff, mixes, metrics, deletion, turns."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from semkv_bench.report.examples import Example
from semkv_bench.report.formatting import (
    DASH,
    clean,
    cliff_text,
    first_names,
    fixed,
    interval,
    join,
    known,
    p_value,
    percent,
    plural,
    signed,
    signed_interval,
)
from semkv_bench.report.lookup import ordered_settings
from semkv_bench.report.methods import method_parts
from semkv_bench.report.plot_style import Drawn
from semkv_bench.report.tables import Column, Table, table_of, with_interval
from semkv_bench.stats.further import Ranking, Turn, TurnDrift
from semkv_bench.stats.result import LengthResult, Report

__all__ = ["Section", "sections"]

_MOST_NAMED = 3


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


def sections(report: Report) -> list[Section]:
    """The sections that ``report`` has numbers for, in reading order."""
    made = (
        _texts(report),
        _methods(report),
        _residual(report),
        _interpolation(report),
        _rankings(report),
        _deletion(report),
        _depths(report),
        _lengths(report),
        _turns(report),
    )
    return [section for section in made if section is not None]


_TEXT = (
    Column("setting", lambda row: clean(row.setting), numeric=False, keep=True),
    Column(
        "perplexity [interval]",
        lambda row: with_interval(fixed(row.perplexity), interval(row.perplexity_ci)),
        short="perplexity",
        keep=True,
    ),
    Column("times full's [interval]", lambda row: with_interval(fixed(row.ratio), interval(row.ratio_ci))),
    Column("KL [interval]", lambda row: with_interval(fixed(row.kl), interval(row.kl_ci))),
    Column(
        "top-1 agreement [interval]",
        lambda row: with_interval(fixed(row.top1_agreement), interval(row.top1_agreement_ci)),
        short="top-1",
    ),
    Column("windows", lambda row: str(row.n_windows), detail=True),
)


def _texts(report: Report) -> Section | None:
    if not report.texts:
        return None
    how = (
        "Every token attended to coded keys and values within one pass"
        if report.protocol == "through"
        else "The tokens before were read in full precision, then coded"
    )
    return Section(
        "text",
        "Perplexity, KL divergence and top-1 agreement",
        f"{plural(report.texts[0].n_windows, 'window')} of text under protocol {report.protocol}.",
        note=f"{how}; numbers of another protocol are no comparison. KL is in nats per token, from full precision. "
        "Intervals are percentile bootstraps over windows, as if windows were independent, which neighbours in a "
        "text are not quite; each is of a setting by itself. Verdicts are by top-1 agreement alone, of which full "
        "precision has 1 by definition.",
        tables=(("", table_of(report.texts, _TEXT)),),
    )


def _methods(report: Report) -> Section | None:
    if report.methods is None:
        return None
    finding, note, tables = method_parts(report)
    return Section("methods", "Method against method", finding, note=note, tables=tables)


def _difference(row: Any) -> str:
    return with_interval(signed(row.diff), signed_interval(row.diff_ci))


_NAME = Column("setting", lambda row: clean(row.setting), numeric=False)
_VERDICT = Column("finding", lambda row: row.verdict, numeric=False, keep=True)
_DIFFERENCE = Column("difference [interval]", _difference)
_P_ALIKE = Column("p within margin", lambda row: p_value(row.p_equivalence), short="p within", detail=True)
_P_DIFFERENT = Column("p different", lambda row: p_value(row.p_difference), short="p diff.")

_LINE = (
    _NAME,
    _VERDICT,
    Column("effective bits", lambda row: fixed(row.effective_bits), optional=True, short="eff. bits"),
    Column("score", lambda row: fixed(row.score)),
    Column("line", lambda row: fixed(row.line)),
    _DIFFERENCE,
    _P_ALIKE,
    _P_DIFFERENT,
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
    _VERDICT,
    Column("bits of the deleted", lambda row: fixed(_paid(row)), short="its bits"),
    Column("bits of the retained", lambda row: fixed(_paid(row, "against_")), short="kept bits"),
    Column("score of the deleted", lambda row: fixed(row.score), short="its score"),
    Column("score of the retained", lambda row: fixed(row.against_score), short="kept score"),
    _DIFFERENCE,
    _P_ALIKE,
    _P_DIFFERENT,
)


def _interpolation(report: Report) -> Section | None:
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
        _verdict_counts(
            rows, ("on the line", "above the line", "below the line", "not decided"), "mix", "mixes"
        ),
        note,
        tables=(("", table_of(rows, _LINE)),),
    )


def _verdict_counts(rows: Sequence[Any], verdicts: tuple[str, ...], one: str, many: str) -> str:
    """How many rows there are of each verdict, as a sentence."""
    found = [(verdict, [row for row in rows if row.verdict == verdict]) for verdict in verdicts]
    words = [f"{verdict} {len(some)}" for verdict, some in found if some]
    return f"{plural(len(rows), one) if len(rows) == 1 else f'{len(rows)} {many}'}: {', '.join(words)}."


def _rankings(report: Report) -> Section | None:
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


def _deletion(report: Report) -> Section | None:
    rows = report.deletion
    if not rows:
        return None
    matched = [row for row in rows if row.against]
    verdicts = ("deletion loses more", "deletion loses less", "alike within the margin", "not decided")
    finding = _verdict_counts(matched, verdicts, "comparison", "comparisons")
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


_PLACE = (
    _NAME,
    Column("cache bits", lambda row: fixed(row.cache_bits), optional=True),
)


def _depths(report: Report) -> Section | None:
    if not report.depths:
        return None
    rows = [row for row in report.settings if any(row.setting in found for found in report.depths.values())]
    counts = [max(each.n_clusters or 0 for each in found.values()) for found in report.depths.values()]
    places = [f"{plural(n, 'cluster')} in the {name}" for n, name in zip(counts, report.depths, strict=True)]

    def at(depth: str) -> Column:
        found = report.depths[depth]
        return Column(
            f"{depth} [interval of the difference]",
            lambda row: _at_depth(found.get(row.setting)),
            short=depth,
            keep=True,
        )

    return Section(
        "depths",
        "Scores by needle depth",
        f"{join(places, 'and')}.",
        note="Where the needles asked for stand in the haystack, by their mean depth, all tasks together. Intervals "
        "are of the difference from full precision, each by itself.",
        tables=(("", table_of(rows, (*_PLACE, *map(at, report.depths)))),),
    )


def _at_depth(found: Any) -> str:
    return DASH if found is None else with_interval(fixed(found.score), signed_interval(found.diff_ci))


_BY_LENGTH = (
    Column("tokens", lambda row: f"{row.length:,}", keep=True),
    Column("clusters", lambda row: str(row.n_clusters)),
    Column(
        "cliff, code bits",
        lambda row: cliff_text(row.cliff.status, row.cliff.lower_bits, row.cliff.upper_bits),
        numeric=False,
        short="cliff",
        keep=True,
    ),
    Column(
        "operating point",
        lambda row: clean(row.operating_point) if row.operating_point else "none shown",
        numeric=False,
        keep=True,
    ),
    Column("its whole cache, bits", lambda row: fixed(row.cache_bits), optional=True, short="cache bits"),
)


def _lengths(report: Report) -> Section | None:
    if not report.lengths:
        return None
    trends = {trend.setting: trend for trend in report.length_trend}
    rows = [row for row in report.settings if any(row.setting in each.settings for each in report.lengths)]
    steeper = [t for t in report.length_trend if t.p is not None and t.p < report.alpha and t.slope < 0]
    finding = (
        f"{_setting_names(steeper)} {'loses' if len(steeper) == 1 else 'lose'} more as prompts grow."
        if steeper
        else "No setting is shown to lose more as prompts grow."
    )

    def at(found: LengthResult) -> Column:
        return Column(
            f"{found.length:,} tokens",
            lambda row: _of_length(found.settings.get(row.setting), row.setting == report.reference),
            keep=True,
        )

    return Section(
        "lengths",
        "By length of the prompt",
        finding,
        note="Cliff and operating point of every length are those of its examples alone, as a run of that length would "
        "report them: no alpha is shared between lengths. The trend is the change of the difference from full "
        "precision with every doubling of the length, by least squares with a level for each task; p-values are "
        "Holm-adjusted over the settings. Full precision's own scores stand in its row.",
        tables=(
            ("Cliff and operating point", table_of(report.lengths, _BY_LENGTH)),
            (
                "Difference from full precision",
                table_of(
                    rows,
                    (
                        _NAME,
                        *map(at, report.lengths),
                        Column(
                            "per doubling [interval]",
                            lambda row: _trend(trends.get(row.setting)),
                            short="per doubling",
                        ),
                        Column(
                            "p of the trend",
                            lambda row: p_value(trends[row.setting].p) if row.setting in trends else DASH,
                            short="p",
                        ),
                    ),
                ),
            ),
        ),
    )


def _of_length(found: Any, reference: bool) -> str:
    if found is None:
        return DASH
    return (
        fixed(found.score) if reference else with_interval(signed(found.diff), signed_interval(found.diff_ci))
    )


def _trend(trend: Any) -> str:
    if trend is None or trend.slope is None:
        return DASH
    return with_interval(signed(trend.slope), signed_interval(trend.slope_ci))


_LEFT = (
    _NAME,
    Column("residual", lambda row: row.residual, numeric=False, keep=True),
    _DIFFERENCE,
    Column(
        "drop that would have shown", lambda row: fixed(row.detectable_drop), short="drop seen", keep=True
    ),
    Column("p different", lambda row: p_value(row.p_difference), short="p diff."),
)


def _residual(report: Report) -> Section | None:
    rows = [row for row in ordered_settings(report) if row.residual]
    if not rows:
        return None
    floor = [row for row in rows if row.residual == "floor"]
    if floor:
        finding = f"Detectably below full: {_setting_names(floor)}."
    else:
        finding = f"Of {plural(len(rows), 'setting')} above the cliff, none is detectably below full."
    drops = [row.detectable_drop for row in rows]
    if all(known(drop) for drop in drops):
        ends = dict.fromkeys((fixed(min(drops)), fixed(max(drops))))
        finding += f" A drop of {join(list(ends), 'to')} would have shown with a chance of 80%."
    note = (
        "Above the cliff a small loss may be left, the floor. Not detected does not mean absent: the drop that "
        "would have shown is the smallest average loss that this sample, with its paired spread, detects four "
        "times in five (guarded, two-sided, not adjusted); losses below it go unseen."
    )
    return Section(
        "residual", "What is left above the cliff", finding, note, tables=(("", table_of(rows, _LEFT)),)
    )


def _setting_names(rows: Sequence[Any]) -> str:
    return first_names([row.setting for row in rows])


def _turns(report: Report) -> Section | None:
    turns = report.turns
    if not turns:
        return None
    names = [row.setting for row in ordered_settings(report)]
    drift = {row.setting: row for row in report.turn_drift}
    rows = [_TurnRow(name, drift.get(name)) for name in names]
    worse = [row for row in drift.values() if row.p < report.alpha and row.diff < 0]
    better = [row for row in drift.values() if row.p < report.alpha and row.diff > 0]
    found = [
        f"{_setting_names(some)} {'loses' if len(some) == 1 else 'lose'} {how} in the last turn than in the first"
        for some, how in ((worse, "more"), (better, "less"))
        if some
    ]
    finding = "; ".join(found) or "No setting is shown to lose more in the last turn than in the first"
    note = (
        "Turns are counted from 1 here and from 0 in records. Behind the score of a turn stands its difference "
        "from full precision in the same turn. The change is the difference in the last turn less that in the "
        "first, conversation by conversation, p Holm-adjusted over the settings."
    )
    columns = (_NAME, *(_turn_column(turn) for turn in turns), *_DRIFT)
    tables = [("", table_of(rows, columns))]
    if any(result.coded_share is not None for turn in turns for result in turn.settings.values()):
        shares = (_NAME, *(_share_column(turn) for turn in turns))
        tables.append(("Share of the cache that was coded", table_of(rows, shares)))
    return Section("turns", "Turn by turn", f"{finding}.", note, tables=tuple(tables))


@dataclass(frozen=True)
class _TurnRow:
    setting: str
    drift: TurnDrift | None


_DRIFT = (
    Column("change [interval]", lambda row: _difference(row.drift) if row.drift else DASH),
    Column("p change", lambda row: p_value(row.drift.p) if row.drift else DASH),
)


def _turn_column(turn: Turn) -> Column:
    def cell(row: _TurnRow) -> str:
        result = turn.settings.get(row.setting)
        if result is None:
            return DASH
        diff = f" ({signed(result.diff)})" if known(result.diff) else ""
        return f"{fixed(result.score)}{diff}"

    return Column(f"turn {turn.turn + 1}", cell)


def _share_column(turn: Turn) -> Column:
    def cell(row: _TurnRow) -> str:
        result = turn.settings.get(row.setting)
        return percent(result and result.coded_share)

    return Column(f"turn {turn.turn + 1}", cell)
