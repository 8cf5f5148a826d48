"""Compare what ``plan on=cpu`` would estimate with what this machine takes: prefill and decoding of the embedded model.

The estimate is the one of ``semkv_bench.plan.roofline``, from rates that are measured here by products, attention and
sums alone; nothing is fitted to the model's own times. Both are taken at two prompt lengths and two numbers of rows,
in seconds that the processor spent on this process, one thread. ``python benchmarks/roofline_check.py --help``.
"""

import argparse
import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from stock import CLOCKS
from sweep_speed import LEVELS, staged

from semkv_bench.engine.batching import row_bytes
from semkv_bench.engine.engine import Engine
from semkv_bench.engine.outcome import Request
from semkv_bench.models.device import describe
from semkv_bench.models.embedded import EmbeddedModel
from semkv_bench.plan import accelerators
from semkv_bench.plan.memory import Weights, weights_of
from semkv_bench.plan.roofline import Forward
from semkv_bench.quantizers import Affine
from semkv_bench.settings.setting import FULL, uniform_settings

STEPS = 8


def measured(engine: Engine, tokens: int, rows: int) -> dict[str, float]:
    """Seconds of the prefill and of one decoding step with ``rows`` rows behind ``tokens`` tokens."""
    settings = [FULL, *uniform_settings(Affine(), Affine(), LEVELS[12][: rows - 1])]
    drawn = torch.randint(3, 40_000, (tokens + 1,), generator=torch.Generator().manual_seed(tokens))
    found: dict[int, dict[str, float]] = {}
    for limit in (1, 1 + STEPS):
        # An end token that is held back, and a reference that no row says: every row takes every step.
        request = Request(drawn.tolist(), [5], limit, frozenset({0}), min_new_tokens=limit)
        seconds: dict[str, float] = {}
        staged(lambda asked=request: engine.run(asked, settings), seconds, CLOCKS["processor"])
        found[limit] = seconds
    step = (found[1 + STEPS]["decoding"] - found[1]["decoding"]) / STEPS
    return {"prefill": min(seconds["prefill"] for seconds in found.values()), "step": step}


def estimated(engine: Engine, weights: Weights, tokens: int, rows: int) -> dict[str, Any]:
    """The same from the rates of this processor, which are measured now."""
    shape = engine.loaded.shape
    with mock.patch.object(accelerators.time, "perf_counter", CLOCKS["processor"]):
        cpu = accelerators.this_cpu(weights, shape.kv_heads, shape.head_dim, rows)
    forward = Forward(cpu, weights, shape.layers)
    read = rows * row_bytes(shape, tokens, weights.itemsize)
    step = forward.seconds(rows, 1, tokens, read, logits=rows)
    rates = {name: value for name, value in asdict(cpu).items() if name not in ("name", "memory")}
    return {"prefill": forward.seconds(1, tokens), "step": step, "rates": rates}


def main() -> None:
    """Measure and write the outcome."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[300, 700])
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 12])
    parser.add_argument("--note", default="", help="what else the reader should know")
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/roofline.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    began = time.process_time()
    source = EmbeddedModel()
    engine, cases = Engine(source.load()), []
    weights = weights_of(SimpleNamespace(source=source))
    measured(engine, 64, 2)  # the first calls allocate
    for tokens in arguments.lengths:
        for rows in arguments.rows:
            found, expected = measured(engine, tokens, rows), estimated(engine, weights, tokens, rows)
            case = {"tokens": tokens, "rows": rows, "rates": expected["rates"]}
            for stage, seconds in found.items():
                off = expected[stage] / seconds - 1
                case[stage] = {"measured_s": seconds, "estimated_s": expected[stage], "off": round(off, 3)}
            cases.append(case)
            print({name: value for name, value in case.items() if name != "rates"}, flush=True)
    outcome = {
        "what": "what plan estimates for this processor beside what it takes: prefill, and one step of all rows",
        "model": engine.loaded.label,
        "note": arguments.note,
        "load_average": [round(load, 1) for load in os.getloadavg()],
        "machine": describe(engine.loaded.device),
        "clock": "processor",
        "took_s": round(time.process_time() - began, 1),
        "farthest_off": max((case[stage]["off"] for case in cases for stage in ("prefill", "step")), key=abs),
        "cases": cases,
    }
    print(f"farthest off: {outcome['farthest_off']:+.0%}, in {outcome['took_s']} s")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(outcome, indent=1) + "\n")


if __name__ == "__main__":
    main()
