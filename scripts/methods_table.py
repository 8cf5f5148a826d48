"""The tables of docs/methods.md: what each method is and costs, from the configuration, and what was measured.

    python scripts/methods_table.py            # writes the tables anew
    python scripts/methods_table.py --check    # exit 1 where they are not current

What was measured is in the reports under results/methods, where there are any.
"""

import json
import re
import sys
from pathlib import Path

from omegaconf import OmegaConf

from semkv_bench.config.choices import choice_file, names_of
from semkv_bench.config.compose import build
from semkv_bench.grid.cost import LayerShape, SideShape
from semkv_bench.settings.sets import uniform_settings

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "methods.md"
# By report, what methods have there; reports of one kind share a column.
REPORTS = {
    "equal_windows": "without windows",
    "as_published": "as published",
    "further": "as published",
    "cq": "as published",
}
TABLES = {
    "methods": ("<!-- table of methods: scripts/methods_table.py -->", "<!-- end of the table -->"),
    "scores": ("<!-- scores at equal bits: scripts/methods_table.py -->", "<!-- end of the scores -->"),
    "formats": ("<!-- formats: scripts/methods_table.py -->", "<!-- end of the formats -->"),
    "windows": ("<!-- what windows buy: scripts/methods_table.py -->", "<!-- end of the windows -->"),
}
TOKENS = (1000, 4000, 32000)
SHAPE = SideShape(8, 128)

# Levels of keys and of values that are published, or usual.
POINTS = {
    "affine": (16, 16), "turboquant": (16, 16), "turboquant_prod": (16, 16), "turboquant_channel_split": (4, 4),
    "kivi": (4, 4), "gear": (4, 4), "gear_l": (4, 4), "zipcache": (4, 4), "mikv": (4, 4), "kitty": (4, 4),
    "kvarn": (16, 4), "ott": (4, 4), "nsnquant": (4, 4), "kvquant": (8, 8), "skvq": (4, 3), "rotatekv": (4, 4),
    "cq": (4, 4), "aquakv": (4, 4),
}  # fmt: skip

NONE = "–"
# What was left out and why; what the tests compare with (none: bits, windows and hard values alone are tested).
NOTES = {
    "affine": ("nothing", "the definition, element by element; Triton kernels bit for bit"),
    "turboquant": ("nothing", "Max's table of optimal codes; distortion within 1 %"),
    "turboquant_prod": ("nothing", "unbiased inner products"),
    "turboquant_channel_split": ("nothing", "hand-derived values"),
    "kivi": (
        "its kernels: coding is simulated or packed here",
        "`optimum-quanto`, with `code.arithmetic=float16`",
    ),
    "hf_quanto": (
        "coding old tokens again (drift), axis -1 and HQQ",
        "`optimum-quanto`, with `code.arithmetic=float16`",
    ),
    "hadamard": ("nothing", NONE),
    "quarot": ("rotation folded into the weights, which changes no value", NONE),
    "saw_int4": ("its ablation with centroids", NONE),
    "atom": ("nothing of the cache", NONE),
    "qserve": ("folding the factors into the weights, which changes no value", NONE),
    "qaq": (
        "an error of one's own choice, which ties keys and values: it is solved for the bits, in each layer and side; "
        "a mean over the last 5 queries stands for their maximum",
        "hand-derived level counts; `Uniform`, vector by vector",
    ),
    "intactkv": ("training of the pivots", NONE),
    "gear": ("its unseeded start; the KCVT backbone", NONE),
    "gear_l": ("as gear", NONE),
    "mikv": ("the balancer of channels, which needs queries", NONE),
    "zipcache": ("coding the cache again every 100 tokens (drift); probes: attention is that of all", NONE),
    "kvarn": ("nothing", NONE),
    "kitty": ("its kernel's quarter of the channels: `quantizer.keys.channels.share=0.25`", NONE),
    "ott": ("values of pivots, which are coded", NONE),
    "polarquant": ("nothing", NONE),
    "nsnquant": ("its own codebook, which is not published, and factors in few bits", NONE),
    "kvquant": (
        "a fixed text and 2,048 tokens a sequence (they are options); a token has at most 1 % outliers",
        "exhaustive search of the best levels; quantiles",
    ),
    "skvq": ("a search of the clip for every group, smoothing", "clusters of planted channels"),
    "rotatekv": ("nothing; more or fewer heads than it joins are refused", NONE),
    "wkvquant_lite": ("training of shift and factor, its contribution", NONE),
    "cq": ("its text of 16 times 2,048 tokens, which is an option", "nearest points"),
    "aquakv": (
        "its table of points: they are a k-means of normal pairs; padding to groups of 1,024 (one norm a token, the "
        "largest Hadamard matrix that divides the row); a coder of its own for the first layer, which stays whole",
        "planted linear images of the layer below",
    ),
}
FORMAT = ("see below", "see below")


