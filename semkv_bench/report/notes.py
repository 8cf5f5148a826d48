"""What the written reports say beside their tables: key numbers, what was run, how to read it."""

from dataclasses import dataclass

from semkv_bench.report.formatting import (
    CLIFF_MEANS,
    clean,
    cliff_text,
    count,
    divergence,
    fixed,
    interval,
    known,
    percent,
    plural,
    signed,
    signed_interval,
)
from semkv_bench.report.lookup import (
    cliff_grid,
    cliffs_of,
    lengths_words,
    measured_words,
    none_safe,
    partly_coded,
    point_words,
    price_words,
    reference_row,
    repeats_of_reference,
    row_of,
    sample_noun,
)
from semkv_bench.report.verdict import extended_words
from semkv_bench.stats.further import RunawayDetector
from semkv_bench.stats.result import Cliff, Report

__all__ = [
    "GLOSSARY",
    "Card",
    "cards",
    "incomplete",
    "reading_notes",
    "remarks",
    "run_facts",
]

_MOST_TASKS_NAMED = 24

# What a heading or a card means, told when the pointer rests on it.
GLOSSARY = {
    "cliff, code bits": CLIFF_MEANS,
    "code bits": "log2 of the number of levels: what a code needs; 16 levels are 4 bits, called int4 elsewhere",
    "effective bits": "bits per value of the coded part: packed codes and their scales, zero points or norms",
    "cache bits": "bits per value over all that the cache stored at the run's lengths, coded or not",
    "difference [interval]": "score less that of full precision, example by example; the interval holds what the "
    "sample leaves open",
    "verdict": "what the sample shows of a drop beyond the margin: ruled out, shown, or not settled",
    "margin": "the largest loss of the average score, on the 0 to 1 scale, that is agreed to be of no consequence",
    "runaway": "share of answers that hit the token limit or loop",
    "agreement": "share of an answer that equals full precision's, token by token from its start, until "
    "the first token that differs",
    "KL": "mean divergence, in nats, of the next-token distributions from full precision",
}


@dataclass(frozen=True)
class Card:
    """One key number: what it is, the number, and a line that explains it."""

    title: str
    value: str
    note: str


def cards(report: Report) -> list[Card]:
    """The key numbers of ``report`` in reading order."""
    reference = reference_row(report)
    made = [_cliff_card(report, *cliffs_of(report)[0]), _point_card(report)]
    if reference is not None:
        note = f"interval {interval(reference.score_ci)}, scale 0 to 1"
        made.append(Card("Full-precision score", fixed(reference.score), note))
    evidence = f"{plural(report.n_clusters, 'cluster')}, {plural(len(report.tasks), 'task')}"
    turns = report.n_turns
    if turns > 1:
        evidence += f", up to {turns} turns each"
    what = "Paired examples" if sample_noun(report) == "example" else "Paired answers"
    made.append(Card(what, count(report.n_examples), evidence))
    when = (
        "fixed before the run"
        if report.preregistered
        else "fixed before the run, which was extended later"
        if report.extensions and report.options_as_fixed
        else "not known to be fixed before the run"
    )
    made.append(Card("Margin", f"{report.margin:g}", f"{when}; alpha {report.alpha:g}"))
    return made


def _cliff_card(report: Report, quantizer: str | None, cliff: Cliff) -> Card:
    title = f"Cliff of {clean(quantizer)}, code bits" if quantizer else "Cliff, code bits"
    value = cliff_text(cliff.status, cliff.lower_bits, cliff.upper_bits)
    lower, upper = (
        point_words(report, getattr(cliff, f"{end}_setting"), getattr(cliff, f"{end}_bits"), "")
        for end in ("lower", "upper")
    )
    note = {
        "located": f"collapses at {lower}, holds at {upper}",
        "above_grid": "the most bits tested already collapse",
        "below_grid": "the fewest bits tested still hold",
        "undetermined": "the evidence does not settle where it is",
    }[cliff.status]
    if cliff.status != "located" and not cliff_grid(report, quantizer):
        note = "no uniform setting was run, so there is no grid to look in"
    if known(cliff.probability):
        note += f"; bootstrap probability {fixed(cliff.probability, 2)}"
    return Card(title, value, note)


def _point_card(report: Report) -> Card:
    point = report.operating_point
    if point is None:
        return Card("Cheapest safe cache", "none", none_safe(report, "full"))
    note = price_words(point)
    if measured := measured_words(report, point.setting):
        note += f"; {measured}"
    if partly := partly_coded(report):
        note += f"; {partly}"
    if at := lengths_words(row_of(report, point.setting)):
        note += f"; {at}"
    return Card("Cheapest safe cache", clean(point.setting), note)


