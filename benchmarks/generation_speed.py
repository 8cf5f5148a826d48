"""Time a generation sweep against stock transformers, one setting at a time, both coding generated tokens in blocks.

The plain way is what a script would do: for each setting a prefill of its own, its keys and values quantized in
place, and stock ``generate`` with a ``DynamicCache`` that codes a block of generated tokens as soon as a token
beyond it comes. The engine also measures KL on the forced answer, which the plain way does not. Both run in this
process, in turn, prompt by prompt; every answer is written to its limit and compared token for token; the ratio of
their times is the result, by the wall clock or, with ``--clock processor``, of the seconds that the processor spent on
this process. ``python benchmarks/generation_speed.py --help``.
"""

import argparse
import json
import os
from pathlib import Path

import torch
from stock import CLOCKS, Watch
from torch import Tensor
from transformers import DynamicCache

from semkv_bench.engine.engine import Engine, Request
from semkv_bench.models.device import describe
from semkv_bench.models.embedded import EmbeddedModel
from semkv_bench.models.load import LoadedModel
from semkv_bench.protocols.rule import CodingRule, coder_seed
from semkv_bench.quantizers import Affine
from semkv_bench.settings.setting import FULL, Setting, uniform_settings
from semkv_bench.tasks import Synthetic

LEVELS = [64, 32, 16, 12, 8, 7, 6, 5, 4, 3, 2]  # with full: 12 settings


class BlockCache(DynamicCache):
    """A ``DynamicCache`` of one row that codes what ``rule`` says, at the same levels for all tokens."""

    def __init__(self, loaded: LoadedModel, setting: Setting, rule: CodingRule):
        super().__init__(config=loaded.model.config)
        self.setting, self.rule = setting, rule
        self.settled = [0] * len(self.layers)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        """Code the layer's complete blocks, then append."""
        opened = self.layers[layer_idx].get_seq_length() - self.settled[layer_idx]
        # Before the prompt is in, nothing is open.
        if self.settled[layer_idx]:
            self.code(layer_idx, self.rule.due(opened))
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def code(self, index: int, tokens: int) -> None:
        """Code the next ``tokens`` open tokens of a layer."""
        layer, here = self.layers[index], slice(self.settled[index], self.settled[index] + tokens)
        for side, (states, coded) in enumerate(
            ((layer.keys, self.setting.keys), (layer.values, self.setting.values))
        ):
            if coded is not None and tokens:
                coder = coded.quantizer.coder(states.shape[-1], coder_seed(0, index, side))
                levels = torch.tensor([[coded.allocation.count]])
                states[0, :, here] = coder.quantize_dequantize(states[0, :, here], levels)[0]
        self.settled[index] += tokens


@torch.inference_mode()
def stock(loaded: LoadedModel, request: Request, setting: Setting, rule: CodingRule) -> list[int]:
    """New tokens of one setting."""
    model, ids = loaded.model, torch.tensor([list(request.input_ids)], device=loaded.device)
    cache = BlockCache(loaded, setting, rule)
    model(input_ids=ids[:, :-1], use_cache=True, logits_to_keep=1, **{loaded.cache_keyword: cache})
    for index in range(len(cache.layers)):
        cache.code(index, ids.shape[1] - 1)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=request.max_new_tokens,
        do_sample=False,
        eos_token_id=sorted(request.stop_ids),
        **{loaded.cache_keyword: cache},
    )
    return out[0, ids.shape[1] :].tolist()


def main() -> None:
    """Measure and write the outcome."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=1000)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="what the ratio is of")
    parser.add_argument("--note", default="", help="what else the reader should know")
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/generation_speed.json"))
    arguments = parser.parse_args()
    loaded, rule = EmbeddedModel().load(), CodingRule("both", arguments.block)
    settings = [FULL, *uniform_settings(Affine(), Affine(), LEVELS)]
    engine, prompts = Engine(loaded), []
    examples = Synthetic(length=arguments.length).examples(loaded.tokenizer, [0], per_task=arguments.prompts)
    for number, example in enumerate([examples[0], *examples[: arguments.prompts]]):
        # A stop token that the model does not write: every answer is as long as it may be.
        limit = 4 if number == 0 else arguments.new_tokens
        request = Request(example.input_ids, example.target_ids, limit, frozenset({0}))
        chosen = settings[:2] if number == 0 else settings  # the first time is a warm-up
        watch = Watch()
        (together,) = engine.converse(request, chosen, rule)
        ours = watch.seconds()
        watch = Watch()
        apart = [stock(loaded, request, setting, rule) for setting in chosen]
        plain = watch.seconds()
        if number:
            differing = [
                outcome.setting.name
                for outcome, tokens in zip(together, apart, strict=True)
                if outcome.tokens != tokens
            ]
            prompts.append(
                {
                    "prompt_tokens": len(example.input_ids),
                    "engine_s": {name: round(seconds, 2) for name, seconds in ours.items()},
                    "plain_s": {name: round(seconds, 2) for name, seconds in plain.items()},
                    "rows_that_differ": differing,
                }
            )
            print(prompts[-1], flush=True)
    plain, ours = (sum(prompt[way][arguments.clock] for prompt in prompts) for way in ("plain_s", "engine_s"))
    outcome = {
        "what": "time of stock transformers, setting by setting, over this engine's; generated tokens coded",
        "model": loaded.label,
        "note": arguments.note,
        "load_average": [round(load, 1) for load in os.getloadavg()],
        "machine": describe(loaded.device),
        "settings": [setting.name for setting in settings],
        "clock": arguments.clock,
        "block": arguments.block,
        "new_tokens": arguments.new_tokens,
        "prompts": prompts,
        "rows": len(settings) * len(prompts),
        "equal_rows": len(settings) * len(prompts) - sum(len(p["rows_that_differ"]) for p in prompts),
        "ratio": round(plain / ours, 2),
    }
    print(f"ratio {outcome['ratio']}, {outcome['equal_rows']} of {outcome['rows']} rows equal")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(outcome, indent=1) + "\n")


if __name__ == "__main__":
    main()
