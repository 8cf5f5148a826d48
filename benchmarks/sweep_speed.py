"""Time a sweep's engine against a plain loop of stock transformers, same settings, prompts and outputs.

The plain loop does what a script would do: for each setting one prefill into a DynamicCache, quantize
the prompt's keys and values in place, and one generate. Both ways run in this process, in turn, example by
example; the ratio of their wall-clock times is the result. ``python benchmarks/sweep_speed.py --help``.
"""

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path

from stock import stock_generate

from semkv_bench.engine.engine import Engine, Request
from semkv_bench.models.device import describe
from semkv_bench.models.load import EmbeddedModel, LoadedModel
from semkv_bench.quantizers import Affine
from semkv_bench.settings.setting import FULL, Setting, uniform_settings
from semkv_bench.tasks import Synthetic

LEVELS = [64, 32, 16, 12, 8, 7, 6, 5, 4, 3, 2]  # with full: 12 settings


@dataclass
class Timing:
    """Seconds per prompt length, and how many answers agree token for token."""

    plain_s: float = 0.0
    engine_s: float = 0.0
    rows: int = 0
    equal_rows: int = 0
    prompts: int = 0
    prompt_tokens: int = 0


def measure(loaded: LoadedModel, length: int, prompts: int, settings: list[Setting]) -> Timing:
    """Both ways on ``prompts`` prompts of about ``length`` tokens; a warm-up of each comes first."""
    examples = Synthetic(length=length).examples(loaded.tokenizer, seeds=[0], per_task=prompts)
    engine, timing = Engine(loaded), Timing()
    for number, example in enumerate([examples[0], *examples[:prompts]]):
        request = Request(
            example.input_ids, example.target_ids, example.max_new_tokens, frozenset(loaded.eos_ids), seed=0
        )
        start = time.perf_counter()
        together = engine.run(request, settings)
        middle = time.perf_counter()
        apart = [stock_generate(loaded, request, setting)[0] for setting in settings]
        end = time.perf_counter()
        if number == 0:
            continue
        timing.engine_s += middle - start
        timing.plain_s += end - middle
        timing.prompts += 1
        timing.prompt_tokens += len(example.input_ids)
        timing.rows += len(settings)
        timing.equal_rows += sum(a.tokens == b for a, b in zip(together, apart, strict=True))
    return timing


def main() -> None:
    """Measure and write the outcome."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1000, 2000])
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/sweep_speed.json"))
    arguments = parser.parse_args()
    loaded = EmbeddedModel().load()
    settings = [FULL, *uniform_settings(Affine(), Affine(), LEVELS)]
    outcome = {
        "what": "wall-clock time of a plain loop of stock transformers over this engine's, 12 settings",
        "model": loaded.label,
        "settings": [setting.name for setting in settings],
        "machine": describe(loaded.device),
        "lengths": {},
    }
    for length in arguments.lengths:
        timing = measure(loaded, length, arguments.prompts, settings)
        outcome["lengths"][str(length)] = {
            **vars(timing),
            "prompt_tokens": round(timing.prompt_tokens / timing.prompts),
            "ratio": round(timing.plain_s / timing.engine_s, 2),
        }
        print(f"{length} tokens: {outcome['lengths'][str(length)]}", flush=True)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(outcome, indent=1) + "\n")


if __name__ == "__main__":
    main()
