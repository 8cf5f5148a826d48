"""Figures of the calibration."""

from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt

from calibration.planted import CliffCell
from calibration.power import CURVE

__all__ = ["draw_figures"]

matplotlib.use("Agg")
_INK, _GRAY = "#1b4965", "#9aa5ad"
_COLORS = ("#1b4965", "#c8553d", "#588157", "#8a5a9e", "#d39b2a")


def draw_figures(content: dict, cliffs: list[CliffCell], out: Path) -> None:
    """Coverage, error rates, planted cliffs and power as PNG files in ``out``."""
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    _save(_coverage(content["coverage"]), out / "coverage.png")
    _save(_errors(content["coverage"], content["exact"]), out / "error_rates.png")
    _save(_cliffs(cliffs), out / "planted_cliffs.png")
    _save(_power(content["power"]), out / "power.png")
    _save(_sequential(content["sequential_tests"], content["sequential_runs"]), out / "sequential.png")


def _save(figure: plt.Figure, path: Path) -> None:
    # Without the version of matplotlib in it, the same numbers give the same bytes.
    figure.savefig(path, dpi=120, bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)


def _log_sizes(axis: plt.Axes, sizes: list[int]) -> None:
    axis.set_xscale("log")
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.minorticks_off()
    axis.set_xlabel("examples")


def _coverage(cells: list[dict]) -> plt.Figure:
    figure, axes = plt.subplots(1, 4, figsize=(13, 3.9), sharey=True, layout="constrained")
    methods = (("coverage", "guarded (decides)"), ("plus_two", "plus-two"), ("student_t", "Student t"))
    sizes = sorted({c["clusters"] for c in cells})
    for axis, (field, title) in zip(axes, (*methods, ("percentile", "percentile bootstrap")), strict=True):
        for shape in {c["shape"]: None for c in cells}:
            mine = [c for c in cells if c["shape"] == shape]
            axis.plot([c["clusters"] for c in mine], [c[field] for c in mine], color=_GRAY, lw=0.8)
        least = [min(c[field] for c in cells if c["clusters"] == size) for size in sizes]
        axis.plot(sizes, least, color=_INK, lw=2, label="lowest")
        axis.axhline(0.95, color=_COLORS[1], lw=1, ls="--", label="nominal 0.95")
        axis.set_title(title)
        axis.set_ylim(0.3, 1.01)
        _log_sizes(axis, sizes[::2])
    axes[0].set_ylabel("coverage")
    axes[0].legend(loc="lower right", frameon=False)
    figure.suptitle("Coverage of nominal 95 % intervals, one line a kind of scores")
    return figure


def _errors(cells: list[dict], exact: list[dict]) -> plt.Figure:
    figure, axes = plt.subplots(1, 2, figsize=(12.5, 4), sharey=True, layout="constrained")
    for axis, field in zip(axes, ("false_equivalent", "false_degraded"), strict=True):
        for i, margin in enumerate(sorted({c["margin"] for c in exact})):
            mine = [c for c in exact if c["margin"] == margin]
            axis.plot(
                [c["clusters"] for c in mine],
                [c[field] for c in mine],
                color=_COLORS[i % len(_COLORS)],
                lw=0.8,
                label=f"whole losses, margin {margin:g}",
            )
        tested = [c for c in cells if field in c]
        axis.plot(
            [c["clusters"] for c in tested],
            [c[field] for c in tested],
            "o",
            color=_GRAY,
            ms=3,
            label="other kinds of scores",
        )
        axis.axhline(0.05, color="black", lw=1, ls="--")
        axis.set_title(f"{field.replace('_', ' ')}, true drop exactly at the margin")
        _log_sizes(axis, [20, 50, 100, 300, 900])
    axes[0].set_ylabel("error rate (alpha = 0.05)")
    figure.legend(*axes[1].get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=8)
    return figure


