"""Time a sweep's engine against a plain loop of stock transformers, same settings, prompts and outputs.

The plain loop does what a script would do: for each setting one prefill into a DynamicCache, quantize
the prompt's keys and values in place, and one generate. Both ways run in this process, in turn, prompt by
prompt; the ratio of their times is the result. The first prompt of a length is run by the engine alone
and told apart, since it allocates what later ones use again. Stages of the engine are timed where it calls them.
Times are by the wall clock, or with ``--clock processor`` the seconds that the processor spent on this process: on a
machine that others use, with one thread, the nearer to what a free core would need. Both are written down.
``--plain-every N`` runs the plain loop for every Nth setting alone, from the lowest precision to the highest, and
multiplies its time: an estimate, told as one, since every setting costs the loop a prefill and an answer of its own.
At the end stands a table of an example's stages. The least that gives all figures at 2,000 tokens, two examples of the
engine each and one and five answers of the plain loop, is
``--lengths 2000 --settings 12 60 --prompts 1 --plain-every 12``.
``python benchmarks/sweep_speed.py --help``.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from stock import CLOCKS, LEVELS, STAGES, Watch, staged, stock_generate

from semkv_bench.engine.engine import Engine
from semkv_bench.engine.outcome import Request
from semkv_bench.models.device import describe
from semkv_bench.models.embedded import EmbeddedModel
from semkv_bench.models.load import LoadedModel
from semkv_bench.quantizers import Affine
from semkv_bench.settings.sets import uniform_settings
from semkv_bench.settings.setting import FULL, Setting
from semkv_bench.tasks import Synthetic


def measure(
    loaded: LoadedModel, length: int, prompts: int, settings: list[Setting], clock: str, every: int
) -> dict[str, Any]:
    """Both ways on ``prompts`` prompts of about ``length`` tokens, after a first one that only the engine runs."""
    examples = Synthetic(length=length).examples(loaded.tokenizer, seeds=[0], per_task=prompts + 1)
    runs, ours = [], Engine(loaded)
    looped = range(every // 2, len(settings), every)
    for number, example in enumerate(examples[: prompts + 1]):
        request = Request(
            example.input_ids, example.target_ids, example.max_new_tokens, frozenset(loaded.eos_ids), seed=0
        )
        stages: dict[str, float] = {}
        watch = Watch()
        together = staged(lambda asked=request: ours.run(asked, settings), stages, CLOCKS[clock])
        run = {"prompt_tokens": len(example.input_ids), "engine_s": watch.seconds(), "stages": stages}
        if number:
            watch = Watch()
            apart = {number: stock_generate(loaded, request, settings[number])[0] for number in looped}
            run["plain_s"] = {
                name: seconds * len(settings) / len(looped) for name, seconds in watch.seconds().items()
            }
            run["equal_rows"] = sum(together[number].tokens == said for number, said in apart.items())
        runs.append(run)
        print(len(settings), length, run, flush=True)
    return summary(runs, len(settings), len(looped), clock)


def summary(runs: list[dict[str, Any]], settings: int, looped: int, clock: str) -> dict[str, Any]:
    """Sums over all prompts but the first, ratios by ``clock``, and what the first cost."""
    first, *rest = runs
    total = {
        way: {name: sum(run[way][name] for run in rest) for name in CLOCKS} for way in ("engine_s", "plain_s")
    }
    stages = {name: round(sum(run["stages"][name] for run in rest), 2) for name in STAGES}
    plain, engine = total["plain_s"][clock], total["engine_s"][clock]
    return {
        "settings": settings,
        "prompts": len(rest),
        "prompt_tokens": round(sum(run["prompt_tokens"] for run in rest) / len(rest)),
        "settings_of_plain_loop": looped,
        "plain_s_is_estimate": looped < settings,
        "rows_compared": looped * len(rest),
        "equal_rows": sum(run["equal_rows"] for run in rest),
        "clock": clock,
        "plain_s": {name: round(value, 2) for name, value in total["plain_s"].items()},
        "engine_s": {name: round(value, 2) for name, value in total["engine_s"].items()},
        "stages_s": stages,
        "plain_over_engine": round(plain / engine, 2),
        "engine_over_prefill": round(engine / stages["prefill"], 2),
        "first_prompt_s": round(first["engine_s"][clock], 2),
        "first_prompt_stages_s": {name: round(value, 2) for name, value in first["stages"].items()},
    }


def table(cases: list[dict[str, Any]]) -> str:
    """Seconds of one example by stage, a column for each case, and what part of the whole each stage is."""
    heads = [f"{case['settings']} settings, {case['prompt_tokens']} tokens" for case in cases]
    lines = ["| stage | " + " | ".join(heads) + " |", "|---|" + "---|" * len(cases)]
    for stage in (*STAGES, "all"):
        cells = []
        for case in cases:
            whole = case["engine_s"][case["clock"]] / case["prompts"]
            seconds = whole if stage == "all" else case["stages_s"][stage] / case["prompts"]
            cells.append(f"{seconds:.2f} s ({seconds / whole:.0%})")
        lines.append(f"| {stage} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure and write the outcome; a case that was measured before is measured anew or left as it is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1000, 2000])
    parser.add_argument("--settings", type=int, nargs="+", default=[12, 60], choices=list(LEVELS))
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--plain-every", type=int, default=1, help="the plain loop runs every Nth setting")
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="what the ratios are of")
    parser.add_argument(
        "--note", default="", help="what else the reader should know, such as what ran beside it"
    )
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/sweep_speed.json"))
    arguments = parser.parse_args()
    loaded = EmbeddedModel().load()
    outcome = {
        "what": "time of a plain loop of stock transformers over this engine's, and the engine's over a prefill",
        "model": loaded.label,
        "machine": describe(loaded.device),
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    for count in arguments.settings:
        settings = [FULL, *uniform_settings(Affine(), Affine(), LEVELS[count])]
        for length in arguments.lengths:
            how = (arguments.prompts, settings, arguments.clock, arguments.plain_every)
            measured = measure(loaded, length, *how)
            load = [round(one, 1) for one in os.getloadavg()]
            here = {"threads": torch.get_num_threads(), "load_average": load, "note": arguments.note}
            case = {"length": length, **measured, **here}
            print(case, flush=True)
            try:
                before = json.loads(arguments.out.read_text()).get("cases", [])
            except FileNotFoundError:
                before = []
            others = [c for c in before if (c["length"], c["settings"]) != (length, count)]
            cases = sorted([*others, case], key=lambda c: (c["settings"], c["length"]))
            arguments.out.write_text(json.dumps({**outcome, "cases": cases}, indent=1) + "\n")
    print(table(cases))


if __name__ == "__main__":
    main()