def run_facts(report: Report, context: dict) -> list[tuple[str, str]]:
    """What was run, on what and when, as far as ``context`` says."""
    tasks = [clean(task) for task in sorted(report.tasks)]
    if len(tasks) > _MOST_TASKS_NAMED:
        tasks = [*tasks[:_MOST_TASKS_NAMED], f"{len(tasks) - _MOST_TASKS_NAMED} more"]
    facts = [
        ("Model", report.model),
        ("Quantizer", report.quantizer),
        ("Protocol", report.protocol),
        ("Tasks", tasks),
        ("Prompts", context.get("prompts")),
        ("Seeds", context.get("seeds")),
        ("Records from", context.get("source")),
    ]
    facts = [(name, _value_text(value)) for name, value in facts]
    facts += [
        (_title(clean(name)), _value_text(value))
        for name, value in (context.get("environment") or {}).items()
        if name != "servers"
    ]
    return [(name, words) for name, words in facts if words]


def incomplete(report: Report) -> str:
    """A sentence where fewer examples are in the records than were planned, else nothing."""
    planned = report.planned_examples
    recorded = report.n_units_recorded or report.n_examples_recorded or report.n_examples
    if not known(planned) or recorded >= planned:
        return ""
    done = f"{count(recorded)} of {count(planned)}"
    return f"The run is not finished: {done} planned examples are in it, and the verdicts may still change."


def remarks(report: Report) -> list[str]:
    """What a reader should know of the records: gaps, repeats, and the noise of full precision itself."""
    found = [f"{clean(warning)}." for warning in report.warnings]
    if report.sequential:
        found.append(_sequential(report))
    repeats = report.n_repeats_collapsed
    if repeats:
        found.append(
            f"{count(repeats)} of {count(report.n_examples_recorded)} recorded examples repeat others "
            "that differ only in the seed; they are counted once."
        )
    alone = report.batching
    if alone:
        engine = report.protocol == "engine"
        what = "answering again" if engine else "decoded alone instead of in the batch of settings"
        kl = f", mean KL {divergence(alone.kl)} nats" if known(alone.kl) else ""
        found.append(
            f"Full precision {what} gave the same tokens on {count(alone.same_tokens)} of {count(alone.examples)} "
            f"answers{kl}, score difference {signed(alone.diff)}: the noise of "
            f"{'the engine' if engine else 'batching'}."
        )
    if detector := report.runaway_detector:
        found.append(_false_alarms(detector))
    for row in repeats_of_reference(report):
        found.append(
            f"Full precision run again ({clean(row.setting)}) differs from itself by {signed(row.diff)} "
            f"{signed_interval(row.diff_ci)}: the noise of the measurement."
        )
    return found


def _sequential(report: Report) -> str:
    """At which look a sequential run stands or ended, why, and what its p-values allow for."""
    run = report.sequential
    look = run.look - 1
    sizes = f"{count(run.examples[look])} of {count(run.examples[-1])} planned examples"
    place = f"look {run.look} of {run.looks} ({sizes})"
    if run.stopped:
        words = f"This sequential run stopped at {place}"
    elif run.complete_looks == 0:
        words = f"This is a sequential run of which no look is complete yet ({sizes} are in it)"
    else:
        words = f"This is a sequential run at {place}"
    if run.reason:
        words += f": {clean(run.reason)}"
    if run.raced and known(run.run_rows):
        words += f". {_raced(report)}"
    return (
        f"{words}. Its looks were fixed before the first record; p-values and intervals hold over all of them. "
        f"By this look {run.alpha_spent:.2g} of alpha {report.alpha:g} was spent, and a single test had to "
        f"pass at {run.alpha_at_look:.2g}."
    )


def _raced(report: Report) -> str:
    """Which settings left a raced run where, and how many rows that saved."""
    run = report.sequential
    left: dict[int, list[str]] = {}
    for row in report.settings:
        if row.left_at_look is not None:
            left.setdefault(row.left_at_look, []).append(clean(row.setting))
    places = "; ".join(f"{', '.join(names)} at look {look}" for look, names in sorted(left.items()))
    if not places:
        return "No setting has left it yet"
    return (
        f"Settings shown degraded left it: {places}; {count(run.run_rows)} of {count(run.planned_rows)} rows were run, "
        "and their figures are those of the examples up to there"
    )