def main() -> int:
    """Write the table, or tell whether it is current."""
    before = PAGE.read_text()
    after = renewed(before)
    if "--check" in sys.argv[1:]:
        return int(before != after)
    PAGE.write_text(after)
    return 0


def renewed(page: str) -> str:
    """The page with its tables as they are now."""
    found = {name: report for name in REPORTS if (report := _report(name))}
    made = {
        "methods": table(found),
        "scores": scores(found),
        "formats": formats(found),
        "windows": windows(found),
    }
    for name, (begin, end) in TABLES.items():
        head, _, rest = page.partition(begin)
        _, _, tail = rest.partition(end)
        page = f"{head}{begin}\n{made[name]}\n{end}{tail}"
    return page


def _report(name: str) -> dict | None:
    path = ROOT / "results" / "methods" / name / "report.json"
    return json.loads(path.read_text()) if path.exists() else None


def _markdown(lines: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [lines[0], ["---"] * len(lines[0]), *lines[1:]])


def table(reports: dict[str, dict]) -> str:
    """The rows of all methods, as Markdown."""
    titles = ["`quantizer=`", "what it is", "left out, and why", "oracle in the tests", "levels"]
    titles += [f"bits at {tokens:,}" for tokens in TOKENS]
    models = {REPORTS[name]: report["model"] for name, report in reports.items()}
    titles += [f"cliff of {model}, code bits, {kind}" for kind, model in models.items()]
    return _markdown([titles, *(_row(name, reports) for name in names_of("quantizer"))])


def scores(reports: dict[str, dict]) -> str:
    """What every method scores at equal bits of the whole cache, by its own grid, as Markdown."""
    at = sorted({bits for report in reports.values() for bits in report["methods"]["at_bits"]})
    lines = [["method", *(f"{bits:g} bits" for bits in at), "bits of its grid"]]
    seen = set()
    for name, report in reports.items():
        told = report["methods"]
        for method in told["methods"]:
            if method in seen:  # the same method on the same prompts
                continue
            seen.add(method)
            points = {point["bits"]: point for point in told["points"] if point["method"] == method}
            span = next(iter(points.values()))
            if span["least_bits"] == span["most_bits"]:
                continue
            found = [points[bits]["score"] if bits in points else None for bits in at]
            cells = [NONE if score is None else f"{score:.3f}" for score in found]
            ends = f"{span['least_bits']:.2f} to {span['most_bits']:.2f}"
            lines.append([f"`{method}`, {REPORTS[name]}", *cells, ends])
    return _markdown(lines) if reports else ""


def formats(reports: dict[str, dict]) -> str:
    """What the formats of serving engines score, as Markdown."""
    lines = [["format", "bits of the whole cache", "score", "difference [95% interval]", "verdict", "KL"]]
    rows = [row for report in reports.values() for row in report["settings"] if _is_format(report, row)]
    for row in sorted(rows, key=lambda row: row["cache_bits"]):
        low, high = row["diff_ci"]
        lines.append(
            [
                f"`{row['setting']}`",
                f"{row['cache_bits']:.2f}",
                f"{row['score']:.3f}",
                f"{row['diff']:+.3f} [{low:+.3f}, {high:+.3f}]",
                row["verdict"],
                f"{row['kl']:.2g}",
            ]
        )
    return _markdown(lines) if rows else ""


