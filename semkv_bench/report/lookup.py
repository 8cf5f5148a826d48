"""Parts of a report by name."""

from semkv_bench.report.formatting import (
    bits_text,
    clean,
    count,
    effective_text,
    first_names,
    grid_point,
    join,
    known,
    plural,
    ratio,
)
from semkv_bench.stats.equivalence import SAFE
from semkv_bench.stats.result import Cliff, OperatingPoint, Report, SettingResult

__all__ = [
    "cheaper_deletions",
    "cliff_grid",
    "cliffs_of",
    "compared_settings",
    "dead_tasks",
    "lengths_words",
    "measured_words",
    "metric_of",
    "none_safe",
    "ordered_settings",
    "partly_coded",
    "point_words",
    "price_words",
    "quantizer_of",
    "reference_row",
    "repeats_of_reference",
    "row_of",
    "sample_noun",
    "task_title",
    "telling_settings",
    "tested_settings",
]

_FULL_BITS = 16
_KIND_ORDER = {"full": 0, "uniform": 1, "mixed": 2, "prune": 3, "read": 4}


def row_of(report: Report, setting: str | None) -> SettingResult | None:
    """The row of ``setting``, None where there is none."""
    return next((row for row in report.settings if row.setting == setting), None)


def point_words(report: Report, setting: str | None, code_bits: float | None, unit: str = " bits") -> str:
    """A point of the uniform grid in words; see :func:`semkv_bench.report.formatting.grid_point`."""
    row = row_of(report, setting)
    levels = row.levels if row is not None and row.kind == "uniform" else None
    return grid_point(levels, setting, code_bits, unit)


def partly_coded(report: Report) -> str:
    """``1 of 6 layers is coded`` where not all are, else nothing."""
    layers = report.layers
    if layers is None or layers.quantized == layers.total:
        return ""
    return f"{layers.quantized} of {plural(layers.total, 'layer')} {'is' if layers.quantized == 1 else 'are'} coded"


def price_words(row: SettingResult | OperatingPoint) -> str:
    """What a setting stores: the whole cache at the run's lengths, and the coded part under its own name."""
    coded = ""
    if known(row.effective_bits):
        coded = f"coded part {effective_text(row.effective_bits)} effective bits per value"
    if known(row.cache_bits):
        whole = (
            f"whole cache {effective_text(row.cache_bits)} bits per value at these lengths, "
            f"{ratio(16 / row.cache_bits, 1)} smaller than 16-bit"
        )
        return f"{whole} ({coded})" if coded else whole
    if coded:
        return f"{coded}, {ratio(16 / row.effective_bits, 1)} smaller than 16-bit"
    return f"{bits_text(row.code_bits)} code bits (effective bits not recorded)"


def none_safe(report: Report, reference: str) -> str:
    """Why there is no operating point: nothing holds, or what holds loses detectably, or is not smaller."""
    safe = [row for row in report.settings if row.verdict in SAFE and row.kind != "full"]
    full = reference_row(report)
    most = (full and full.paid_bits) or _FULL_BITS
    large = [row for row in safe if row.kind in ("uniform", "mixed") and (row.paid_bits or 0) >= most]
    if coded := [row.setting for row in large]:
        verb = "takes" if len(coded) == 1 else "take"
        return (
            f"no setting as good as {reference} is smaller: {first_names(coded)} {verb} as many bits or more"
        )
    what = "no quantized setting" if any(row.kind == "prune" for row in safe) else "no setting"
    floor = [row.setting for row in report.settings if row.verdict == "floor"]
    if not floor:
        return f"{what} is shown to be no worse than {reference}"
    verb = "loses" if len(floor) == 1 else "lose"
    return (
        f"{what} is as good as {reference}: {first_names(floor)} {verb} less than the margin, yet detectably"
    )


def cheaper_deletions(report: Report) -> list[str]:
    """Settings that delete tokens, are no worse, and cost less than the operating point, where there is one."""
    paid = report.operating_point and report.operating_point.paid_bits
    return [
        row.setting
        for row in report.settings
        if row.kind == "prune"
        and row.verdict in SAFE
        and (
            report.operating_point is None or (known(paid) and known(row.paid_bits) and row.paid_bits < paid)
        )
    ]


def measured_words(report: Report, setting: str | None) -> str:
    """How much smaller ``setting`` was in real buffers, its prediction beside it; else nothing."""
    found = report.measured
    if found is None or found.setting != setting:
        return ""
    predicted = found.predicted_times_smaller
    told = f" (predicted {ratio(predicted, 2)})" if known(predicted) else ""
    return (
        f"measured {ratio(found.times_smaller, 2)} smaller{told} in a packed cache on "
        f"{plural(found.examples, 'example')}"
    )


