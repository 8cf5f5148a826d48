"""A made-up but realistic run: records with a cliff between L=5 and L=7, and their report.

The report is worked out here by simple means (normal intervals), so these tests need no statistics module.
"""

import copy
import math

import numpy as np
import pandas as pd
import pytest

from semkv_bench.records.names import describe

GRID = (16, 8, 7, 6, 5, 4, 3, 2)
OTHERS = (
    # setting, kind, code bits, packed bits, effective bits, share of quality lost
    ("affine-L7/6@0.25:key_norm", "mixed", 2.641, 2.658, 3.158, 0.1),
    ("affine-L6/5@0.25:key_norm", "mixed", 2.388, 2.4, 2.9, 0.22),
    ("prune@0.25:key_norm", "prune", None, None, 4.0, 0.7),
    ("prune@0.25:random", "prune", None, None, 4.0, 0.85),
)
LOST = {16: 0.0, 8: 0.0, 7: 0.005, 6: 0.13, 5: 0.45, 4: 0.85, 3: 0.98, 2: 1.0}
PACKED = {16: 4.0, 8: 3.0, 7: 17 / 6, 6: 2.6, 5: 7 / 3, 4: 2.0, 3: 1.6, 2: 1.0}


def setting_rows() -> list[dict]:
    """Name, kind, bits and share of lost quality of the 13 settings."""
    rows = [
        {
            "setting": "full",
            "kind": "full",
            "code_bits": 16.0,
            "packed_bits": 16.0,
            "effective_bits": 16.0,
            "lost": 0,
        }
    ]
    for levels in GRID:
        rows.append(
            {
                "setting": f"affine-L{levels}",
                "kind": "uniform",
                "code_bits": math.log2(levels),
                "packed_bits": PACKED[levels],
                "effective_bits": PACKED[levels] + 0.5,
                "lost": LOST[levels],
            }
        )
    for name, kind, code, packed, effective, lost in OTHERS:
        rows.append(
            {
                "setting": name,
                "kind": kind,
                "code_bits": code,
                "packed_bits": packed,
                "effective_bits": effective,
                "lost": lost,
            }
        )
    return rows


def make_frame(
    tasks=("niah_noise", "niah_essay", "variable_tracking"), per_task=20, rows=None, seed=0
) -> pd.DataFrame:
    """Records of every setting on ``per_task`` examples of each task."""
    random = np.random.default_rng(seed)
    records = []
    for task in tasks:
        for index in range(per_task):
            solved = random.random() < 0.9
            fragility = random.random()
            for row in rows or setting_rows():
                right = solved and fragility >= row["lost"]
                answer = f"The number is {4711 + index}."
                broken = f"The number number number is {index} " + "the the " * 8
                records.append(
                    {
                        "model": "SmolLM2-135M-Instruct",
                        "protocol": "prefill",
                        "task": task,
                        "example_id": f"{task}-{index}",
                        "seed": 0,
                        **{key: value for key, value in row.items() if key != "lost"},
                        "score": float(right),
                        "prediction": answer if right else broken,
                        "runaway": bool(not right and random.random() < row["lost"]),
                        "kl": 0.0
                        if row["setting"] == "full"
                        else 10 ** (-4 + 4.3 * row["lost"]) * random.lognormal(0, 0.2),
                        "top1_agreement": 1 - 0.6 * row["lost"],
                    }
                )
    return pd.DataFrame(records)


def _bounds(values, deviation=1.96, guard=0) -> list[float]:
    values = np.concatenate([np.asarray(values, float), [-1.0] * guard, [1.0] * guard])
    half = deviation * values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return [float(values.mean() - half), float(values.mean() + half)]


def _verdict(kind, diff, diff_ci, margin) -> str:
    if kind == "full":
        return "reference"
    if diff_ci[1] < -margin:
        return "degraded"
    if diff_ci[0] > -margin:
        return "equivalent"
    return "inconclusive"


def _fields(name: str, kind: str) -> dict:
    """Family and levels as the statistics read them off the name."""
    described = describe(name, kind)
    return {"family": described["family"], "levels": described["levels"]}


