"""Time prompts about one haystack with what they begin with read once, against each read whole.

Both run in this process, in turn, prompt by prompt, on the embedded model: an engine that goes on from the prompt
before and one that reads every prompt whole. Answers under all settings are compared token for token, and so are the KL
of the forced answers; the ratio of the processor's seconds is the result. ``python benchmarks/prefix_reuse.py --help``.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

from stock import CLOCKS, Watch

from semkv_bench.engine.engine import Engine
from semkv_bench.engine.outcome import request_of
from semkv_bench.models.device import describe
from semkv_bench.models.embedded import EmbeddedModel
from semkv_bench.quantizers import Affine
from semkv_bench.settings.sets import uniform_settings
from semkv_bench.settings.setting import FULL
from semkv_bench.tasks import Synthetic

LEVELS = [16, 8, 4]


def measure(length: int, haystacks: int, questions: int, clock: str) -> dict:
    """Seconds of prefill and of whole examples both ways, and how far answers and KL part."""
    loaded = EmbeddedModel().load()
    settings = [FULL, *uniform_settings(Affine(), Affine(), LEVELS)]
    task = Synthetic(subset="niah_prose", length=length, questions=questions)
    examples = task.examples(loaded.tokenizer, [0], haystacks * questions)
    once, whole = Engine(loaded), Engine(loaded)
    seconds = dict.fromkeys(("prefill_once", "prefill_whole", "example_once", "example_whole"), 0.0)
    same = rows = 0
    apart = 0.0
    for example in examples:
        request = request_of(example, loaded.eos_ids)
        alone = replace(request, document="")
        found = {}
        for name, engine, asked in (("once", once, request), ("whole", whole, alone)):
            watch = Watch()
            answered = engine.answer(asked, settings)
            seconds[f"example_{name}"] += watch.seconds()[clock]
            found[name] = answered.turns[0]
        for one, other in zip(found["once"], found["whole"], strict=True):
            rows += 1
            same += one.tokens == other.tokens
            apart = max(apart, abs(one.kl - other.kl))
    engines = {"once": (Engine(loaded), True), "whole": (Engine(loaded), False)}
    for example in examples:
        ids = example.input_ids[:-1]
        for name, (engine, of_document) in engines.items():
            watch = Watch()
            engine.prefill(ids, document=example.cluster if of_document else "")
            seconds[f"prefill_{name}"] += watch.seconds()[clock]
    read = once.prompts_read
    return {
        **{
            "tokens": length,
            "haystacks": haystacks,
            "questions": questions,
            "settings": len(settings),
            "clock": clock,
        },
        "tokens_fed_of_all": read.fed / (read.fed + read.reused),
        **{name: round(value, 3) for name, value in seconds.items()},
        "prefill_ratio": round(seconds["prefill_whole"] / seconds["prefill_once"], 2),
        "example_ratio": round(seconds["example_whole"] / seconds["example_once"], 2),
        **{"rows": rows, "same_tokens": same, "largest_kl_difference": apart},
        **describe(loaded.device),
    }


def main() -> None:
    """Run the benchmark that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=1000, help="tokens of a prompt (1000)")
    parser.add_argument("--haystacks", type=int, default=1)
    parser.add_argument("--questions", type=int, default=4, help="of each haystack (4)")
    parser.add_argument("--clock", choices=CLOCKS, default="processor")
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args()
    content = json.dumps(measure(args.length, args.haystacks, args.questions, args.clock), indent=1)
    print(content)
    if args.out:
        args.out.write_text(content + "\n")


if __name__ == "__main__":
    main()
