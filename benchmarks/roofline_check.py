"""Compare what ``plan on=cpu`` would estimate with what this machine takes: prefill and decoding of the embedded model.

The estimate is the one of ``semkv_bench.plan.roofline``, from rates that are measured here by products, attention,
sums and a model of no size; nothing is fitted to the model's own times. Both are taken at two prompt lengths and two
numbers of rows, in seconds that the processor spent on this process, one thread.
``python benchmarks/roofline_check.py --help``.
"""

import argparse
import json
import os
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from stock import CLOCKS
from sweep_speed import LEVELS, staged

from semkv_bench.engine import engine as engines
from semkv_bench.engine.batching import row_bytes
from semkv_bench.engine.engine import Engine
from semkv_bench.engine.outcome import Request
from semkv_bench.engine.prefill import Prefilled
from semkv_bench.models.device import describe
from semkv_bench.models.embedded import EmbeddedModel
from semkv_bench.plan import accelerators
from semkv_bench.plan.accelerators import Accelerator
from semkv_bench.plan.memory import Weights, weights_of
from semkv_bench.plan.roofline import Forward
from semkv_bench.quantizers import Affine
from semkv_bench.settings.sets import uniform_settings
from semkv_bench.settings.setting import FULL

STEPS = 6


def measured_prefill(engine: Engine, ids: list[int]) -> tuple[Prefilled, float]:
    """The prompt but its last token, and the seconds that reading it takes."""
    seconds: dict[str, float] = {}
    prefilled = staged(lambda: engines.prefill(engine.loaded, ids[:-1]), seconds, CLOCKS["processor"])
    return prefilled, seconds["prefill"]


def measured_step(engine: Engine, ids: list[int], prefilled: Prefilled, rows: int) -> float:
    """Seconds of one decoding step with ``rows`` rows behind a prompt."""
    settings, found = [FULL, *uniform_settings(Affine(), Affine(), LEVELS[12][: rows - 1])], {}
    for limit in (1, 1 + STEPS):
        # An end token that is held back, and a reference that no row says: every row takes every step.
        request = Request(ids, [5], limit, frozenset({0}), min_new_tokens=limit)
        seconds: dict[str, float] = {}
        answer = partial(engine.answer, request, settings, prefilled=prefilled)
        staged(answer, seconds, CLOCKS["processor"])
        found[limit] = seconds["decoding"]
    return (found[1 + STEPS] - found[1]) / STEPS


def rates(engine: Engine, weights: Weights, rows: int) -> Accelerator:
    """What this processor does, measured by its own time."""
    shape = engine.loaded.shape
    with mock.patch.object(accelerators.time, "perf_counter", CLOCKS["processor"]):
        return accelerators.this_cpu(weights, shape.kv_heads, shape.head_dim, rows)


def compared(measured: float, estimated: float) -> dict[str, float]:
    """Both, and by how much the estimate is off."""
    return {"measured_s": measured, "estimated_s": estimated, "off": round(estimated / measured - 1, 3)}


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
    weights, shape = weights_of(SimpleNamespace(source=source)), engine.loaded.shape
    known = {rows: rates(engine, weights, rows) for rows in arguments.rows}
    for number, tokens in enumerate([64, *arguments.lengths]):
        drawn = torch.randint(3, 40_000, (tokens + 1,), generator=torch.Generator().manual_seed(tokens))
        prefilled, seconds = measured_prefill(engine, drawn.tolist())
        for rows, cpu in known.items():
            step = measured_step(engine, drawn.tolist(), prefilled, rows)
            if not number:  # the first calls allocate
                continue
            forward = Forward(cpu, weights, shape.layers)
            read = rows * row_bytes(shape, tokens, weights.itemsize)
            case = {
                "tokens": tokens,
                "rows": rows,
                "prefill": compared(seconds, forward.seconds(1, tokens)),
                "step": compared(step, forward.seconds(rows, 1, tokens, read, logits=rows)),
            }
            cases.append(case)
            print(case, flush=True)
    outcome = {
        "what": "what plan estimates for this processor beside what it takes: prefill, and one step of all rows",
        "model": engine.loaded.label,
        "note": arguments.note,
        "load_average": [round(load, 1) for load in os.getloadavg()],
        "machine": describe(engine.loaded.device),
        "clock": "processor",
        "took_s": round(time.process_time() - began, 1),
        "farthest_off": max((case[stage]["off"] for case in cases for stage in ("prefill", "step")), key=abs),
        "rates": {
            rows: {k: v for k, v in asdict(cpu).items() if k != "memory"} for rows, cpu in known.items()
        },
        "cases": cases,
    }
    print(f"farthest off: {outcome['farthest_off']:+.0%}, in {outcome['took_s']} s")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(outcome, indent=1) + "\n")


if __name__ == "__main__":
    main()
