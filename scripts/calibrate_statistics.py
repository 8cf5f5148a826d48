"""Check the statistics by simulation: coverage, false verdicts, power, and whether a planted cliff is found.

    python scripts/calibrate_statistics.py --out results/calibration
    python scripts/calibrate_statistics.py --quick

Writes a JSON file a section, calibration.md and figures to ``--out`` and prints the tables. The same seed gives
the same files.
"""

import argparse
import gc
import json
import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
from calibration.ablation import ablation_cell
from calibration.figures import draw_figures
from calibration.intervals import coverage_cell, exact_rates, family_rate, margin_cell
from calibration.planted import LEVELS, CliffCell, cliff_cell, cliff_cell_at_margin
from calibration.power import CASES, CURVE, curve, promise
from calibration.racing import RACED_PLANS, racing_at_margin, racing_cell
from calibration.samples import CLUSTERED, DEAD, clustered_cell, dead_cell
from calibration.sequential import PLANS, saving_cell, single_cell
from calibration.shapes import FEW_COUNT, HARD, SHAPES, truth
from calibration.tables import (
    ablation_table,
    at_margin_table,
    cliff_summary_table,
    cliff_table,
    coverage_table,
    exact_table,
    family_table,
    margin_table,
    markdown,
    power_table,
    racing_margin_table,
    racing_table,
    ranges_table,
    samples_table,
    saving_table,
    single_table,
    summary,
)
from rich.progress import track

SECTIONS = (
    "samples",
    "margin",
    "ablation",
    "exact",
    "coverage",
    "power",
    "cliffs",
    "cliffs_at_margin",
    "sequential_tests",
    "sequential_runs",
    "racing",
    "racing_at_margin",
)
RACED = ("racing", "racing_at_margin")  # a page of their own, where only these are asked for
SIZES = (20, 50, 100, 200, 600)
CLIFF_SIZES = (100, 150, 300, 900)
FAMILIES = ((1, 0), (4, 0), (7, 0), (12, 0), (4, 8))  # points of the grid and mixed settings
MARGINS = (0.01, 0.02, 0.03, 0.05, 0.10)


def coverage(sizes: tuple[int, ...], reps: int, seed: int) -> list[dict]:
    """All shapes at all sizes that hold three examples of every task."""
    cells = []
    for number, shape in enumerate(track(SHAPES + FEW_COUNT + HARD, description="coverage")):
        rng, mean = np.random.default_rng([seed, 1, number]), truth(shape)
        for clusters in sizes:
            if clusters >= min(50, 3 * len(shape.tasks)):
                cells.append(coverage_cell(shape, clusters, mean, reps, rng))
    return cells


def exact(quick: bool) -> tuple[list[dict], list[dict]]:
    """Error rates of single tests, and of families, by summing over all outcomes."""
    sizes = range(50, 101, 25) if quick else [*range(20, 300, 2), *range(300, 901, 10)]
    single = [exact_rates(margin, n, 0.05) for margin in MARGINS for n in track(sizes, f"exact {margin:g}")]
    wide = (100, 150) if quick else [*range(60, 300, 5), *range(300, 901, 50)]
    family = [family_rate(0.03, n, *parts) for parts in FAMILIES for n in wide]
    return single, family


