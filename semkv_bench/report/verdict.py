"""The verdict of a report in one plain sentence, and one on what the run cannot say."""

from semkv_bench.report.formatting import (
    bits_text,
    clean,
    cliff_text,
    count,
    first_names,
    fixed,
    join,
    known,
    p_value,
    plural,
    signed,
    signed_interval,
)
from semkv_bench.report.lookup import (
    cheaper_deletions,
    cliff_grid,
    cliffs_of,
    lengths_words,
    measured_words,
    none_safe,
    partly_coded,
    point_words,
    price_words,
    reference_row,
    row_of,
    sample_noun,
    tested_settings,
)
from semkv_bench.stats.equivalence import HOLDS
from semkv_bench.stats.result import Cliff, OperatingPoint, Report, SettingResult

__all__ = [
    "cliff_words",
    "confirmation_words",
    "extended_words",
    "headline",
    "limits",
    "operating_point_words",
    "subject",
]

_ELSEWHERE = "answers"  # what engine=answers calls the cache of an engine that it does not know
_MOST_NAMED = 3


def headline(report: Report) -> str:
    """What the run found, as one sentence without markup, whatever its cliff status and verdicts."""
    if _insensitive(report):
        return (
            f"This run could not have seen a loss of quality for {subject(report)}, "
            f"so it calls no setting safe: {_blindness(report)}."
        )
    return f"{_cliff_sentence(report)}; {_safest(report)}{_dead(report)}{_missing(report)}."


def _dead(report: Report) -> str:
    """Which tasks the verdicts leave out."""
    dead = report.assay and report.assay.dead_tasks
    if not dead:
        return ""
    verb = "cannot react and is" if len(dead) == 1 else "cannot react and are"
    names = join([clean(task) for task in sorted(dead)])
    return f"; judged on {len(report.assay.tasks)} of {plural(len(report.tasks), 'task')}: {names} {verb} left out"


def _missing(report: Report) -> str:
    """How many rows are missing, which the verdicts count as lost."""
    rows = [row for row in report.settings if row.n_missing + row.n_unpaired]
    if not rows:
        return ""
    words = [f"{count(row.n_missing + row.n_unpaired)} of {clean(row.setting)}" for row in rows[:_MOST_NAMED]]
    if len(rows) > _MOST_NAMED:
        words.append(f"those of {len(rows) - _MOST_NAMED} more settings")
    return f"; rows are missing and count as lost: {join(words)}"


def limits(report: Report) -> str:
    """What the run cannot say, as one sentence: what is undecided, what would settle it, the margin."""
    margin = f"the margin of {report.margin:g}"
    if report.preregistered:
        margin += " was fixed before the first record"
    elif report.extensions and report.options_as_fixed:
        margin += f" was fixed before the first record, but {extended_words(report)}, so its verdicts are exploratory"
    else:
        margin += (
            " is not known to have been fixed before the records were made, so its verdicts are exploratory"
        )
    clauses = [_undecided(report), margin]
    if _unconfirmed(report.operating_point):
        clauses.insert(1, "the operating point is not confirmed on examples of its own")
    return f"{'; '.join(clauses)}."


def extended_words(report: Report) -> str:
    """When the run was extended, by what, and what was known then."""
    words = []
    for extension in report.extensions:
        first, last = extension.examples
        added = [f"from {count(first)} to {plural(last, 'example')}"] if first != last else []
        added += [f"by {join([clean(name) for name in extension.settings])}"] if extension.settings else []
        known_then = f"{count(extension.recorded)} were known" + (
            " and analysed" if extension.reported else ""
        )
        words.append(f"on {extension.time[:10]} {' and '.join(added)}, when {known_then}")
    return f"the run was extended {'; '.join(dict.fromkeys(words))}"


def subject(report: Report) -> str:
    """The model and quantizers a report is about, in words."""
    quantizer = report.quantizer
    names = [quantizer] if isinstance(quantizer, str) else list(quantizer or [])
    return _with(_model(report), join([clean(name) for name in names]))


def cliff_words(report: Report, quantizer: str | None, cliff: Cliff) -> str:
    """Where one cliff of ``cliffs_of`` is and how probable that is."""
    words = cliff_text(cliff.status, cliff.lower_bits, cliff.upper_bits)
    if cliff.status == "located":
        words += " bits"
    elif cliff.status != "undetermined":
        side = "over" if cliff.status == "above_grid" else "under"
        words += f" ({side} {bits_text(_end(report, quantizer, cliff)[1])} bits)"
    elif not cliff_grid(report, quantizer):
        words += ", as no uniform setting was run"
    likely = cliff.probability
    return f"{words}, bootstrap probability {fixed(likely, 2)}" if known(likely) else words


