"""Time a table of evictors against the sweep of ``full`` and twelve grid points alone, same prompts, one run.

Both ways run in this process, in turn, prompt by prompt; each begins with a prefill of its own. The first prompt is
run both ways and left out, since it allocates what later ones use again. ``python benchmarks/evictor_cost.py --help``.
"""

import argparse
import json
import os
from pathlib import Path

import torch
from stock import CLOCKS, Watch

from semkv_bench.engine.engine import Engine
from semkv_bench.engine.outcome import Request
from semkv_bench.models.device import describe
from semkv_bench.models.embedded import EmbeddedModel
from semkv_bench.quantizers import Affine
from semkv_bench.settings import Evictions
from semkv_bench.settings.sets import uniform_settings
from semkv_bench.settings.setting import FULL, Setting
from semkv_bench.tasks import Synthetic

GRID = [64, 32, 16, 14, 12, 10, 8, 7, 6, 5, 4, 3]
SCORES = [
    *("random_head", "knorm", "streaming", "snapkv-16", "h2o", "h2o_mean", "tova", "expected_attention"),
    *("keydiff", "leverage", "r_kv", "cake-16/cake", "snapkv-16/adakv"),
]
REPLAYED = "kvzip/global"
KEEP = [0.75, 0.5, 0.25, 0.125]


def table(settings: int, scores: list[str]) -> list[Setting]:
    """``full``, three grid points and evictors, as many as make up ``settings``."""
    grid = uniform_settings(Affine(), Affine(), [16, 8, 4])
    evictors = Evictions(scores, keep=KEEP).settings(Affine(), Affine())
    return [FULL, *grid, *evictors][:settings]


def main() -> None:
    """Measure and write the outcome."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=300)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--settings", type=int, default=60)
    parser.add_argument("--clock", choices=list(CLOCKS), default="processor", help="what the ratio is of")
    parser.add_argument("--note", default="", help="what else the reader should know")
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/evictor_cost.json"))
    arguments = parser.parse_args()
    loaded = EmbeddedModel().load()
    ways = {
        "grid": [FULL, *uniform_settings(Affine(), Affine(), GRID)],
        "evictors": table(arguments.settings, [*SCORES, "knorm/adakv"]),
        "evictors_with_replay": table(arguments.settings, [REPLAYED, *SCORES]),
    }
    engine = Engine(loaded)
    examples = Synthetic(length=arguments.length).examples(
        loaded.tokenizer, seeds=[0], per_task=arguments.prompts + 1
    )
    seconds = {way: dict.fromkeys(CLOCKS, 0.0) for way in ways}
    for number, example in enumerate(examples[: arguments.prompts + 1]):
        request = Request(
            example.input_ids, example.target_ids, example.max_new_tokens, frozenset(loaded.eos_ids), seed=0
        )
        for way, settings in ways.items():
            watch = Watch()
            engine.run(request, settings)
            for clock, taken in watch.seconds().items():
                seconds[way][clock] += taken * (number > 0)
        print(number, {way: round(taken[arguments.clock], 2) for way, taken in seconds.items()}, flush=True)
    base = seconds["grid"][arguments.clock]
    outcome = {
        "what": "time of a table of evictors over that of full and twelve grid points, one prefill each",
        "model": loaded.label,
        "machine": describe(loaded.device),
        "threads": torch.get_num_threads(),
        "load_average": [round(one, 1) for one in os.getloadavg()],
        "note": arguments.note,
        "length": arguments.length,
        "prompts": arguments.prompts,
        "clock": arguments.clock,
        "settings": {way: len(settings) for way, settings in ways.items()},
        "seconds": {way: {name: round(s, 2) for name, s in taken.items()} for way, taken in seconds.items()},
        "over_grid": {way: round(taken[arguments.clock] / base, 2) for way, taken in seconds.items()},
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(outcome, indent=1) + "\n")
    print(json.dumps(outcome["over_grid"]))


if __name__ == "__main__":
    main()
