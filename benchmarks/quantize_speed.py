"""Time quantizing a prompt's whole cache under twelve settings against the prefill that made it.

Both run in one process, in turn, on the embedded small model; the ratio of the medians is the result.
``python benchmarks/quantize_speed.py --help``.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from semkv_bench import kernels
from semkv_bench.engine.decode import fill
from semkv_bench.engine.engine import Engine
from semkv_bench.models.device import describe
from semkv_bench.models.embedded import EmbeddedModel
from semkv_bench.quantizers import Affine, Quantizer, TurboQuant
from semkv_bench.settings.sets import uniform_settings
from semkv_bench.tasks import Synthetic

LEVELS = [16, 14, 12, 10, 9, 8, 7, 6, 5, 4, 3, 2]
QUANTIZERS: list[Quantizer] = [Affine(), TurboQuant()]


def measure(engine: Engine, ids: list[int], repeats: int) -> dict[str, list[float]]:
    """Seconds of every prefill and of every quantizer's fill of twelve rows, after one warm-up of each."""
    seconds: dict[str, list[float]] = {name: [] for name in ("prefill", *(q.name for q in QUANTIZERS))}
    for repeat in range(repeats + 1):
        start = time.perf_counter()
        prefilled = engine.prefill(ids)
        elapsed = {"prefill": time.perf_counter() - start}
        for quantizer in QUANTIZERS:
            settings = uniform_settings(quantizer, quantizer, LEVELS)
            start = time.perf_counter()
            fill(engine.loaded, prefilled, settings, engine.rows, room=1)
            elapsed[quantizer.name] = time.perf_counter() - start
        for name, value in elapsed.items() if repeat else ():
            seconds[name].append(round(value, 4))
    return seconds


def main() -> None:
    """Measure and write the outcome."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/quantize_speed.json"))
    arguments = parser.parse_args()
    loaded = EmbeddedModel().load()
    example = Synthetic(length=arguments.tokens + 400).examples(loaded.tokenizer, seeds=[0], per_task=1)[0]
    ids = list(example.input_ids)[: arguments.tokens]
    seconds = measure(Engine(loaded), ids, arguments.repeats)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    outcome = {
        "what": "seconds to quantize the cache of one prompt under twelve settings, over seconds of its prefill",
        "model": loaded.label,
        "prompt_tokens": len(ids),
        "levels": LEVELS,
        "kernels": kernels.backend(loaded.device),
        "machine": describe(torch.device(loaded.device)),
        "seconds": seconds,
        "ratio": {name: round(value / medians["prefill"], 4) for name, value in medians.items()},
    }
    print(json.dumps({"seconds": medians, "ratio": outcome["ratio"]}))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(outcome, indent=1) + "\n")


if __name__ == "__main__":
    main()