def operating_point_words(report: Report) -> str:
    """The operating point with its price, or why there is none."""
    point = report.operating_point
    if point is None:
        return f"none: {none_safe(report, 'the reference')}"
    words = f"{clean(point.setting)}, {price_words(point)}"
    if measured := measured_words(report, point.setting):
        words += f"; {measured}"
    if partly := partly_coded(report):
        words += f"; {partly}"
    if at := lengths_words(row_of(report, point.setting)):
        words += f"; {at}"
    return words


def confirmation_words(report: Report) -> str:
    """The operating point's difference, and how it fared on two halves of the examples; empty where nobody says."""
    point = report.operating_point
    if point is None:
        return ""
    words = [_chosen_words(point), _confirmed_words(report, point)]
    return " ".join(word for word in words if word)


def _chosen_words(point: OperatingPoint) -> str:
    if not known(point.candidates):
        return ""
    return (
        f"Difference {signed(point.diff)} {signed_interval(point.diff_ci)}, allowing for the choice among "
        f"{plural(point.candidates, 'setting')}."
    )


def _confirmed_words(report: Report, point: OperatingPoint) -> str:
    if not (point.confirmation or point.confirmation_reason):
        return ""
    found = point.confirmation
    if not found:
        return f"Not confirmed on examples of its own: {clean(point.confirmation_reason)}."
    outcome = "is confirmed as no worse" if found.confirmed else "is not confirmed"
    noun = sample_noun(report)
    first, second = count(found.clusters_to_choose), count(found.clusters_to_test)
    numbers = (
        f"difference {signed(found.diff)} {signed_interval(found.diff_ci)}, "
        f"p no worse {p_value(found.p_no_worse)}"
    )
    return (
        f"On one half of the {noun}s ({first}), beside all other settings (p no worse {p_value(found.p_adjusted)}), "
        f"and by itself on the other half ({second}), {clean(found.setting)} {outcome}: {numbers}."
    )


def _unconfirmed(point: OperatingPoint | None) -> bool:
    """Whether the report says of its operating point that it was not confirmed on other examples."""
    if point is None or not (point.confirmation or point.confirmation_reason):
        return False
    found = point.confirmation
    return found is None or not found.confirmed


def _model(report: Report) -> str:
    return clean(report.model) if report.model else "the model in these records"


def _with(model: str, quantizers: str) -> str:
    if quantizers == _ELSEWHERE:
        return f"{model} on an engine whose answers were given"
    return f"{model} with {quantizers} quantization" if quantizers else model


def _cliff_sentence(report: Report) -> str:
    (main, cliff), *others = cliffs_of(report)
    name = _with(_model(report), clean(main)) if others and main else subject(report)
    if cliff.status == "undetermined":
        sentence = f"the cliff of {name} could not be located: {_grid_counts(report, main)}"
    else:
        sentence = f"{name} {_course(report, main, cliff)}"
    for quantizer, cliff in others[: _MOST_NAMED - 1]:
        where = f"with {clean(quantizer)}" if quantizer else "without a named quantizer"
        sentence += f"; {where} it {_course(report, quantizer, cliff)}"
    if len(others) >= _MOST_NAMED:
        sentence += f"; {plural(len(others) - _MOST_NAMED + 1, 'more quantizer')} below"
    # A model's name keeps its own spelling.
    return sentence[0].upper() + sentence[1:] if sentence.startswith("the ") else sentence


def _course(report: Report, quantizer: str | None, cliff: Cliff) -> str:
    if cliff.status == "undetermined":
        return f"has no located cliff ({_grid_counts(report, quantizer)})"
    if cliff.status == "located":
        upper = point_words(report, cliff.upper_setting, cliff.upper_bits)
        lower = point_words(report, cliff.lower_setting, cliff.lower_bits, unit="")
        return f"holds down to {upper} and collapses at {lower}"
    end = point_words(report, *_end(report, quantizer, cliff))
    if cliff.status == "above_grid":
        return f"collapses already at {end}, the most bits tested, so its cliff lies above the grid"
    return f"holds down to {end}, the fewest bits tested, so its cliff lies below the grid"