def _false_alarms(detector: RunawayDetector) -> str:
    """How often full precision itself counts as runaway."""
    words = (
        f"Of {plural(detector.outputs, 'full-precision output')}, {count(detector.runaway)} "
        f"{'counts' if detector.runaway == 1 else 'count'} as runaway: a false-alarm rate of "
        f"{percent(detector.rate)}, interval {percent(detector.rate_ci[0])} to "
        f"{percent(detector.rate_ci[1])}"
    )
    if detector.runaway and detector.loops is not None:
        least = "" if detector.loops_exact else "at least "
        words += f"; {least}{count(detector.loops)} of them looped, the rest reached the token limit"
    return f"{words}."


def _value_text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return ", ".join(_value_text(item) for item in value)
    if isinstance(value, dict):
        named = {clean(key): _value_text(item) for key, item in value.items() if item is not None}
        return ", ".join(f"{name} {words}" for name, words in named.items())
    return clean(value)


def _title(name: str) -> str:
    words = name.replace("_", " ").strip()
    return words.upper() if words in ("cpu", "gpu", "cuda") else words[:1].upper() + words[1:]


def reading_notes(report: Report) -> list[tuple[str, str]]:
    """The method in plain words, with the numbers of this report."""
    average = {
        "macro": "The score is the mean of the task means, so every task counts the same.",
        "micro": "The score is the mean over all examples, so large tasks count more.",
    }[report.average]
    margin, alpha = f"{report.margin:g}", f"{report.alpha:g}"
    level = f" Intervals have level {100 * report.confidence:g}%." if known(report.confidence) else ""
    when = (
        "It was fixed before the first record was made."
        if report.preregistered
        else f"It was fixed before the first record, but {extended_words(report)}: the verdicts are exploratory."
        if report.extensions and report.options_as_fixed
        else "It is not known to have been fixed before the records were made: the verdicts are exploratory."
    )
    return [
        (
            "Bits",
            "A cache value stored with L levels costs log2(L) code bits. Effective bits are what is really "
            "stored: codes packed into whole bits, plus scales, zero points or norms. Cache bits spread that over "
            "the whole cache, what stays in 16 bits included. How many times smaller a cache is, is 16 divided by its "
            "cache bits, and by effective bits only where a figure names the coded part.",
        ),
        (
            "Score and difference",
            f"{average} Every setting answers the same prompts as full precision, and the difference is "
            "taken example by example, so prompts that are hard for both cancel out.",
        ),
        (
            "Clusters",
            "An example with all its seeds and turns is one cluster, and intervals are formed over clusters. Identical "
            f"repeats of a greedy run add no evidence and are counted once.{level}",
        ),
        ("Margin", f"A loss below {margin} on the 0 to 1 scale is agreed to be of no consequence. {when}"),
        (
            "Equivalence",
            "Two one-sided tests (TOST) ask whether a drop beyond the margin is ruled out (no worse) and whether a "
            "gain is, too (equivalent). Cliff and operating point rest on the first. "
            f"Their p-values are compared with alpha = {alpha} after an adjustment for the number of settings: "
            "the points of the grid are tested from many bits to few, each at what the points above have handed "
            "on; drops beyond the margin from few bits to many. "
            "A large p-value does not show a loss: it shows that the sample does not settle the question.",
        ),
        ("Verdicts", _verdict_note(margin)),
        (
            "Cliff",
            f"{CLIFF_MEANS} Its probability is the share of bootstrap resamples whose own interval lies within it. "
            "The steepest fall is where the averages lose most between neighbours, whatever the verdicts.",
        ),
        (
            "Runaway, agreement and KL",
            "A runaway generation hits its token limit or loops. Agreement is the share of an answer that equals full "
            "precision's token by token, from its start to the first token that differs; answers part there by another "
            "token, or by the end of one of the two. KL is the mean divergence "
            "of the next-token distributions from full precision, over the reference answer. They are witnesses "
            "beside the score; none decides a verdict.",
        ),
    ]


def _verdict_note(margin: str) -> str:
    meanings = [
        f"equivalent: a drop and a gain of more than {margin} are both ruled out",
        "no_worse: such a drop is ruled out, such a gain is not",
        "floor: within the margin, yet detectably below full",
        "degraded: a loss beyond the margin is shown",
        "inconclusive: the sample is too small to tell",
    ]
    return (
        f"{'; '.join(meanings).capitalize()}. Insensitive means that the run could not have seen a loss, "
        "because nothing in it collapsed or full precision does not do the task."
    )
