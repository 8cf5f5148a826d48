"""Check the statistics by simulation: coverage, false verdicts, and whether a planted cliff is found.

    python scripts/calibrate_statistics.py --reps 2000 --out results/calibration
    python scripts/calibrate_statistics.py --quick

Writes calibration.json and calibration.md to ``--out`` and prints the tables.
"""

import argparse
import gc
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from rich.progress import track
from scipy import stats

from semkv_bench.stats import StatsOptions, analyze
from semkv_bench.stats.bootstrap import percentile_interval, resample_means
from semkv_bench.stats.guarded import guarded_interval, moments, p_above, p_below

SIZES = (20, 50, 100, 300, 900)
CONFIDENCE, ALPHA = 0.95, 0.05
LEVELS = (16, 8, 6, 5, 4, 3, 2)

Draw = Callable[[np.random.Generator, tuple[int, int]], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Shape:
    """How paired scores look: ``draw`` gives (full, setting) of a given shape; ``tasks`` how clusters split."""

    name: str
    about: str
    draw: Draw
    tasks: tuple[int, ...] = (1,)

    def codes(self, clusters: int) -> np.ndarray:
        """Task of each cluster; ``tasks`` are the relative sizes, every task gets at least one cluster."""
        ends = np.round(np.cumsum(self.tasks) / sum(self.tasks) * clusters).astype(int)
        return np.searchsorted(ends, np.arange(clusters), side="right")


def zero_one(loss: float, gain: float = 0.0, accuracy: float = 0.6) -> Draw:
    """Right or wrong; ``loss`` and ``gain`` are shares of all pairs."""

    def draw(rng, shape):
        full = (rng.random(shape) < accuracy).astype(float)
        u = rng.random(shape)
        lost, won = (full == 1) & (u < loss / accuracy), (full == 0) & (u < gain / (1 - accuracy))
        return full, np.where(lost, 0.0, np.where(won, 1.0, full))

    return draw


def f1(change: float, loss: float) -> Draw:
    """F1 against short answers: many 0 and 1, some between; some answers reworded, some lost."""

    def draw(rng, shape):
        u = rng.random(shape)
        full = np.where(u < 0.25, 0.0, np.where(u < 0.6, 1.0, rng.beta(2, 2, shape)))
        v, w, up = rng.random(shape), rng.random(shape), rng.random(shape) < 0.5
        reworded = np.where(up, full + (1 - full) * w * 0.25, full * (1 - w * 0.5))
        return full, np.where(v < loss, 0.0, np.where(v < loss + change, reworded, full))

    return draw


def rouge(noise: float, loss: float) -> Draw:
    """ROUGE-L of summaries: around 0.27, every pair differs a little, some summaries are lost."""

    def draw(rng, shape):
        full = rng.beta(6, 16, shape)
        near = np.clip(full + noise * rng.standard_normal(shape), 0, 1)
        return full, np.where(rng.random(shape) < loss, 0.0, near)

    return draw


def ties(rate: float) -> Draw:
    """Nearly all pairs tie; four in five of the others lose part of the score, one gains part."""

    def draw(rng, shape):
        full, part = rng.beta(2, 1, shape), rng.random(shape)
        differs, down = rng.random(shape) < rate, rng.random(shape) < 0.8
        return full, np.where(differs, np.where(down, full * (1 - part), full + (1 - full) * part), full)

    return draw


def seeds(loss: float) -> Draw:
    """Three seeds an example: whether the example is at risk is shared, whether it is lost is not."""

    def draw(rng, shape):
        full = (rng.random(shape) < 0.6).astype(float)
        at_risk = rng.random(shape) < 2 * loss / 0.6
        lost = (rng.random((3, *shape)) < 0.5).mean(axis=0)
        return full, full * (1 - at_risk * lost)

    return draw


SHAPES = (
    Shape("zero_one_2", "0/1, 2 % of pairs lose the whole score", zero_one(0.02)),
    Shape("zero_one_5", "0/1, 5 % of pairs lose the whole score", zero_one(0.05)),
    Shape("zero_one_10", "0/1, 10 % of pairs lose the whole score", zero_one(0.10)),
    Shape("zero_one_both", "0/1, 10 % lose, 5 % gain", zero_one(0.10, 0.05)),
    Shape("zero_one_many", "0/1, 30 % lose, 5 % gain", zero_one(0.30, 0.05)),
    Shape("f1_reworded", "F1, 30 % reworded, none lost", f1(0.3, 0.0)),
    Shape("f1_lost_5", "F1, 30 % reworded, 5 % lost", f1(0.3, 0.05)),
    Shape("f1_lost_10", "F1, 30 % reworded, 10 % lost", f1(0.3, 0.10)),
    Shape("rouge_noise", "ROUGE, all differ by 0.05, none lost", rouge(0.05, 0.0)),
    Shape("rouge_lost_5", "ROUGE, all differ by 0.05, 5 % lost", rouge(0.05, 0.05)),
    Shape("rouge_lost_10", "ROUGE, all differ by 0.10, 10 % lost", rouge(0.10, 0.10)),
    Shape("ties_2", "2 % of pairs differ in part of the score", ties(0.02)),
    Shape("ties_5", "5 % of pairs differ in part of the score", ties(0.05)),
    Shape("seeds_5", "three seeds an example, 5 % lost, shared risk", seeds(0.05)),
    Shape("macro_3", "3 tasks, 0/1, 10 % lose", zero_one(0.10), (1,) * 3),
    Shape("macro_10", "10 tasks, F1, 5 % lost", f1(0.3, 0.05), (1,) * 10),
    Shape("macro_21", "21 tasks, 0/1, 5 % lose", zero_one(0.05), (1,) * 21),
    Shape("macro_21_f1", "21 tasks, F1, 5 % lost", f1(0.3, 0.05), (1,) * 21),
    Shape(
        "macro_unequal", "6 tasks of sizes 1:1:2:2:4:4, 0/1, 10 % lose", zero_one(0.10), (1, 1, 2, 2, 4, 4)
    ),
)


def truth(shape: Shape) -> float:
    """Mean difference, from four million pairs."""
    full, setting = shape.draw(np.random.default_rng(12345), (4_000_000, 1))
    return float((setting - full).mean())


def coverage_cell(shape: Shape, clusters: int, mean: float, reps: int, rng: np.random.Generator) -> dict:
    """One shape at one size: how often each interval holds the truth, and how often tests err at the margin."""
    tasks = shape.codes(clusters)
    full, setting = shape.draw(rng, (clusters, reps))
    difference = setting - full
    m = moments(difference, full, tasks, "macro")
    low, high = guarded_interval(m, CONFIDENCE)
    resampled = resample_means(difference, tasks, "macro", 1000, 0)
    plain = percentile_interval(resampled, CONFIDENCE)
    half = stats.t.isf((1 - CONFIDENCE) / 2, m.df) * np.sqrt(m.variance / m.n_eff)
    two = _plus_two(m.n_eff, m.mean, m.variance)
    cell = {
        "shape": shape.name,
        "clusters": clusters,
        "differing": float((np.abs(difference) > 1e-12).sum(axis=0).mean()),
        "true_difference": mean,
        "coverage": _covers((low, high), mean),
        "misses_below": float((low > mean).mean()),
        "misses_above": float((high < mean).mean()),
        "width": float((high - low).mean()),
        "student_t": _covers((m.mean - half, m.mean + half), mean),
        "plus_two": _covers(two, mean),
        "plus_two_width": float((two[1] - two[0]).mean()),
        "percentile": _covers(plain, mean),
    }
    if mean < 0:  # the margin is put where the truth is, so both verdicts are errors
        equivalent = (p_above(m, mean) < ALPHA) & (p_below(m, -mean) < ALPHA)
        cell["false_equivalent"] = float(equivalent.mean())
        cell["false_degraded"] = float((p_below(m, mean) < ALPHA).mean())
    return cell


def _covers(bounds: tuple[np.ndarray, np.ndarray], mean: float) -> float:
    return float(((bounds[0] <= mean) & (mean <= bounds[1])).mean())


def _plus_two(n: np.ndarray, mean: np.ndarray, variance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Interval with one pair at -1 and one at +1 added, as they stand."""
    center = n * mean / (n + 2)
    square = (n - 1) * variance + n * (mean - center) ** 2 + (1 + center) ** 2 + (1 - center) ** 2
    half = stats.t.isf((1 - CONFIDENCE) / 2, n + 1) * np.sqrt(square / ((n + 1) * (n + 2)))
    return center - half, center + half


@dataclass
class CliffCell:
    """How often the cliff of planted records was found."""

    score: str
    clusters: int
    planted: str
    reps: int = 0
    right: int = 0
    wider: int = 0
    wrong: int = 0
    undetermined: int = 0
    false_equivalent: int = 0
    false_degraded: int = 0


def cliff_cell(score: str, clusters: int, edge: int | None, reps: int, rng: np.random.Generator) -> CliffCell:
    """Plant a cliff below ``LEVELS[edge]`` (None: no cliff) and analyse ``reps`` sets of records.

    Right: exactly the planted interval, or ``below_grid`` where none was planted. Wider: an interval around
    it. False verdicts count repetitions with at least one wrong ``equivalent``, or ``degraded``.
    """
    planted = "none" if edge is None else f"({LEVELS[edge + 1]}, {LEVELS[edge]}] levels"
    cell = CliffCell(score, clusters, planted)
    options = StatsOptions(resamples=200)
    bits = [math.log2(level) for level in LEVELS]
    for _ in range(reps):
        report = analyze(planted_records(score, clusters, edge, rng), options)
        cliff = report["cliff"]
        low, high = cliff["lower_bits"], cliff["upper_bits"]
        expected = (None, bits[-1]) if edge is None else (bits[edge + 1], bits[edge])
        cell.reps += 1
        if cliff["status"] == "undetermined":
            cell.undetermined += 1
        elif (low, high) == expected:
            cell.right += 1
        elif cliff["status"] == "located" and edge is not None and low <= expected[0] and high >= expected[1]:
            cell.wider += 1
        else:
            cell.wrong += 1
        falls = {f"L{level}" for level in LEVELS[len(LEVELS) if edge is None else edge + 1 :]}
        verdicts = {row["setting"]: row["verdict"] for row in report["settings"]}
        holding = ("equivalent", "floor")
        cell.false_equivalent += any(verdicts[name] in holding for name in falls)
        cell.false_degraded += any(v == "degraded" for name, v in verdicts.items() if name not in falls)
    return cell


def planted_records(score: str, clusters: int, edge: int | None, rng: np.random.Generator) -> pd.DataFrame:
    """Records of three tasks: no drop above the cliff; 10, 25, 50, ... % of the answers lost below it."""
    if score == "zero_one":
        full = (rng.random(clusters) < 0.7).astype(float)
    else:
        u = rng.random(clusters)
        full = np.where(u < 0.25, 0.0, np.where(u < 0.6, 1.0, rng.beta(2, 2, clusters)))
    columns = {"full": full}
    for place, level in enumerate(LEVELS):
        below = 0 if edge is None else max(0, place - edge)
        lost = (0.0, 0.15, 0.3, 0.5, 0.7, 0.9, 0.95)[below]
        near = full
        if score != "zero_one":
            moved = rng.random(clusters) < 0.2
            near = np.where(moved, np.clip(full + 0.1 * rng.standard_normal(clusters), 0, 1), full)
        columns[f"L{level}"] = np.where(rng.random(clusters) < lost, 0.0, near)
    wide = pd.DataFrame(columns)
    wide["task"], wide["example_id"] = [f"task{i % 3}" for i in range(clusters)], np.arange(clusters)
    long = wide.melt(["task", "example_id"], var_name="setting", value_name="score")
    levels = long["setting"].str.removeprefix("L")
    long["code_bits"] = [16.0 if name == "full" else math.log2(int(name)) for name in levels]
    return long


def coverage_table(cells: list[dict]) -> str:
    """Markdown table of the coverage cells."""
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
    return _markdown(head, rows)


def cliff_table(cells: list[CliffCell]) -> str:
    """Markdown table of the cliff cells, in shares of the repetitions."""
    names = ("right", "wider", "wrong", "undetermined", "false_equivalent", "false_degraded")
    head = ("score", "n", "planted", *(name.replace("_", " ") for name in names))
    rows = [
        (c.score, str(c.clusters), c.planted, *(f"{getattr(c, name) / c.reps:.2f}" for name in names))
        for c in cells
    ]
    return _markdown(head, rows)


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _markdown(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def summary(cells: list[dict]) -> list[str]:
    """The worst figures, one line each."""
    from_50 = [c for c in cells if c["clusters"] >= 50]
    many = [c for c in from_50 if c["differing"] >= 20]
    tested = [c for c in from_50 if "false_equivalent" in c]

    def named(cell: dict, field: str) -> str:
        return f"{cell[field]:.3f} ({cell['shape']}, n = {cell['clusters']})"

    lowest = min(from_50, key=lambda c: c["coverage"])
    equivalent = max(tested, key=lambda c: c["false_equivalent"])
    degraded = max(tested, key=lambda c: c["false_degraded"])
    lines = [f"lowest coverage from n = 50: {named(lowest, 'coverage')}"]
    if many:
        highest = max(many, key=lambda c: c["coverage"])
        lines.append(f"highest coverage where 20 or more pairs differ: {named(highest, 'coverage')}")
    lines.append(f"most false equivalent at the margin (alpha 0.05): {named(equivalent, 'false_equivalent')}")
    lines.append(f"most false degraded at the margin (alpha 0.05): {named(degraded, 'false_degraded')}")
    return lines


def main() -> None:
    """Run the simulation that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reps", type=int, default=2000, help="repetitions per shape and size (2000)")
    parser.add_argument("--cliff-reps", type=int, default=100, help="repetitions per planted cliff (100)")
    parser.add_argument("--out", type=Path, help="folder for calibration.json and calibration.md")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="few repetitions and sizes: does it run?")
    args = parser.parse_args()
    sizes = (50, 100) if args.quick else SIZES
    reps, cliff_reps = (200, 3) if args.quick else (args.reps, args.cliff_reps)

    gc.freeze()  # multipletests collects garbage on every call
    rng = np.random.default_rng(args.seed)
    cells = []
    for shape in track(SHAPES, description="coverage"):
        mean = truth(shape)
        cells += [
            coverage_cell(shape, n, mean, reps, rng) for n in sizes if n >= 3 * len(shape.tasks) or n >= 50
        ]
    plan = [
        (score, n, edge)
        for score in ("zero_one", "f1")
        for n in ((150,) if args.quick else (100, 150, 300, 900))
        for edge in (None, *range(len(LEVELS) - 1))
    ]
    cliffs = [cliff_cell(*cell, cliff_reps, rng) for cell in track(plan, description="planted cliffs")]

    lines = summary(cells)
    error = 1.96 * math.sqrt(0.05 * 0.95 / reps)
    about = (
        f"{reps} repetitions a row: a true 0.95 shows as 0.95 +- {error:.3f}. {cliff_reps} per planted cliff."
    )
    shapes = _markdown(("shape", "scores"), [(shape.name, shape.about) for shape in SHAPES])
    parts = ["# Calibration of the statistics", about, "\n".join(f"- {line}" for line in lines), shapes]
    parts += ["## Intervals, nominal 0.95", coverage_table(cells), "## Planted cliffs", cliff_table(cliffs)]
    page = "\n\n".join(parts)
    print(page)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        content = {"reps": reps, "seed": args.seed, "coverage": cells, "cliffs": [asdict(c) for c in cliffs]}
        (args.out / "calibration.json").write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
        (args.out / "calibration.md").write_text(page + "\n")


if __name__ == "__main__":
    main()
