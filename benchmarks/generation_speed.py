"""Time a generation sweep against stock transformers, one setting at a time, both coding generated tokens in blocks.

The plain way is what a script would do: for each setting a prefill of its own, its keys and values quantized in
place, and stock ``generate`` with a ``DynamicCache`` that codes a block of generated tokens as soon as a token
beyond it comes. With ``--turns`` it is a conversation: between turns all that is open is coded, and each question is
fed to what the setting itself answered. The engine also measures KL on the forced answers, which the plain way does
not. Both run in this process, in turn, prompt by prompt; every answer is written to its limit and compared token for
token; the ratio of their times is the result, by the wall clock or, with ``--clock processor``, of the seconds that the
processor spent on this process. ``--every N`` runs the plain way for every Nth setting alone, from the lowest precision
to the highest, and multiplies its time: an estimate, told as one. ``python benchmarks/generation_speed.py --help``.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from stock import CLOCKS, LEVELS, STAGES, Watch, staged
from torch import Tensor
from transformers import DynamicCache

from semkv_bench.engine.engine import Engine, Request, Turn
from semkv_bench.models.device import describe
from semkv_bench.models.embedded import EmbeddedModel
from semkv_bench.models.load import LoadedModel
from semkv_bench.protocols.rule import CodingRule, coder_seed
from semkv_bench.quantizers import Affine
from semkv_bench.settings.sets import uniform_settings
from semkv_bench.settings.setting import FULL, Setting
from semkv_bench.tasks import Example, Synthetic


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
def stock(loaded: LoadedModel, request: Request, setting: Setting, rule: CodingRule) -> list[list[int]]:
    """New tokens of one setting, turn by turn."""
    model, ids = loaded.model, torch.tensor([list(request.input_ids)], device=loaded.device)
    cache = BlockCache(loaded, setting, rule)
    model(input_ids=ids[:, :-1], use_cache=True, logits_to_keep=1, **{loaded.cache_keyword: cache})
    said = []
    for number, turn in enumerate(request.turns):
        # Between turns, as at the prompt's end, all that is open is coded.
        for index in range(len(cache.layers)):
            cache.code(index, cache.get_seq_length() - cache.settled[index])
        if number:
            ids = torch.cat([ids, torch.tensor([list(turn.input_ids)], device=loaded.device)], dim=1)
        before = ids.shape[1]
        ids = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=turn.max_new_tokens,
            do_sample=False,
            eos_token_id=sorted(turn.stop_ids),
            **{loaded.cache_keyword: cache},
        )
        said.append(ids[0, before:].tolist())
    return said


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=1000)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--settings", type=int, default=12, choices=list(LEVELS))
    parser.add_argument("--turns", type=int, default=1, help="questions of a conversation")
    parser.add_argument("--question", type=int, default=24, help="tokens of a later question")
    parser.add_argument("--every", type=int, default=1, help="the plain way runs every Nth setting")
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="what the ratio is of")
    parser.add_argument("--note", default="", help="what else the reader should know")
    parser.add_argument("--out", type=Path, default=None)
    return parser.parse_args()


def _measured(
    engine: Engine, request: Request, settings: list[Setting], compared: range, rule: CodingRule, clock: str
) -> dict[str, Any]:
    """Seconds of both ways over one request, by clock, and the answers that differ.

    Those of the plain way, over the ``compared`` settings alone, are scaled up to all.
    """
    stages: dict[str, float] = {}
    watch = Watch()
    together = staged(lambda: engine.converse(request, settings, rule), stages, CLOCKS[clock])
    ours = watch.seconds()
    watch = Watch()
    apart = {place: stock(engine.loaded, request, settings[place], rule) for place in compared}
    plain = watch.seconds()
    scale = len(settings) / len(compared)
    return {
        "prompt_tokens": len(request.input_ids),
        "engine_s": {name: round(seconds, 2) for name, seconds in ours.items()},
        "stages_s": {name: round(stages[name], 2) for name in STAGES},
        "plain_s": {name: round(seconds * scale, 2) for name, seconds in plain.items()},
        "answers_that_differ": [
            f"{settings[place].name} turn {turn}"
            for place, said in apart.items()
            for turn, tokens in enumerate(said)
            if together[turn][place].tokens != tokens
        ],
    }


def main() -> None:
    """Measure and write the outcome."""
    arguments = _arguments()
    name = "generation_speed" if arguments.turns == 1 else "conversation_speed"
    name += "" if arguments.settings == min(LEVELS) else f"_{arguments.settings}"
    out = arguments.out or Path(f"results/benchmarks/{name}.json")
    loaded, rule = EmbeddedModel().load(), CodingRule("both", arguments.block)
    settings = [FULL, *uniform_settings(Affine(), Affine(), LEVELS[arguments.settings])]
    looped = range(arguments.every // 2, len(settings), arguments.every)
    engine, prompts = Engine(loaded), []
    examples = Synthetic(length=arguments.length).examples(
        loaded.tokenizer, [0], per_task=arguments.prompts + 1
    )

    def request(example: Example, limit: int) -> Request:
        # A stop token that the model does not write: every answer is as long as it may be.
        stops = frozenset({0})
        later = Turn(example.input_ids[-arguments.question :], example.target_ids, limit, stops)
        followed = (later,) * (arguments.turns - 1)
        return Request(example.input_ids, example.target_ids, limit, stops, follow_ups=followed)

    # A warm-up, of all rows: the buffers of a run are touched once.
    _measured(engine, request(examples[0], 4), settings, range(1), rule, arguments.clock)
    for example in examples[1:][: arguments.prompts]:
        prompts.append(
            _measured(engine, request(example, arguments.new_tokens), settings, looped, rule, arguments.clock)
        )
        print(prompts[-1], flush=True)
    plain, ours = (sum(prompt[way][arguments.clock] for prompt in prompts) for way in ("plain_s", "engine_s"))
    answers = len(looped) * len(prompts) * arguments.turns
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
        "turns": arguments.turns,
        "settings_of_plain_way": len(looped),
        "plain_s_is_estimate": len(looped) < len(settings),
        "prompts": prompts,
        "answers_compared": answers,
        "equal_answers": answers - sum(len(prompt["answers_that_differ"]) for prompt in prompts),
        "ratio": round(plain / ours, 2),
    }
    print(f"ratio {outcome['ratio']}, {outcome['equal_answers']} of {answers} answers equal")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(outcome, indent=1) + "\n")


if __name__ == "__main__":
    main()
