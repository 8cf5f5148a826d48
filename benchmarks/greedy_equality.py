"""Do batched rows answer as stock transformers does? Tokens of every setting, in the sweep and run alone.

Where a token differs, the gap between the two candidates' logits at that step tells whether rounding
explains it. ``python benchmarks/greedy_equality.py --help``.
"""

import argparse
import json
from itertools import zip_longest
from pathlib import Path

from stock import stock_generate

from semkv_bench.engine.engine import Engine, Request
from semkv_bench.models.device import describe
from semkv_bench.models.embedded import EmbeddedModel
from semkv_bench.quantizers import Affine
from semkv_bench.settings.sets import uniform_settings
from semkv_bench.settings.setting import FULL
from semkv_bench.tasks import Synthetic


def main() -> None:
    """Compare and write the outcome."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--length", type=int, default=650)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/greedy_equality.json"))
    arguments = parser.parse_args()
    loaded = EmbeddedModel().load()
    engine = Engine(loaded)
    settings = [FULL, *uniform_settings(Affine(), Affine(), [16, 8, 6, 4, 2])]
    examples = Synthetic(length=arguments.length).examples(loaded.tokenizer, [0], per_task=arguments.prompts)
    compared = {setting.name: {"rows": 0, "equal": 0, "gaps": []} for setting in settings}
    for example in examples[:: len(examples) // arguments.prompts][: arguments.prompts]:
        # A stop token that the model does not write: long answers, and each row is compared to the end.
        request = Request(example.input_ids, example.target_ids, arguments.new_tokens, frozenset({0}))
        for outcome in engine.run(request, settings):
            row = compared[outcome.setting.name]
            tokens, logits = stock_generate(loaded, request, outcome.setting, logits=True)
            row["rows"] += 1
            row["equal"] += tokens == outcome.tokens
            for step, (ours, stock) in enumerate(zip_longest(outcome.tokens, tokens)):
                if ours != stock:
                    row["gaps"].append((logits[step][0, stock] - logits[step][0, ours]).item())
                    break
    gaps = [gap for row in compared.values() for gap in row["gaps"]]
    rows = sum(row["rows"] for row in compared.values())
    outcome = {
        "what": "rows of a sweep against stock generate with a DynamicCache, each setting alone",
        "model": loaded.label,
        "machine": describe(loaded.device),
        "prompts": arguments.prompts,
        "new_tokens": arguments.new_tokens,
        "settings": compared,
        "share_of_rows_that_differ": len(gaps) / rows,
        "largest_gap_of_logits": max(gaps, default=0.0),
    }
    print(json.dumps(outcome["settings"], indent=1))
    print(f"{len(gaps)} of {rows} rows differ; largest gap {max(gaps, default=0.0):.2g}")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(outcome, indent=1) + "\n")


if __name__ == "__main__":
    main()