def _is_format(report: dict, row: dict) -> bool:
    """Is ``row`` the only setting of its method?"""
    return (
        row["kind"] == "uniform" and sum(row["quantizer"] == r["quantizer"] for r in report["settings"]) == 1
    )


def windows(reports: dict[str, dict]) -> str:
    """Affine without a window, and with the newest 128 tokens in 16 bits, as Markdown."""
    if not {"equal_windows", "as_published"} <= set(reports):
        return ""
    lines = [["levels", "score, no window", "bits", "score, newest 128 in 16 bits", "bits"]]
    plain, windowed = (
        {row["setting"]: row for row in reports[name]["settings"]}
        for name in ("equal_windows", "as_published")
    )
    for setting, row in plain.items():
        other = windowed.get(setting.replace("affine-", "affine[recent128]-"))
        if setting.startswith("affine-") and other is not None:
            cells = [f"{row['score']:.3f}", f"{row['cache_bits']:.2f}"]
            cells += [f"{other['score']:.3f}", f"{other['cache_bits']:.2f}"]
            lines.append([setting.removeprefix("affine-L"), *cells])
    told = (
        "What a window buys by itself: affine at the same levels, and with its newest 128 tokens in 16 bits."
    )
    return f"{told}\n\n{_markdown(lines)}"


def _row(name: str, reports: dict[str, dict]) -> list[str]:
    path = choice_file("quantizer", name)
    made = build(OmegaConf.load(path), "quantizer")
    keys, values = made.of_side("keys"), made.for_values()
    fixed = keys.fixed_levels is not None
    points = POINTS.get(name, (16, 16))
    first, second = (side.fixed_levels or count for side, count in zip((keys, values), points, strict=True))
    (setting,) = uniform_settings(keys, values, [first], None, second)
    costs = [setting.planned_layer(LayerShape(SHAPE, SHAPE), tokens) for tokens in TOKENS]
    told = path.read_text().splitlines()[0].removeprefix("# ").replace("|", r"\|")
    left, oracle = NOTES.get(name, FORMAT if fixed or name.startswith(("ggml", "mlx")) else ("", ""))
    levels = "" if fixed and first == 256 else str(first) if first == second else f"{first}/{second}"
    bits = [f"{cost.key_cache_bits:.3f} / {cost.value_cache_bits:.3f}" for cost in costs]
    cliffs = {REPORTS[column]: NONE for column in reports}
    for column, report in reports.items():
        if cliffs[REPORTS[column]] == NONE:
            cliffs[REPORTS[column]] = _measured(name, report, column)
    return [f"`{name}`", told, left, oracle, levels, *bits, *cliffs.values()]


def _measured(name: str, report: dict, column: str) -> str:
    """Where a method's cliff is, or what became of a format."""
    single = next((r for r in report["settings"] if r["quantizer"] == name and _is_format(report, r)), None)
    labels = [] if single else [label for label in report["cliffs"] if re.split(r"[\[+]", label)[0] == name]
    # As published is without options.
    if REPORTS[column] == "as published":
        labels = [label for label in labels if "[" not in label]
    if labels:
        return _cliff(report["cliffs"][labels[0]])
    row = next((row for row in report["settings"] if row["setting"] == name), None)
    return NONE if row is None else f"{row['verdict'].replace('_', ' ')} ({row['score']:.3f})"


def _cliff(cliff: dict) -> str:
    if cliff["status"] == "located":
        return f"({cliff['lower_bits']:.2f}, {cliff['upper_bits']:.2f}]"
    return cliff["status"].replace("_", " ")


if __name__ == "__main__":
    sys.exit(main())
