"""Sections on scores by the place of needles, by the length of prompts, and on prompts that are mistyped."""

from typing import Any

from semkv_bench.report.formatting import (
    DASH,
    clean,
    cliff_text,
    fixed,
    join,
    p_value,
    plural,
    signed,
    signed_interval,
)
from semkv_bench.report.section import NAME, VERDICT, Section, setting_names
from semkv_bench.report.tables import Column, table_of, with_interval
from semkv_bench.stats.result import LengthResult, Report

__all__ = ["depths_section", "lengths_section", "perturbed_section", "places_section"]

_PLACE = (
    NAME,
    Column("cache bits", lambda row: fixed(row.cache_bits), optional=True),
)


def depths_section(report: Report) -> Section | None:
    """Scores by the depth of needles; None without needles."""
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


def _by_length(report: Report) -> tuple[Column, ...]:
    """Columns of the table of lengths: a cliff for every quantizer."""
    main = report.cliff.quantizer or ""
    names = sorted(report.lengths[0].cliffs or [main], key=lambda name: (name != main, name))

    def cliff_of(name: str) -> Column:
        of = f" of {clean(name)}" if len(names) > 1 else ""

        def cell(row: LengthResult) -> str:
            cliff = (row.cliffs or {}).get(name, row.cliff)
            return cliff_text(cliff.status, cliff.lower_bits, cliff.upper_bits)

        return Column(f"cliff{of}, code bits", cell, numeric=False, short=f"cliff{of}", keep=True)

    return (
        Column("tokens", lambda row: f"{row.length:,}", keep=True),
        Column("clusters", lambda row: str(row.n_clusters)),
        *map(cliff_of, names),
        Column(
            "operating point",
            lambda row: clean(row.operating_point) if row.operating_point else "none shown",
            numeric=False,
            keep=True,
        ),
        Column("its whole cache, bits", lambda row: fixed(row.cache_bits), optional=True, short="cache bits"),
    )


def lengths_section(report: Report) -> Section | None:
    """Cliff, operating point and differences by length; None for a single length."""
    if not report.lengths:
        return None
    trends = {trend.setting: trend for trend in report.length_trend}
    rows = [row for row in report.settings if any(row.setting in each.settings for each in report.lengths)]
    steeper = [t for t in report.length_trend if t.p is not None and t.p < report.alpha and t.slope < 0]
    finding = (
        f"{setting_names(steeper)} {'loses' if len(steeper) == 1 else 'lose'} more as prompts grow."
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
        "precision with every doubling of the length, by least squares with a level for each task, p by a "
        "permutation of the lengths too; p-values are Holm-adjusted over the settings. Full "
        "precision's own scores stand in its row.",
        tables=(
            ("Cliff and operating point", table_of(report.lengths, _by_length(report))),
            (
                "Difference from full precision",
                table_of(
                    rows,
                    (
                        NAME,
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


def places_section(report: Report) -> Section | None:
    """Paired loss by length and depth; None for a single length, or without needles."""
    if not report.places:
        return None
    depths = sorted({place.depth for place in report.places})
    at = {(place.length, place.depth): place for place in report.places}
    lengths = sorted({place.length for place in report.places})
    names = [row.setting for row in report.settings if row.setting != report.reference]
    names = [name for name in names if any(name in place.settings for place in report.places)]
    rows = [(name, length) for name in names for length in lengths]

    def part(depth: tuple[float, float]) -> Column:
        def cell(row: tuple[str, int]) -> str:
            place = at.get((row[1], depth))
            return DASH if place is None else _of_length(place.settings.get(row[0]), False)

        return Column(depth_words(depth), cell, keep=True)

    sizes = [place.n_clusters for place in report.places]
    span = (
        plural(min(sizes), "cluster")
        if min(sizes) == max(sizes)
        else f"{min(sizes)} to {max(sizes)} clusters"
    )
    return Section(
        "places",
        "Loss by length and needle depth",
        f"{span} in a cell.",
        note="Difference from full precision on the same prompts, by their length and by the fifth of the haystack "
        "that the needles asked for stand in, on average. Intervals are of each cell by itself: of so many, some "
        "leave 0 out by chance. In the figure a star marks those that do.",
        tables=(
            (
                "",
                table_of(
                    rows,
                    (
                        Column("setting", lambda row: clean(row[0]), numeric=False, keep=True),
                        Column("tokens", lambda row: f"{row[1]:,}", keep=True),
                        *map(part, depths),
                    ),
                ),
            ),
        ),
    )


def depth_words(depth: tuple[float, float]) -> str:
    """``20 to 40 %``."""
    return f"{100 * depth[0]:.0f} to {100 * depth[1]:.0f} %"


_PERTURBED = (
    NAME,
    Column("change", lambda row: row.perturb, numeric=False, keep=True),
    Column("full changes by", lambda row: signed(row.full_change), short="full"),
    Column("setting changes by", lambda row: signed(row.change), short="setting's"),
    Column(
        "beyond full [interval]",
        lambda row: with_interval(signed(row.diff), signed_interval(row.diff_ci)),
        short="beyond full",
        keep=True,
    ),
    Column("p different", lambda row: p_value(row.p_difference), short="p diff."),
    Column("p alike", lambda row: p_value(row.p_equivalence)),
    VERDICT,
    Column("clusters", lambda row: str(row.n_clusters), detail=True),
)


def perturbed_section(report: Report) -> Section | None:
    """What settings lose beyond full precision when prompts are mistyped; None where none are."""
    if not report.perturbed:
        return None
    more = [row for row in report.perturbed if row.verdict == "loses more"]
    told = join([f"{clean(row.setting)} by {row.perturb}" for row in more[:3]], "and")
    left = f", and {plural(len(more) - 3, 'more')}" if len(more) > 3 else ""
    finding = (
        f"Shown to lose more than full precision does: {told}{left}."
        if more
        else "No setting is shown to lose more than full precision does when prompts are changed."
    )
    return Section(
        "perturbed",
        "Prompts as people mistype them",
        finding,
        note="Each prompt as it was written and with seeded slips of the finger, odd capitals or loose punctuation, "
        "numbers and answers left as they are. What counts is the change of the setting less that of full precision on "
        "the same prompts. p-values are Holm-adjusted over all rows; loses as much is within the margin. A setting "
        "that scores nothing has nothing left to lose, and is shown to lose less. All other tables are over both "
        "wordings together, one prompt being one cluster.",
        tables=(("", table_of(report.perturbed, _PERTURBED)),),
    )