def _cliffs(cells: list[CliffCell]) -> plt.Figure:
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
    for axis, score in zip(axes, ("zero_one", "f1"), strict=True):
        sizes = sorted({c.clusters for c in cells if c.score == score})
        bottom = [0.0] * len(sizes)
        kinds = (("right", _INK), ("wider", "#7fa9c0"), ("undetermined", "#d8dde0"), ("wrong", _COLORS[1]))
        for name, color in kinds:
            share = []
            for size in sizes:
                mine = [c for c in cells if c.score == score and c.clusters == size]
                share.append(sum(getattr(c, name) for c in mine) / sum(c.reps for c in mine))
            axis.bar([str(size) for size in sizes], share, bottom=bottom, color=color, label=name)
            bottom = [a + b for a, b in zip(bottom, share, strict=True)]
        axis.set_title({"zero_one": "right or wrong scores", "f1": "F1 scores, a fifth reworded"}[score])
        axis.set_xlabel("examples")
    axes[0].set_ylabel("share of planted cliffs")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", frameon=False)
    return figure


def _power(cases: list[dict]) -> plt.Figure:
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.4), sharey=True, layout="constrained")
    for axis, verdict in zip(axes, ("equivalent", "degraded"), strict=True):
        mine = [case for case in cases if case["verdict"] == verdict]
        for color, case in zip(_COLORS, mine, strict=False):
            axis.plot(CURVE, case["curve"], color=color, label=case["about"])
            if case["n_needed"] and case["n_needed"] <= CURVE[-1]:
                axis.plot(case["n_needed"], case["power"], "o", color=color, ms=7)
        axis.axhline(0.8, color="black", lw=0.8, ls=":")
        axis.set_title(f"{verdict} at a margin of 0.03")
        axis.legend(frameon=False, fontsize=8)
        _log_sizes(axis, [25, 50, 100, 200, 450, 900])
    axes[0].set_ylabel("share of samples that show it")
    figure.suptitle(
        "Power of one test; dots: the size named for a power of 80 %, and the power measured there"
    )
    return figure


def _sequential(tests: list[dict], runs: list[dict]) -> plt.Figure:
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.2), layout="constrained")
    plans = list(dict.fromkeys(tuple(c["looks"]) for c in tests))
    for field, color, shift in (("false_equivalent", _INK, -0.12), ("false_degraded", _COLORS[1], 0.12)):
        for place, looks in enumerate(plans):
            rates = [c[field] for c in tests if tuple(c["looks"]) == looks]
            label = field.replace("_", " ") if place == 0 else None
            axes[0].plot([place + shift] * len(rates), rates, "o", color=color, ms=4, alpha=0.6, label=label)
    axes[0].axhline(0.05, color="black", lw=1, ls="--")
    axes[0].set_xticks(
        range(len(plans)), [", ".join(map(str, looks)) for looks in plans], fontsize=8, rotation=15
    )
    axes[0].set_title("one test, true drop at the margin, any look")
    axes[0].set_ylabel("error rate over all looks (alpha = 0.05)")
    axes[0].legend(frameon=False, fontsize=8)
    kinds = list(dict.fromkeys((c["score"], tuple(c["looks"])) for c in runs))[::-1]
    for place, (score, looks) in enumerate(kinds):
        saved = [c["saved"] for c in runs if (c["score"], tuple(c["looks"])) == (score, looks)]
        axes[1].barh(place, sum(saved) / len(saved), color=_INK if score == "zero_one" else "#7fa9c0")
        axes[1].plot(saved, [place] * len(saved), "o", color=_GRAY, ms=4)
    names = [
        f"{'0/1' if score == 'zero_one' else 'F1'}: {', '.join(map(str, looks))}" for score, looks in kinds
    ]
    axes[1].set_yticks(range(len(kinds)), names, fontsize=8)
    axes[1].set_title("share of examples saved on planted cliffs (dots: each cliff)", fontsize=11)
    axes[1].set_xlim(0, 1)
    return figure
