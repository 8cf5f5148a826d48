"""The pass in which attention sees coded keys and values, against the model's own arithmetic."""

import math

import pytest
import torch
from requested import some_ids, some_request
from transformers import DynamicCache

from semkv_bench.engine.engine import Engine
from semkv_bench.engine.options import EngineOptions
from semkv_bench.quantizers import Affine, Keep, Method, TurboQuant
from semkv_bench.settings.sets import uniform_settings
from semkv_bench.settings.setting import FULL

PROMPT, TARGETS = 24, some_ids(16, 9)
REQUEST = some_request(PROMPT, reference_ids=TARGETS)
CHANNELS = Method(
    "channels",
    {"group": {"axis": "channel", "tokens": 8}, "keep": {"sinks": 1, "block": 8}},
    {"group": {"axis": "token"}, "keep": {"recent": 5}},
)
SETTINGS = [
    FULL,
    *uniform_settings(Affine(), Affine(), [256, 3]),
    *uniform_settings(CHANNELS.keys, CHANNELS.values, [4]),
    *uniform_settings(TurboQuant(), TurboQuant(), [4]),
]


class _Coding(DynamicCache):
    """Codes what every layer is given before the layer's attention sees it, by the quantizers' own coders."""

    def __init__(self, config, keys, values, levels):
        super().__init__(config=config)
        self.coded = (keys, values), levels

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        quantizers, levels = self.coded
        found = []
        for quantizer, states in zip(quantizers, (key_states, value_states), strict=True):
            span = quantizer.keep.coded(states.shape[2])
            here = slice(span.start, span.stop)
            coder = quantizer.coder(states.shape[-1])
            out = states.clone()
            out[0, :, here] = coder.quantize_dequantize(
                states[0, :, here], torch.full((1, len(span)), levels)
            )[0]
            found.append(out)
        return super().update(*found, layer_idx, *args, **kwargs)


def _expected(loaded, cache):
    ids = torch.tensor([[*REQUEST.input_ids, *TARGETS[:-1]]])
    with torch.inference_mode():
        logits = loaded.model(input_ids=ids, past_key_values=cache, use_cache=True).logits[0, PROMPT - 1 :]
    return torch.log_softmax(logits.float(), -1)


def test_it_is_the_models_own_pass_over_coded_keys_and_values(tiny_llama):
    turn = Engine(tiny_llama).read_through(REQUEST, SETTINGS, {})[0]
    full = _expected(tiny_llama, DynamicCache(config=tiny_llama.model.config))
    cases = [(1, Affine(), Affine(), 256), (2, Affine(), Affine(), 3), (3, CHANNELS.keys, CHANNELS.values, 4)]
    for place, keys, values, levels in cases:
        expected = _expected(tiny_llama, _Coding(tiny_llama.model.config, keys, values, levels))
        kl = (full.exp() * (full - expected)).sum(-1).mean().item()
        nll = -expected[range(len(TARGETS)), TARGETS].mean().item()
        same = (full.argmax(-1) == expected.argmax(-1)).float().mean().item()
        assert turn[place].kl == pytest.approx(kl, rel=1e-3, abs=1e-6)
        assert turn[place].nll == pytest.approx(nll, rel=1e-4)
        assert turn[place].top1_agreement == pytest.approx(same)
    assert turn[0].kl == pytest.approx(0, abs=1e-6) and turn[0].top1_agreement == 1
    assert turn[0].nll == pytest.approx(-full[range(len(TARGETS)), TARGETS].mean().item(), rel=1e-4)
    assert turn[2].kl > 10 * turn[1].kl


def test_a_row_is_the_same_alone_and_among_others(tiny_llama):
    together = Engine(tiny_llama).read_through(REQUEST, SETTINGS, {})[0]
    alone = Engine(tiny_llama, EngineOptions(max_rows=1)).read_through(REQUEST, SETTINGS, {})[0]
    for one, other in zip(together, alone, strict=True):
        assert one.kl == pytest.approx(other.kl, rel=1e-3, abs=1e-6)
        assert (one.stored, one.reads) == (other.stored, other.reads)


def test_what_is_coded_is_counted_as_a_prompt_of_that_length(tiny_llama):
    turn = Engine(tiny_llama).read_through(REQUEST, SETTINGS, {})[0]
    fed = PROMPT + len(TARGETS) - 1
    held = {part.side: part.tokens for part in turn[3].stored.sides}
    keys, values = SETTINGS[3].stored(fed)
    assert (held["keys"].coded_tokens, held["values"].coded_tokens) == (
        keys.coded_tokens,
        values.coded_tokens,
    )
    assert all(outcome.reads == 3 for outcome in turn[1:])
    assert turn[2].coded_share == 1


def test_through_is_not_prefill(tiny_llama):
    engine = Engine(tiny_llama, EngineOptions(teacher_tokens=len(TARGETS)))
    read = engine.read_through(REQUEST, SETTINGS, {})[0]
    (answered,) = engine.answer(REQUEST, SETTINGS).turns
    assert answered[0].nll == pytest.approx(read[0].nll, rel=1e-4)
    assert abs(answered[2].kl - read[2].kl) > 1e-4
    assert math.isfinite(answered[2].nll)


def test_a_layer_codes_nothing_once_the_pass_is_over(tiny_llama):
    engine = Engine(tiny_llama)
    engine.read_through(REQUEST, SETTINGS, {})
    assert all(layer.arrived is None for layer in engine.rows.attending.values())


def test_windows_keep_their_tokens_in_16_bits(tiny_llama):
    """With a window as long as the text, the pass is that of full precision."""
    wide = Affine(keep=Keep(recent=100))
    turn = Engine(tiny_llama).read_through(REQUEST, [FULL, *uniform_settings(wide, wide, [2])], {})[0]
    assert turn[1].kl == pytest.approx(0, abs=1e-6) and turn[1].reads == 0