def make_report(frame: pd.DataFrame, margin=0.1) -> dict:
    """A schema-2 report of ``frame`` with verdicts from normal intervals."""
    wide = frame.pivot(index=["task", "example_id"], columns="setting", values="score")
    settings = []
    for name, part in frame.groupby("setting", sort=False):
        first = part.iloc[0]
        full = name == "full"
        diff = None if full else float((wide[name] - wide["full"]).mean())
        diff_ci = [None, None] if full else _bounds(wide[name] - wide["full"], guard=1)
        verdict = _verdict(first["kind"], diff, diff_ci, margin)
        effective = float(first["effective_bits"])
        settings.append(
            {
                "setting": name,
                "kind": first["kind"],
                **_fields(name, first["kind"]),
                "code_bits": None if pd.isna(first["code_bits"]) else float(first["code_bits"]),
                "packed_bits": None if pd.isna(first["packed_bits"]) else float(first["packed_bits"]),
                "effective_bits": effective,
                "cache_bits": None,
                "compression": 16 / effective,
                "n": len(part),
                "n_clusters": len(part),
                "score": float(part["score"].mean()),
                "score_ci": _bounds(part["score"]),
                "diff": diff,
                "diff_ci": diff_ci,
                "p_equivalence": None
                if full
                else {"equivalent": 0.0004, "degraded": 1.0}.get(verdict, 0.2173),
                "p_no_worse": None if full else {"equivalent": 0.0002, "degraded": 1.0}.get(verdict, 0.2173),
                "p_degraded": None if full else {"degraded": 0.00002}.get(verdict, 0.6),
                "detectable": None if full else diff_ci[1] < 0,
                "verdict": verdict,
                "n_needed": 240 if verdict == "inconclusive" else None,
                "runaway_rate": float(part["runaway"].mean()),
                "runaway_p": None if full else float(0.5 ** part["runaway"].sum()),
                "kl": 0.0 if full else float(part["kl"].mean()),
                "top1_agreement": float(part["top1_agreement"].mean()),
                "agreement": 1.0 if full else float(part["top1_agreement"].mean() ** 2),
                "agreement_ci": [1.0, 1.0]
                if full
                else [float(part["top1_agreement"].mean() ** 2) * f for f in (0.9, 1.0)],
            }
        )
    return {
        "schema": 2,
        "model": "SmolLM2-135M-Instruct",
        "quantizer": "affine",
        "protocol": "prefill",
        "reference": "full",
        "alpha": 0.05,
        "margin": margin,
        "average": "macro",
        "n_examples": len(wide),
        "n_clusters": len(wide),
        "preregistered": True,
        "settings": settings,
        "tasks": _tasks(frame),
        "cliff": {
            "status": "located",
            "lower_bits": math.log2(5),
            "upper_bits": math.log2(7),
            "lower_setting": "affine-L5",
            "upper_setting": "affine-L7",
            "probability": 0.8612,
            "intervals": [
                {"lower_bits": math.log2(5), "upper_bits": math.log2(7), "probability": 0.8612},
                {"lower_bits": math.log2(5), "upper_bits": math.log2(6), "probability": 0.1343},
                {"lower_bits": None, "upper_bits": None, "probability": 0.0045},
            ],
        },
        "operating_point": _operating_point(settings),
    }


def _operating_point(settings: list[dict]) -> dict | None:
    rows = sorted(
        (row for row in settings if row["verdict"] == "equivalent"), key=lambda row: row["effective_bits"]
    )
    return (
        {key: rows[0][key] for key in ("setting", "code_bits", "effective_bits", "compression", "verdict")}
        if rows
        else None
    )


def _tasks(frame: pd.DataFrame) -> dict:
    tasks = {}
    for task, part in frame.groupby("task"):
        wide = part.pivot(index="example_id", columns="setting", values="score")
        tasks[task] = {}
        for name in wide.columns:
            full = name == "full"
            tasks[task][name] = {
                "score": float(wide[name].mean()),
                "diff": None if full else float((wide[name] - wide["full"]).mean()),
                "diff_ci": [None, None] if full else _bounds(wide[name] - wide["full"]),
            }
    return tasks


CONTEXT = {
    "source": "results/runs/2026-01-05-affine",
    "seeds": [0],
    "prompts": ["generated"],
    "config": {
        "model": {"name": "smollm2", "dtype": "float32"},
        "quantizer": {"name": "affine"},
        "grid": {"levels": list(GRID)},
    },
    "protocol": {"name": "prefill", "margin": 0.1, "alpha": 0.05, "hash": "9f2c51d0"},
    "environment": {
        "python": "3.11.2",
        "torch": "2.13.0",
        "transformers": "5.24.0",
        "device": "cpu",
        "kernels": "reference",
        "cpu": "2 cores",
        "started": "2026-01-05T09:12:44Z",
        "finished": "2026-01-05T09:41:02Z",
    },
}


@pytest.fixture(scope="session")
def base_frame() -> pd.DataFrame:
    return make_frame()


@pytest.fixture(scope="session")
def base_report(base_frame) -> dict:
    return make_report(base_frame)


@pytest.fixture
def frame(base_frame) -> pd.DataFrame:
    return base_frame.copy()


@pytest.fixture
def report(base_report) -> dict:
    return copy.deepcopy(base_report)


@pytest.fixture(scope="session")
def base_context() -> dict:
    return copy.deepcopy(CONTEXT)


@pytest.fixture
def context(base_context) -> dict:
    return copy.deepcopy(base_context)


@pytest.fixture(scope="session")
def make_run():
    """A function that makes the frame and report of other tasks, settings or sizes."""

    def run(**options):
        made = make_frame(**options)
        return made, make_report(made)

    return run
