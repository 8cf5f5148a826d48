"""Markdown of the calibration's numbers."""

from calibration.planted import CliffCell

__all__ = [
    "ablation_table",
    "at_margin_table",
    "cliff_summary_table",
    "cliff_table",
    "coverage_table",
    "exact_table",
    "family_table",
    "margin_table",
    "markdown",
    "power_table",
    "ranges_table",
    "samples_table",
    "summary",
]


def markdown(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table of ready texts."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def coverage_table(cells: list[dict]) -> str:
    """Coverage and error rates, one row a shape and size."""
    head = ("shape", "n", "differ", "guarded (low, high)", "width", "plus-two", "t", "percentile")
    head += ("false equivalent", "false degraded")
    rows = [
        (
            c["shape"],
            str(c["clusters"]),
            f"{c['differing']:.1f}",
            f"{c['coverage']:.3f} ({c['misses_below']:.3f}, {c['misses_above']:.3f})",
            f"{c['width']:.3f}",
            f"{c['plus_two']:.3f} ({c['plus_two_width']:.3f})",
            f"{c['student_t']:.3f}",
            f"{c['percentile']:.3f}",
            _share(c.get("false_equivalent")),
            _share(c.get("false_degraded")),
        )
        for c in cells
    ]
    return markdown(head, rows)


# Shapes that are alike, in a line each.
GROUPS = {
    "right or wrong, 2 to 30 % lost, 0 or 5 % won": "zero_one_2 zero_one_3 zero_one_5 zero_one_10 "
    "zero_one_both zero_one_many",
    "right or wrong, 15 % lost and 12 % won": "flips",
    "right or wrong, 80 or 95 % of all answers lost": "zero_one_80 zero_one_95",
    "F1, 30 % reworded, 0 to 10 % lost": "f1_reworded f1_lost_5 f1_lost_10",
    "F1, only the longest tenth changes": "f1_longest",
    "scores 0, 0.5 and 1": "halves",
    "ROUGE, all pairs differ, 0 to 10 % lost": "rouge_noise rouge_lost_5 rouge_lost_10",
    "edit similarity, noise on every pair": "similarity",
    "nearly all tie, 2 or 5 % differ": "ties_2 ties_5",
    "three seeds an example": "seeds_5 seeds_f1_5 seeds_f1_shared seeds_f1_shared_2 seeds_f1_mixed seeds_f1_mixed_10",
    "3 to 21 tasks, equal and unequal": "macro_3 macro_10 macro_21 macro_21_f1 macro_unequal",
    "4 tasks, all is lost in one": "macro_small_12 macro_small_40 macro_small_f1 macro_kinds",
    "few scores are large, and only those are lost": "stakes rare_3 macro_rare",
    "a steady small loss with rare gains": "steady_gains",
}


def ranges_table(cells: list[dict]) -> str:
    """A line a kind of scores: coverage from 50 examples on, and the most false verdicts of any size."""
    rows = []
    for about, names in GROUPS.items():
        mine = [c for c in cells if c["shape"] in names.split()]
        from_50 = [c for c in mine if c["clusters"] >= 50]
        coverage = [c["coverage"] for c in from_50]
        tested = [c for c in mine if "false_equivalent" in c]
        rows.append(
            (
                about,
                f"{min(coverage):.3f} to {max(coverage):.3f}",
                f"{min(c['percentile'] for c in from_50):.3f}",
                f"{min(c['student_t'] for c in from_50):.3f}",
                f"{max(c['false_equivalent'] for c in tested):.3f}",
                f"{max(c['false_degraded'] for c in tested):.3f}",
            )
        )
    head = ("scores", "coverage, lowest to highest", "lowest of the percentile bootstrap", "of Student's t")
    return markdown((*head, "most false equivalent", "most false degraded"), rows)


def cliff_summary_table(cells: list[CliffCell]) -> str:
    """Planted cliffs, all places of the grid together."""
    rows = []
    for score, clusters in dict.fromkeys((c.score, c.clusters) for c in cells):
        mine = [c for c in cells if (c.score, c.clusters) == (score, clusters)]
        total = sum(c.reps for c in mine)
        names = ("right", "wider", "wrong", "undetermined")
        shares = (f"{sum(getattr(c, name) for c in mine) / total:.3f}" for name in names)
        rows.append((score, str(clusters), *shares))
    return markdown(("score", "n", "right", "wider", "wrong", "undetermined"), rows)


def exact_table(cells: list[dict]) -> str:
    """For every margin, the worst size."""
    rows = []
    for margin in sorted({c["margin"] for c in cells}):
        mine = [c for c in cells if c["margin"] == margin]
        equivalent = max(mine, key=lambda c: c["false_equivalent"])
        degraded = max(mine, key=lambda c: c["false_degraded"])
        rows.append(
            (
                f"{margin:g}",
                f"{equivalent['false_equivalent']:.4f} (n = {equivalent['clusters']})",
                f"{degraded['false_degraded']:.4f} (n = {degraded['clusters']})",
            )
        )
    return markdown(("margin = share lost", "worst false equivalent", "worst false degraded"), rows)


def family_table(cells: list[dict]) -> str:
    """Rate of at least one false ``equivalent`` among several settings at the margin."""
    rows = []
    for grid, mixes in sorted({(c["grid"], c["mixes"]) for c in cells}):
        mine = [c for c in cells if (c["grid"], c["mixes"]) == (grid, mixes)]
        worst = max(mine, key=lambda c: c["any_false_equivalent"])
        sizes = [c for c in mine if c["clusters"] in (150, 200, 300, 600, 900)]
        rows.append(
            (
                str(grid),
                str(mixes),
                f"{worst['any_false_equivalent']:.3f} (n = {worst['clusters']})",
                *(f"{c['any_false_equivalent']:.3f}" for c in sizes),
            )
        )
    return markdown(("grid points", "mixed", "worst", "n = 150", "200", "300", "600", "900"), rows)


def cliff_table(cells: list[CliffCell]) -> str:
    """Planted cliffs, in shares of the repetitions."""
    names = ("right", "wider", "wrong", "undetermined", "false_equivalent", "false_degraded")
    head = ("score", "n", "planted", *(name.replace("_", " ") for name in names))
    rows = [
        (c.score, str(c.clusters), c.planted, *(f"{getattr(c, name) / c.reps:.3f}" for name in names))
        for c in cells
    ]
    return markdown(head, rows)


def at_margin_table(cells: list[dict]) -> str:
    """A grid point exactly at the margin: how often the cliff says that it holds, that it falls, either."""
    rows = [
        (
            c["score"],
            str(c["clusters"]),
            str(c["levels"]),
            *(_share(c[name]) for name in ("says_holds", "says_degraded")),
            _share(c["says_holds"] + c["says_degraded"]),
            _share(c["undetermined"]),
        )
        for c in cells
    ]
    head = ("score", "n", "levels at the margin", "said to hold", "said to be degraded", "either")
    return markdown((*head, "undetermined"), rows)


def power_table(cases: list[dict]) -> str:
    """Sizes named for a power of 80 percent, with the power measured there."""
    rows = []
    for case in cases:
        sizes = [str(case["n_needed"] or "none"), _share(case["power"])]
        pilots = ", ".join("none" if q is None else f"{q:.0f}" for q in case["pilot_quartiles"])
        rows.append((case["about"], case["verdict"], f"{case['difference']:+.4f}", *sizes, pilots))
    head = ("scores", "verdict", "true difference", "n_needed", "power there")
    return markdown((*head, "n_needed of 60 examples (quartiles)"), rows)


def single_table(cells: list[dict]) -> str:
    """For every plan of looks, the worst error rate of one test over all looks."""
    rows = []
    for looks in dict.fromkeys(tuple(c["looks"]) for c in cells):
        mine = [c for c in cells if tuple(c["looks"]) == looks]
        row = [", ".join(map(str, looks))]
        for field in ("false_equivalent", "false_degraded"):
            worst = max(mine, key=lambda c: c[field])
            mean = sum(c[field] for c in mine) / len(mine)
            row.append(f"{mean:.3f}; worst {worst[field]:.3f} ({worst['shape']})")
        rows.append(tuple(row))
    return markdown(("looks", "false equivalent: mean", "false degraded: mean"), rows)


def saving_table(cells: list[dict]) -> str:
    """What stopping early saves and costs, mean over the planted cliffs of a plan."""
    rows = []
    for score, looks in dict.fromkeys((c["score"], tuple(c["looks"])) for c in cells):
        mine = [c for c in cells if (c["score"], tuple(c["looks"])) == (score, looks)]

        def mean(field: str, mine: list[dict] = mine) -> str:
            return f"{sum(c[field] for c in mine) / len(mine):.3f}"

        names = ("saved", "stopped_early", "right", "right_fixed", "wrong")
        worst = [f"{max(c[name] for c in mine):.3f}" for name in ("false_equivalent", "false_degraded")]
        rows.append((score, ", ".join(map(str, looks)), *(mean(name) for name in names), *worst))
    head = ("score", "looks", "examples saved", "ended early", "right", "right with one look", "wrong")
    return markdown((*head, "worst false equivalent", "worst false degraded"), rows)


def racing_table(cells: list[dict]) -> str:
    """What racing saves beside looks alone, mean over the planted cliffs of a plan, and the worst error rates."""
    rows = []
    for score, looks in dict.fromkeys((c["score"], tuple(c["looks"])) for c in cells):
        mine = [c for c in cells if (c["score"], tuple(c["looks"])) == (score, looks)]
        means = ("rows_looks", "rows_raced", "right_looks", "right_raced", "other_verdicts")
        worst = ("wrong_raced", "false_equivalent_raced", "false_degraded_raced")
        told = [f"{sum(c[name] for c in mine) / len(mine):.3f}" for name in means]
        rows.append(
            (score, ", ".join(map(str, looks)), *told, *(f"{max(c[n] for c in mine):.3f}" for n in worst))
        )
    head = (
        "score",
        "looks",
        "rows run, looks alone",
        "rows run, raced",
        "right, looks alone",
        "right, raced",
    )
    more = ("runs with another verdict", "worst wrong", "worst false equivalent", "worst false degraded")
    return markdown((*head, *more), rows)


def racing_margin_table(cells: list[dict]) -> str:
    """Claims about a grid point exactly at the margin, at any look, with and without racing."""
    names = ("holds_looks", "holds_raced", "degraded_looks", "degraded_raced")
    rows = [
        (
            c["score"],
            ", ".join(map(str, c["looks"])),
            f"L{c['levels']}",
            f"{c['reps']:,}",
            *(f"{c[n]:.3f}" for n in names),
        )
        for c in cells
    ]
    head = ("score", "looks", "point at the margin", "runs", "said to hold, looks alone", "raced")
    return markdown((*head, "said to be degraded, looks alone", "raced"), rows)


def summary(content: dict) -> list[str]:
    """The worst figures of all sections, one line each."""
    cells, exact, samples = content["coverage"], content["exact"], content["samples"]
    from_50 = [c for c in cells if c["clusters"] >= 50]
    others = [c for c in from_50 if c["shape"] != "steady_gains"]
    tested = [c for c in [*cells, *content["margin"]] if "false_equivalent" in c]
    documents, dead = (
        [c for c in samples if ("documents" in c) == of_documents] for of_documents in (True, False)
    )
    at_margin = max(content["cliffs_at_margin"], key=lambda c: c["says_holds"] + c["says_degraded"])

    def worst(rows: list[dict], field: str, pick=max) -> str:
        cell = pick(rows, key=lambda c: c[field])
        name = cell.get("shape") or cell.get("about") or f"margin {cell['margin']:g}"
        size = cell.get("clusters") or cell.get("documents") or cell["per_task"]
        digits = 4 if rows is exact else 3
        return f"{cell[field]:.{digits}f} ({name}, n = {size})"

    either = at_margin["says_holds"] + at_margin["says_degraded"]
    return [
        f"lowest coverage from n = 50: {worst(from_50, 'coverage', min)}; without steady_gains "
        f"{worst(others, 'coverage', min)}",
        f"most false equivalent or no_worse at the margin (alpha 0.05), simulated: {worst(tested, 'false_equivalent')}",
        f"most false degraded, simulated: {worst(tested, 'false_degraded')}",
        f"most false equivalent or no_worse, whole losses, exact: {worst(exact, 'false_equivalent')}",
        f"most false degraded, whole losses, exact: {worst(exact, 'false_degraded')}",
        f"most false equivalent or no_worse where documents are shared: {worst(documents, 'false_equivalent')}; "
        f"most false degraded: {worst(documents, 'false_degraded')}",
        f"most false equivalent or no_worse where tasks cannot react: {worst(dead, 'false_equivalent')}",
        f"most wrong cliffs where a grid point is exactly at the margin: {either:.3f} ({at_margin['score']}, "
        f"L = {at_margin['levels']}, n = {at_margin['clusters']})",
    ]


def samples_table(cells: list[dict]) -> str:
    """Clustered documents, or dead tasks: false ``equivalent`` or ``no_worse`` with the rule, and without."""
    rows = [
        (
            c["about"],
            str(c.get("documents", c.get("per_task"))),
            _share(c["false_equivalent"]),
            _share(c.get("false_degraded")),
            _share(c["false_equivalent_without"]),
        )
        for c in cells
    ]
    return markdown(("sample", "n", "false equivalent", "false degraded", "without the rule"), rows)


def margin_table(cells: list[dict]) -> str:
    """False verdicts with the margin at the true drop: false ``equivalent`` / false ``degraded`` by size."""
    sizes = sorted({c["clusters"] for c in cells})
    rows = []
    for shape in dict.fromkeys(c["shape"] for c in cells):
        mine = {c["clusters"]: c for c in cells if c["shape"] == shape}
        rows.append(
            (
                shape,
                *(
                    f"{mine[n]['false_equivalent']:.3f} / {mine[n]['false_degraded']:.3f}"
                    if n in mine
                    else ""
                    for n in sizes
                ),
            )
        )
    return markdown(("shape", *(f"n = {n}" for n in sizes)), rows)


def ablation_table(cells: list[dict]) -> str:
    """A row a rule: the worst error rates over all shapes and sizes, and the mean power.

    A rule that is not made for some of the cells has the deciding rule's power on its cells beside its own.
    """
    names = list(dict.fromkeys(name for c in cells for name in c["rules"]))
    rows = []
    for name in names:
        mine = [c["rules"] for c in cells if name in c["rules"]]
        row = [name]
        for field in ("false_equivalent", "false_degraded"):
            held = [(c["rules"][name][field], c) for c in cells if field in c["rules"].get(name, {})]
            worst, cell = max(held, key=lambda pair: pair[0])
            row.append(f"{worst:.3f} ({cell['shape']}, n = {cell['clusters']})")
        for field in ("power_no_worse", "power_degraded"):
            beside = f" ({_mean(mine, names[0], field)} decides)" if len(mine) < len(cells) else ""
            row.append(_mean(mine, name, field) + beside)
        rows.append(tuple(row))
    head = (
        "rule",
        "worst false equivalent",
        "worst false degraded",
        "mean power no_worse",
        "mean power degraded",
    )
    return markdown(head, rows)


def _mean(rules: list[dict], name: str, field: str) -> str:
    held = [each[name][field] for each in rules if field in each[name]]
    return f"{sum(held) / len(held):.3f}"
