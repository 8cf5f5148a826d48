"""Records with planted outcomes."""

import math

import numpy as np
import pandas as pd

from semkv_bench import stats

GRID = (16, 8, 6, 5, 4, 3, 2)


def records(scores: dict[str, list], tasks: list[str] | None = None, **columns) -> pd.DataFrame:
    """Long records from one list of scores per setting; settings named L8 have log2(8) code bits."""
    rows = []
    for setting, values in scores.items():
        bits = 16.0 if setting.startswith("full") else math.log2(int(setting.rpartition("L")[2]))
        for i, score in enumerate(values):
            rows.append(
                {
                    "task": tasks[i] if tasks else "qa",
                    "example_id": i,
                    "setting": setting,
                    "code_bits": bits,
                    "score": float(score),
                    **{name: value[setting][i] for name, value in columns.items()},
                }
            )
    return pd.DataFrame(rows)


def planted(edge: int | None, examples: int = 150, seed: int = 0) -> pd.DataFrame:
    """0/1 records over ``GRID`` and three tasks; settings after ``edge`` lose 40 % of the right answers or more."""
    rng = np.random.default_rng(seed)
    full = (rng.random(examples) < 0.75).astype(float)
    scores = {"full": full}
    for place, level in enumerate(GRID):
        lost = 0.0 if edge is None or place <= edge else min(0.95, 0.4 + 0.1 * (place - edge))
        scores[f"L{level}"] = full * (rng.random(examples) >= lost)
    return records(scores, [f"task{i % 3}" for i in range(examples)])


def analyze(*given, **options) -> dict:
    """``stats.analyze`` as report.json holds it."""
    return stats.analyze(*given, **options).to_json()


def by_setting(report: dict) -> dict[str, dict]:
    """The rows of a report by setting name."""
    return {row["setting"]: row for row in report["settings"]}
