"""The verdict of a report in one plain sentence, and one on what the run cannot say."""

from semkv_bench.report.formatting import (
    bits_text,
    clean,
    count,
    effective_text,
    fixed,
    grid_point,
    join,
    known,
    plural,
    ratio,
)

__all__ = ["HOLDS", "cliff_words", "headline", "interval_words", "limits", "operating_point_words", "subject"]

HOLDS = ("equivalent", "floor")

_MOST_NAMED = 3


def headline(report: dict) -> str:
    """What the run found, as one sentence without markup, whatever its cliff status and verdicts."""
    if _insensitive(report):
        return (
            f"This run could not have seen a loss of quality for {subject(report)}, "
            f"so it calls no setting safe: {_blindness(report)}."
        )
    return f"{_cliff_sentence(report)}; {_safest(report)}."


def limits(report: dict) -> str:
    """What the run cannot say, as one sentence: what is undecided, what would settle it, the margin."""
    margin = f"the margin of {_margin(report)}"
    if report["preregistered"]:
        margin += " was fixed before the first record"
    else:
        margin += (
            " is not known to have been fixed before the records were made, so its verdicts are exploratory"
        )
    return f"{_undecided(report)}; {margin}."


def subject(report: dict) -> str:
    """The model and quantizer a report is about, in words."""
    model = clean(report["model"]) if report["model"] else "the model in these records"
    quantizer = report["quantizer"]
    names = [quantizer] if isinstance(quantizer, str) else list(quantizer or [])
    if not names:
        return model
    return f"{model} with {join([clean(name) for name in names])} quantization"


def interval_words(lower: float | None, upper: float | None) -> str:
    """A grid interval such as ``(2.0, 2.322]``, ``at most 1.0`` or ``above 4.0``, in code bits."""
    if known(lower) and known(upper):
        return f"({bits_text(lower)}, {bits_text(upper)}]"
    if known(lower):
        return f"above {bits_text(lower)}"
    if known(upper):
        return f"at most {bits_text(upper)}"
    return "not located"


def cliff_words(report: dict) -> str:
    """Where the cliff is, for the line or card beside its name."""
    cliff = report["cliff"]
    status = cliff["status"]
    if status == "located":
        return f"{interval_words(cliff['lower_bits'], cliff['upper_bits'])} bits"
    if status == "above_grid":
        return f"above the grid (over {bits_text(_grid_end(report, 'lower'))} bits)"
    if status == "below_grid":
        return f"below the grid (under {bits_text(_grid_end(report, 'upper'))} bits)"
    return "not determined"


def operating_point_words(report: dict) -> str:
    """The operating point with its price, or why there is none."""
    point = report["operating_point"]
    if point is None:
        return "none: no setting is shown to be equivalent to the reference"
    if not known(point["effective_bits"]):
        bits = bits_text(point["code_bits"])
        return f"{clean(point['setting'])}, {bits} code bits (effective bits not recorded)"
    return (
        f"{clean(point['setting'])}, {effective_text(point['effective_bits'])} effective bits per value, "
        f"{ratio(point['compression'], 1)} smaller than 16-bit"
    )


def _cliff_sentence(report: dict) -> str:
    cliff = report["cliff"]
    name = subject(report)
    start = name[0].upper() + name[1:] if name.startswith("the model") else name
    upper = grid_point(cliff["upper_setting"], cliff["upper_bits"])
    if cliff["status"] == "located":
        lower = grid_point(cliff["lower_setting"], cliff["lower_bits"], unit="")
        return f"{start} keeps its quality down to {upper} and collapses at {lower}"
    if cliff["status"] == "above_grid":
        highest = _grid_point_words(report, "lower")
        where = "the most bits tested, so its cliff lies above the grid"
        return f"{start} has lost quality already at {highest}, {where}"
    if cliff["status"] == "below_grid":
        lowest = _grid_point_words(report, "upper")
        where = "the fewest bits tested, so its cliff lies below the grid"
        return f"{start} keeps its quality down to {lowest}, {where}"
    grid = _grid(report)
    holds = sum(row["verdict"] in HOLDS for row in grid)
    lost = sum(row["verdict"] == "degraded" for row in grid)
    open_ = len(grid) - holds - lost
    tally = (
        f"{holds} {'holds' if holds == 1 else 'hold'}, {lost} {'collapses' if lost == 1 else 'collapse'} "
        f"and {open_} {'is' if open_ == 1 else 'are'} undecided"
    )
    return f"The cliff of {name} could not be located: of {plural(len(grid), 'grid point')}, {tally}"


def _safest(report: dict) -> str:
    point = report["operating_point"]
    if point is None:
        return "no setting is shown to be equivalent to the 16-bit cache"
    return f"cheapest safe cache: {operating_point_words(report)}"


def _insensitive(report: dict) -> bool:
    return any(row["verdict"] == "insensitive" for row in report["settings"])


def _blindness(report: dict) -> str:
    lost = any(row["verdict"] == "degraded" for row in report["settings"])
    if lost:
        return "the full-precision reference does not score above chance"
    return "no tested setting shows a loss (no positive control), or the reference is no better than chance"


def _undecided(report: dict) -> str:
    if _insensitive(report):
        return (
            "It cannot say that any setting is safe until a setting with fewer levels collapses "
            "on tasks that the full-precision cache solves"
        )
    rows = [row for row in report["settings"] if row["verdict"] == "inconclusive"]
    if not rows:
        return "It says nothing about other models, quantizers, tasks or longer prompts than those run"
    names = [clean(row["setting"]) for row in rows[:_MOST_NAMED]]
    if len(rows) > _MOST_NAMED:
        names = [*names[: _MOST_NAMED - 1], f"{len(rows) - _MOST_NAMED + 1} more settings"]
    verb = "holds" if len(rows) == 1 else "hold"
    needed = [row["n_needed"] for row in rows if known(row["n_needed"])]
    size = f" ({count(report['n_clusters'])} examples were run)"
    if needed:
        what = "it" if len(rows) == 1 else "all of them"
        run = count(report["n_clusters"])
        size = f" (about {count(max(needed))} examples would settle {what}; {run} were run)"
    return f"It cannot say whether {join(names)} {verb}{size}"


def _margin(report: dict) -> str:
    return fixed(report["margin"], 3).rstrip("0").rstrip(".")


def _grid(report: dict) -> list[dict]:
    return [row for row in report["settings"] if row["kind"] == "uniform"]


def _grid_end(report: dict, side: str) -> float | None:
    if known(report["cliff"][f"{side}_bits"]):
        return report["cliff"][f"{side}_bits"]
    bits = [row["code_bits"] for row in _grid(report) if known(row["code_bits"])]
    return (max(bits) if side == "lower" else min(bits)) if bits else None


def _grid_point_words(report: dict, side: str) -> str:
    bits = _grid_end(report, side)
    names = [row["setting"] for row in _grid(report) if row["code_bits"] == bits]
    return grid_point(names[0] if names else report["cliff"][f"{side}_setting"], bits)
