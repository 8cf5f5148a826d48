"""Hidden-state and key/value metrics against what transformers returns."""

import torch
from transformers import DynamicCache

from semkv_bench.importance import HiddenDrift, HiddenNorm, KeyNorm, ValueNorm


def residual_stream(loaded, ids):
    """States before every layer and after the last, [layers + 1, tokens, hidden].

    transformers gives the last one only behind the final norm, so that is caught before it.
    """
    last = []
    hook = loaded.model.get_decoder().norm.register_forward_pre_hook(
        lambda module, args: last.append(args[0])
    )
    try:
        with torch.no_grad():
            states = loaded.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    finally:
        hook.remove()
    return torch.cat([*states[:-1], *last])


def test_hidden_norm_is_that_of_the_state_before_each_quantized_layer(tiny, prompt, scored):
    found = scored(tiny, ["hidden_norm"], prompt, chunk=17)["hidden_norm"]
    expected = residual_stream(tiny, prompt).norm(dim=-1)[list(tiny.shape.quantized_layers)]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_hidden_drift_is_one_minus_the_mean_cosine_of_consecutive_states(tiny, prompt, scored):
    found = scored(tiny, ["hidden_drift"], prompt, chunk=17)["hidden_drift"]
    states = residual_stream(tiny, prompt)
    cosines = torch.cosine_similarity(states[:-1], states[1:], dim=-1)
    torch.testing.assert_close(found, 1 - cosines.mean(0, keepdim=True), rtol=1e-4, atol=1e-6)


def test_key_and_value_norm_are_those_of_the_cache(tiny, prompt, scored):
    found = scored(tiny, ["key_norm", "value_norm"], prompt, chunk=17)
    cache = DynamicCache()  # without the configuration no layer slides, and all tokens stay
    with torch.no_grad():
        tiny.model(torch.tensor([prompt]), **{tiny.cache_keyword: cache})
    for name, side in (("key_norm", "keys"), ("value_norm", "values")):
        expected = torch.stack(
            [getattr(cache.layers[i], side)[0].norm(dim=-1).mean(0) for i in tiny.shape.quantized_layers]
        )
        torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-5)


def test_norms_by_hand():
    states = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
    assert HiddenNorm().score(states, torch.zeros(2, 2)).tolist() == [5, 2]
    cached = torch.tensor([[[3.0, 4.0]], [[6.0, 8.0]]])  # two heads, one token: norms 5 and 10
    nothing = torch.zeros(2, 1, 2)
    assert KeyNorm().score(cached, nothing).tolist() == [7.5]
    assert ValueNorm().score(nothing, cached).tolist() == [7.5]


def test_norms_of_half_precision_do_not_overflow():
    # 300 squared exceeds float16's largest number, 65504.
    states = torch.full((1, 4), 300.0, dtype=torch.float16)
    assert HiddenNorm().score(states, states).tolist() == [600]
    assert HiddenNorm().score(states, states).dtype == torch.float32


def test_drift_by_hand():
    before = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    after = torch.tensor([[5.0, 0.0], [0.0, 2.0], [-1.0, 0.0], [1.0, 0.0]])
    assert HiddenDrift().score(before, after).tolist() == [0, 1, 2, 1]