def _end(report: Report, quantizer: str | None, cliff: Cliff) -> tuple[str | None, float | None]:
    """Name and bits of the end of the grid that a cliff lies beyond."""
    above = cliff.status == "above_grid"
    side = "lower" if above else "upper"
    if known(getattr(cliff, f"{side}_bits")):
        return getattr(cliff, f"{side}_setting"), getattr(cliff, f"{side}_bits")
    grid = [row for row in cliff_grid(report, quantizer) if known(row.code_bits)]
    if not grid:
        return None, None
    row = (max if above else min)(grid, key=lambda row: row.code_bits)
    return row.setting, row.code_bits


def _grid_counts(report: Report, quantizer: str | None) -> str:
    grid = cliff_grid(report, quantizer)
    if not grid:
        return "no uniform setting was run, so there is no grid to look in"
    hold = sum(row.verdict in HOLDS for row in grid)
    lost = sum(row.verdict == "degraded" for row in grid)
    left = len(grid) - hold - lost
    return (
        f"of {plural(len(grid), 'grid point')}, {hold} {'holds' if hold == 1 else 'hold'}, "
        f"{lost} {'collapses' if lost == 1 else 'collapse'} and {left} {'is' if left == 1 else 'are'} undecided"
    )


def _safest(report: Report) -> str:
    deletions = cheaper_deletions(report)
    also = ""
    if deletions:
        verb = "deletes tokens and is" if len(deletions) == 1 else "delete tokens and are"
        less = "" if report.operating_point is None else " in fewer bits"
        also = f"; {first_names(deletions)} {verb} no worse{less}"
    if report.operating_point is None:
        return f"{none_safe(report, 'the 16-bit cache')}{also}"
    return f"cheapest safe {'quantized ' if also else ''}cache: {operating_point_words(report)}{also}"


def _insensitive(report: Report) -> bool:
    return any(row.verdict == "insensitive" for row in report.settings)


def _reference_fails(report: Report) -> bool:
    """Whether it is the reference that makes the run blind, as far as the report says."""
    return report.assay is not None and not report.assay.reference_above_chance


def _blindness(report: Report) -> str:
    reference = reference_row(report)
    if _reference_fails(report):
        if report.assay.too_few:
            number = plural(report.n_clusters, sample_noun(report))
            verb = "is" if report.n_clusters == 1 else "are"
            return f"{number} {verb} too few to show that full precision does the tasks"
        score = f" ({fixed(reference.score)})" if reference else ""
        chance = report.assay.chance
        level = f" of {fixed(chance)}" if known(chance) else ""
        sample = plural(report.n_clusters, sample_noun(report))
        return (
            f"on {sample}, the full-precision score{score} is not shown to be above the chance level{level}"
        )
    bits = [row.code_bits for row in report.settings if row.kind == "uniform" and known(row.code_bits)]
    if bits:
        grid = f"no grid point, down to {bits_text(min(bits))} bits,"
    else:
        grid = "no grid point" if cliff_grid(report, None) else "no uniform setting was run, so none"
    words = f"{grid} is shown to lose quality (no positive control)"
    return (
        words if report.assay is not None else f"{words}, or full precision is not shown to be above chance"
    )


def _undecided(report: Report) -> str:
    if _insensitive(report):
        if _reference_fails(report):
            return (
                "It cannot say anything about these settings until full precision is shown to solve the tasks"
            )
        return "It cannot say that any setting is safe until one with fewer levels is seen to collapse"
    rows = [row for row in tested_settings(report) if row.verdict == "inconclusive"]
    if not rows:
        return "It says nothing about other models, quantizers, tasks or longer prompts than those run"
    verb = "holds" if len(rows) == 1 else "hold"
    names = first_names([row.setting for row in rows], "more settings")
    return f"It cannot say whether {names} {verb} ({_sample_words(report, rows)})"


def _sample_words(report: Report, rows: list[SettingResult]) -> str:
    """How many of what the intervals count would settle ``rows``, and how many the most demanding of them has."""
    noun = sample_noun(report)
    needing = [row for row in rows if known(row.n_needed)]
    missing = sum(row.n_missing + row.n_unpaired for row in rows)
    if not needing and missing:
        return f"{plural(missing, 'row')} {'is' if missing == 1 else 'are'} missing and may have been lost"
    if not needing:
        return f"{plural(report.n_clusters, noun)} {'was' if report.n_clusters == 1 else 'were'} run"
    most = max(needing, key=lambda row: row.n_needed)
    all_of = "it" if len(rows) == 1 else "all of them"
    what = all_of if len(needing) == len(rows) else f"{len(needing)} of them"
    aside = "" if noun == "example" else ", each an example or a document with all its answers,"
    return (
        f"{plural(most.n_needed, noun)}{aside} would settle {what} four times in five; "
        f"{count(most.n_clusters)} were run"
    )