def lengths_words(row: SettingResult | None) -> str:
    """How much smaller the whole cache is at other lengths, where that is known and another, else nothing."""
    if row is None or not row.cache_at:
        return ""
    at = sorted((int(tokens), size.compression) for tokens, size in row.cache_at.items())
    if known(row.cache_bits) and {ratio(times, 1) for _, times in at} == {ratio(16 / row.cache_bits, 1)}:
        return ""
    words = [f"{ratio(times, 1)} at {_tokens(tokens)}" for tokens, times in at]
    return f"at other lengths the whole cache is smaller by {join(words)} tokens"


def _tokens(number: int) -> str:
    return f"{number // 1024}k" if number % 1024 == 0 else count(number)


def sample_noun(report: Report) -> str:
    """What sample sizes count: ``example``, or ``cluster`` where an example has several seeds or turns."""
    return "example" if report.n_examples == report.n_clusters else "cluster"


def reference_row(report: Report) -> SettingResult | None:
    """The row of the reference itself."""
    return row_of(report, report.reference)


def ordered_settings(report: Report) -> list[SettingResult]:
    """Settings in reading order: reference, each quantizer's grid from many bits to few, mixed, prune."""

    def key(row: SettingResult) -> tuple:
        """By which rows are sorted."""
        bits = row.code_bits if known(row.code_bits) else row.effective_bits
        descending = -(bits if known(bits) else 0.0)
        return (
            row.setting != report.reference,
            _KIND_ORDER[row.kind],
            quantizer_of(row) or "",
            descending,
            row.setting,
        )

    return sorted(report.settings, key=key)


def compared_settings(report: Report) -> list[SettingResult]:
    """``ordered_settings`` without the reference."""
    return [row for row in ordered_settings(report) if row.setting != report.reference]


def tested_settings(report: Report) -> list[SettingResult]:
    """The settings that take bits away: without the reference and its repeats."""
    return [row for row in compared_settings(report) if row.kind != "full"]


def repeats_of_reference(report: Report) -> list[SettingResult]:
    """Further runs of full precision, which show the noise of the measurement itself."""
    return [row for row in compared_settings(report) if row.kind == "full"]


def quantizer_of(row: SettingResult) -> str | None:
    """The quantizer of a setting, as recorded or else as its name says."""
    return row.quantizer or row.family


def metric_of(row: SettingResult) -> str | None:
    """The importance metric of a mixed or pruned setting, where it is known."""
    return row.allocation and row.allocation.metric


def cliffs_of(report: Report) -> list[tuple[str | None, Cliff]]:
    """Quantizer and cliff of every grid, the report's own ``cliff`` first; no name where there is but one."""
    main = report.cliff.quantizer
    others = [(name, cliff) for name, cliff in (report.cliffs or {}).items() if name != (main or "")]
    if not others:
        return [(None, report.cliff)]
    return [(main, report.cliff), *((name or None, cliff) for name, cliff in sorted(others))]


def cliff_grid(report: Report, quantizer: str | None) -> list[SettingResult]:
    """The uniform settings that a cliff of ``cliffs_of`` was looked for in."""
    grid = [row for row in report.settings if row.kind == "uniform"]
    if len(cliffs_of(report)) == 1:
        return grid
    return [row for row in grid if row.quantizer == quantizer]


def task_title(report: Report, task: str) -> str:
    """The name of ``task``, marked where the verdicts leave it out."""
    return f"{clean(task)} †" if report.assay and task in (report.assay.dead_tasks or {}) else clean(task)


def dead_tasks(report: Report) -> tuple[str, ...]:
    """Why the verdicts leave out each task that they leave out."""
    dead = (report.assay and report.assay.dead_tasks) or {}
    return tuple(
        f"† {clean(task)} cannot react and is left out of the verdicts: {clean(why)}."
        for task, why in sorted(dead.items())
    )


def telling_settings(report: Report) -> list[str]:
    """Tested settings, those that tell most first: the operating point, the cliff's ends, what is undecided there.

    The rest follow by their distance from the cliff; where there is none, from what is undecided, or else from
    the highest grid point that collapses.
    """
    cliffs = [cliff for _, cliff in cliffs_of(report)]
    point = report.operating_point
    grid = [row for row in report.settings if row.kind == "uniform" and known(row.code_bits)]
    undecided = [row for row in grid if row.verdict == "inconclusive"]
    lost = [row.code_bits for row in grid if row.verdict == "degraded"]
    ends = [getattr(cliffs[0], f"{side}_bits") for side in ("upper", "lower")]
    around = (
        [end for end in ends if known(end)]
        or [row.code_bits for row in undecided]
        or [max(lost, default=2.0)]
    )
    centre = sum(around) / len(around)
    ranks = [
        [point.setting if point else None],
        *([cliff.upper_setting, cliff.lower_setting] for cliff in cliffs),
        [row.setting for row in undecided],
    ]

    def key(row: SettingResult):
        rank = next((number for number, names in enumerate(ranks) if row.setting in names), len(ranks))
        bits = row.code_bits if known(row.code_bits) else 16.0
        return (rank, row.kind != "uniform", abs(bits - centre), row.setting)

    return [row.setting for row in sorted(tested_settings(report), key=key)]
