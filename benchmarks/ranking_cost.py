"""What ranking a prompt's tokens costs a sweep: anew for every layer, side and setting, and once for all that agree.

No model runs: scores are random numbers of the shape that a metric gives, and what is timed is all that the engine
does with them while it fills rows, from scores to levels. The way that ranks anew is timed over a few layers, since
every layer costs it the same. Both ways run in this process, in turn, and must give the same levels. Seconds are the
processor's, so that other load on the machine hardly counts; set OMP_NUM_THREADS=1.
``python benchmarks/ranking_cost.py --help``.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from semkv_bench.models.device import describe
from semkv_bench.protocols import rule
from semkv_bench.protocols.rule import Ranks
from semkv_bench.settings.allocation import PER_LAYER, SHARED, TwoLevel

SIDES = 2


def filled(allocations: list[TwoLevel], scores: torch.Tensor, layers: int, anew: bool) -> tuple[list, float]:
    """Levels by layer, side and setting as a fill asks for them, and processor seconds."""
    ranks, found = Ranks({"key_norm": scores}.__getitem__), []
    here, start = range(scores.shape[1]), time.process_time()
    for place in range(layers):
        for _ in range(SIDES):
            for allocation in allocations:
                if anew:
                    ranks = Ranks({"key_norm": scores}.__getitem__)
                found.append(ranks.levels(allocation, place, here))
    return found, time.process_time() - start


def measure(scores: torch.Tensor, scope: str, settings: int, timed: int, rounds: int) -> dict[str, Any]:
    """Both ways under ``settings`` two-level settings, the faster of ``rounds`` rounds each."""
    layers = len(scores)
    allocations = [TwoLevel(6, 5, (number + 1) / (settings + 1), scope=scope) for number in range(settings)]
    before, after = [], []
    for _ in range(rounds):
        anew, seconds = filled(allocations, scores, timed, anew=True)
        before.append(seconds)
        once, seconds = filled(allocations, scores, layers, anew=False)
        after.append(seconds)
        assert all(a.equal(b) for a, b in zip(anew, once, strict=False)), "levels differ"
    with mock.patch.object(rule, "shared", wraps=rule.shared) as ranked:
        filled(allocations, scores, layers, anew=False)
        calls = ranked.call_count
    per_fill = min(before) * layers / timed
    return {
        "scope": scope,
        "settings": settings,
        "rankings_anew": layers * SIDES * settings,
        "rankings_over_all_layers_once": calls,
        "layers_timed_anew": timed,
        "anew_s": round(min(before), 3),
        "anew_s_for_all_layers": round(per_fill, 2),
        "once_s": round(min(after), 4),
        "anew_over_once": round(per_fill / min(after), 1),
    }


def main() -> None:
    """Measure and write the outcome."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=8191)
    parser.add_argument("--settings", type=int, nargs="+", default=[1, 12])
    parser.add_argument("--timed-layers", type=int, default=2, help="layers that are timed where all is anew")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--note", default="", help="what else the reader should know")
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/ranking_cost.json"))
    arguments = parser.parse_args()
    scores = torch.rand(arguments.layers, arguments.tokens, generator=torch.Generator().manual_seed(0))
    filled([TwoLevel(6, 5, 0.5)], scores, 1, anew=True)  # a warm-up
    cases = [
        measure(scores, scope, count, arguments.timed_layers, arguments.rounds)
        for scope in (SHARED, PER_LAYER)
        for count in arguments.settings
    ]
    outcome = {
        "what": "processor seconds from a metric's scores to the levels of all tokens, per fill of a sweep's rows",
        "scores": [arguments.layers, arguments.tokens],
        "note": arguments.note,
        "load_average": [round(load, 1) for load in os.getloadavg()],
        "machine": describe(torch.device("cpu")),
        "cases": cases,
    }
    for case in cases:
        print(case, flush=True)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(outcome, indent=1) + "\n")


if __name__ == "__main__":
    main()
