"""The sections beyond the grid, in reading order; here: text, methods, what is left above the cliff."""

from semkv_bench.report.formatting import (
    clean,
    fixed,
    interval,
    join,
    known,
    p_value,
    plural,
)
from semkv_bench.report.lookup import ordered_settings
from semkv_bench.report.methods import method_parts
from semkv_bench.report.section import DIFFERENCE, NAME, Section, setting_names
from semkv_bench.report.sections_mixes import deletion_section, interpolation_section, rankings_section
from semkv_bench.report.sections_places import (
    depths_section,
    lengths_section,
    perturbed_section,
    places_section,
)
from semkv_bench.report.sections_turns import turns_section
from semkv_bench.report.tables import Column, table_of, with_interval
from semkv_bench.stats.result import Report

__all__ = ["sections"]


def sections(report: Report) -> list[Section]:
    """The sections that ``report`` has numbers for, in reading order."""
    made = (
        _texts(report),
        _methods(report),
        _residual(report),
        interpolation_section(report),
        rankings_section(report),
        deletion_section(report),
        depths_section(report),
        lengths_section(report),
        places_section(report),
        perturbed_section(report),
        turns_section(report),
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


_LEFT = (
    NAME,
    Column("residual", lambda row: row.residual, numeric=False, keep=True),
    DIFFERENCE,
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
        finding = f"Detectably below full: {setting_names(floor)}."
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