def samples(reps: int, quick: bool, seed: int) -> list[dict]:
    """Clustered documents, and tasks that cannot react."""
    rng = np.random.default_rng([seed, 6])
    documents, per_task = ((40,), (60,)) if quick else ((40, 100, 200, 400), (60, 180))
    cells = [clustered_cell(*kind, n, 4 * reps, rng) for kind in CLUSTERED for n in documents]
    for number, kind in enumerate(track(DEAD, "dead tasks")):
        for n in per_task:
            cells.append(dead_cell(*kind, n, 3 * reps // 5, np.random.default_rng([seed, 6, number, n])))
    return cells


def at_the_margin(reps: int, quick: bool, seed: int) -> list[dict]:
    """Single tests on all shapes that lose something, the margin at the true drop."""
    cells = []
    for number, shape in enumerate(track(SHAPES + FEW_COUNT + HARD, description="at the margin")):
        rng, mean = np.random.default_rng([seed, 8, number]), truth(shape)
        for clusters in (50,) if quick else (20, 50, 100, 200):
            if mean < 0 and clusters >= min(50, 3 * len(shape.tasks)):
                cells.append(margin_cell(shape, clusters, mean, reps, rng))
    return cells


def ablation(reps: int, quick: bool, seed: int) -> list[dict]:
    """Every rule on every shape."""
    cells = []
    for number, shape in enumerate(track(SHAPES + FEW_COUNT + HARD, description="ablation")):
        rng, mean = np.random.default_rng([seed, 7, number]), truth(shape)
        for clusters in (50,) if quick else (50, 150):
            if clusters >= 3 * len(shape.tasks):
                cells.append(ablation_cell(shape, clusters, mean, reps // 2, rng))
    return cells


def cliffs(sizes: tuple[int, ...], reps: int, seed: int) -> list:
    """Planted cliffs at every place of the grid, and none."""
    plan = [(s, n, e) for s in ("zero_one", "f1") for n in sizes for e in (None, *range(len(LEVELS) - 1))]
    rng = np.random.default_rng([seed, 2])
    return [cliff_cell(*cell, reps, rng) for cell in track(plan, description="planted cliffs")]


def cliffs_at_margin(reps: int, quick: bool, seed: int) -> list[dict]:
    """One grid point exactly at the margin: the highest, the middle one, the lowest."""
    sizes, places = ((150,), (3,)) if quick else (CLIFF_SIZES, (0, len(LEVELS) // 2, len(LEVELS) - 1))
    plan = [(s, n, e) for s in ("zero_one", "f1") for n in sizes for e in places]
    rng = np.random.default_rng([seed, 9])
    return [cliff_cell_at_margin(*cell, reps, rng) for cell in track(plan, description="at the margin")]


def power(reps: int, pilots: int, seed: int) -> list[dict]:
    """Power curves, and the power at the sizes that a report names."""
    out = []
    for number, (name, about, draw, verdict) in enumerate(track(CASES, description="power")):
        rng = np.random.default_rng([seed, 3, number])
        row = {"case": name, "about": about, **promise(draw, verdict, reps, pilots, rng)}
        out.append({**row, "sizes": list(CURVE), "curve": curve(draw, verdict, reps, rng)})
    return out


def sequential_tests(reps: int, quick: bool, seed: int) -> list[dict]:
    """Single tests at the margin over all looks."""
    cells = []
    for number, shape in enumerate(track(SHAPES, description="sequential tests")):
        mean = truth(shape)
        for place, sizes in enumerate(PLANS[1:2] if quick else PLANS):
            if mean < -1e-3 and sizes[0] >= 3 * len(shape.tasks):
                rng = np.random.default_rng([seed, 4, number, place])
                cells.append(single_cell(shape, mean, sizes, reps, rng))
    return cells


def sequential_runs(reps: int, quick: bool, seed: int) -> list[dict]:
    """Whole runs on planted cliffs."""
    edges = (3,) if quick else (None, *range(len(LEVELS) - 1))
    plans = PLANS[1:2] if quick else PLANS[1:]
    runs = [(score, sizes, edge) for score in ("zero_one", "f1") for sizes in plans for edge in edges]
    return [
        saving_cell(*run, reps, np.random.default_rng([seed, 5, number]))
        for number, run in enumerate(track(runs, description="sequential runs"))
    ]


def racing(reps: int, quick: bool, seed: int) -> list[dict]:
    """Whole runs on planted cliffs, raced and not."""
    edges = (3,) if quick else (None, *range(len(LEVELS) - 1))
    plans = RACED_PLANS[:1] if quick else RACED_PLANS
    runs = [(score, sizes, edge) for score in ("zero_one", "f1") for sizes in plans for edge in edges]
    return [
        racing_cell(*run, reps, np.random.default_rng([seed, 10, number]))
        for number, run in enumerate(track(runs, description="racing"))
    ]


def racing_margins(reps: int, quick: bool, seed: int) -> list[dict]:
    """One grid point exactly at the margin: the highest, the middle one, the lowest."""
    places = (3,) if quick else (0, len(LEVELS) // 2, len(LEVELS) - 1)
    plans = RACED_PLANS[:1] if quick else RACED_PLANS[:2]
    runs = [(score, sizes, edge) for score in ("zero_one", "f1") for sizes in plans for edge in places]
    return [
        racing_at_margin(*run, reps, np.random.default_rng([seed, 11, number]))
        for number, run in enumerate(track(runs, description="racing at the margin"))
    ]


def measure(section: str, run: dict, quick: bool) -> dict:
    """The rows of a section, and of what belongs to it."""
    reps, cliff_reps, seed = run["reps"], run["cliff_reps"], run["seed"]
    if section == "exact":
        return dict(zip(("exact", "family"), exact(quick), strict=True))
    rows = {
        "samples": lambda: samples(reps, quick, seed),
        "margin": lambda: at_the_margin(run["interval_reps"], quick, seed),
        "ablation": lambda: ablation(reps, quick, seed),
        "coverage": lambda: coverage((50, 100) if quick else SIZES, run["interval_reps"], seed),
        "power": lambda: power(reps, 5 if quick else 100, seed),
        "cliffs": lambda: [asdict(c) for c in cliffs((150,) if quick else CLIFF_SIZES, cliff_reps, seed)],
        "cliffs_at_margin": lambda: cliffs_at_margin(run["interval_reps"], quick, seed),
        "sequential_tests": lambda: sequential_tests(reps, quick, seed),
        "sequential_runs": lambda: sequential_runs(run["run_reps"], quick, seed),
        "racing": lambda: racing(run["cliff_reps"], quick, seed),
        "racing_at_margin": lambda: racing_margins(run["reps"], quick, seed),
    }[section]()
    return {section: rows}


def _kept(section: str, run: dict, out: Path | None) -> dict:
    """A section of an earlier run with the same seed and repetitions."""
    kept = {}
    for name in ("exact", "family") if section == "exact" else (section,):
        path = (out or Path()) / f"{name}.json"
        if not path.exists():
            raise SystemExit(f"{path} does not exist; leave --sections out once")
        held = json.loads(path.read_text())
        if any(held.get(key) != value for key, value in run.items()):
            raise SystemExit(f"{path} is of another seed or number of repetitions; leave --sections out")
        kept[name] = held[name]
    return kept


def page(content: dict, run: dict) -> str:
    """All tables as one Markdown page."""
    fine, coarse = (1.96 * math.sqrt(0.05 * 0.95 / run[key]) for key in ("interval_reps", "reps"))
    about = (
        f"{run['interval_reps']} repetitions a row of the intervals: a true 0.95 shows as 0.95 +- {fine:.3f}, a true "
        f"0.05 as 0.05 +- {fine:.3f}. {run['reps']} a row elsewhere (+- {coarse:.3f}), {run['cliff_reps']} per "
        f"planted cliff, {run['run_reps']} per sequential run."
    )
    edge = {shape.name for shape in FEW_COUNT}
    cells = [cell for cell in content["coverage"] if cell["shape"] not in edge]
    few = [cell for cell in content["coverage"] if cell["shape"] in edge]
    planted = [CliffCell(**cell) for cell in content["cliffs"]]
    return "\n\n".join(
        [
            "# Calibration of the statistics",
            about,
            "\n".join(f"- {line}" for line in summary(content)),
            markdown(("shape", "scores"), [(shape.name, shape.about) for shape in SHAPES + FEW_COUNT + HARD]),
            "## Kinds of scores: coverage of the 0.95 interval from n = 50, false verdicts at the margin at any size",
            ranges_table(content["coverage"]),
            "## Intervals, nominal 0.95",
            coverage_table(cells),
            "## Intervals where few pairs count",
            "However many pairs differ, few of them make up the difference, or keep their score.",
            coverage_table(few),
            "## Examples that share a document, and tasks that cannot react, at the margin of 0.03",
            samples_table(content["samples"]),
            "## Single tests with the margin at the true drop: false `equivalent` or `no_worse` / false `degraded`",
            margin_table(content["margin"]),
            "## What each part of the rules is worth",
            "The worst error rate with the margin at the true drop, and the mean power with the margin 0.03 off it.",
            ablation_table(content["ablation"]),
            "## Whole losses at the margin, all outcomes summed",
            exact_table(content["exact"]),
            "## Several settings at once, all of them exactly at the margin of 0.03, whole losses",
            "At least one false `equivalent` after the adjustment for many settings.",
            family_table(content["family"]),
            "## Power and sample sizes, margin 0.03",
            power_table(content["power"]),
            "## Planted cliffs",
            cliff_summary_table(planted),
            cliff_table(planted),
            "## Cliffs with one grid point exactly at the margin",
            "Both claims about that point are errors: that it holds, and that it is degraded.",
            at_margin_table(content["cliffs_at_margin"]),
            "## Sequential: one test, the true drop at the margin, any of the looks",
            single_table(content["sequential_tests"]),
            "## Sequential: whole runs on planted cliffs",
            "Mean over the planted cliffs; the worst rate of at least one false verdict among the settings.",
            saving_table(content["sequential_runs"]),
            *racing_page(content),
        ]
    )


def racing_page(content: dict) -> list[str]:
    """The tables of raced runs."""
    return [
        "## Raced: whole runs on planted cliffs",
        "Shares of the planned rows, the reference's among them. `degraded` settings leave at the look that shows it.",
        racing_table(content["racing"]),
        "## Raced: a grid point exactly at the margin, said at any look",
        racing_margin_table(content["racing_at_margin"]),
    ]


def write_sections(content: dict, out: Path, run: dict) -> None:
    """One JSON file a section."""
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in content.items():
        body = json.dumps({**run, name: rows}, indent=1, sort_keys=True)
        (out / f"{name}.json").write_text(body + "\n")


def write(content: dict, text: str, out: Path, run: dict) -> None:
    """The JSON files, the page and the figures."""
    write_sections(content, out, run)
    (out / "calibration.md").write_text(text + "\n")
    draw_figures(content, [CliffCell(**cell) for cell in content["cliffs"]], out)


def _rounded(value):
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def main() -> None:
    """Run the simulation that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--interval-reps", type=int, default=2000, help="repetitions per interval (2000)")
    parser.add_argument(
        "--reps", type=int, default=500, help="repetitions per shape and size elsewhere (500)"
    )
    parser.add_argument("--cliff-reps", type=int, default=100, help="repetitions per planted cliff (100)")
    parser.add_argument("--run-reps", type=int, default=30, help="repetitions per sequential run (30)")
    parser.add_argument("--out", type=Path, help="folder for the JSON files, calibration.md and the figures")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="few repetitions and sizes: does it run?")
    parser.add_argument("--sections", nargs="+", default=SECTIONS, choices=SECTIONS, metavar="SECTION")
    args = parser.parse_args()
    run = {"seed": args.seed, "interval_reps": args.interval_reps, "reps": args.reps}
    run |= {"cliff_reps": args.cliff_reps, "run_reps": args.run_reps}
    if args.quick:
        run |= {"interval_reps": 100, "reps": 100, "cliff_reps": 20, "run_reps": 20}

    gc.freeze()
    content = {}
    for section in (section for section in SECTIONS if section in args.sections):
        found = _rounded(measure(section, run, args.quick))
        content |= found
        if args.out:
            write_sections(found, args.out, run)
    if set(args.sections) <= set(RACED):
        for section in (section for section in RACED if section not in args.sections):
            content |= _kept(section, run, args.out)
        text = "\n\n".join(racing_page(content))
        print(text)
        if args.out:
            (args.out / "racing.md").write_text(f"# Raced runs\n\n{text}\n")
        return
    for section in (section for section in SECTIONS if section not in args.sections):
        content |= _kept(section, run, args.out)
    text = page(content, run)
    print(text)
    if args.out:
        write(content, text, args.out, run)


if __name__ == "__main__":
    main()
