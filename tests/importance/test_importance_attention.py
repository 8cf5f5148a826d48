"""Attention metrics against sums over the weights that eager attention returns."""

import copy

import pytest
import torch

from semkv_bench.importance import AttentionWindow, attention

RECEIVED, WINDOW = "attention_received", "attention_window-16"


def eager_weights(loaded, ids):
    """Attention weights [heads, queries, keys] of every quantized layer."""
    model = copy.deepcopy(loaded.model)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(torch.tensor([ids]), output_attentions=True).attentions
    return [weights[layer][0] for layer in loaded.shape.quantized_layers]


def summed(weights, first, tokens):
    """Sum over the queries from ``first``, mean over heads: [layers, tokens]."""
    return torch.stack([layer[:, first:tokens, :tokens].mean(0).sum(0) for layer in weights])


def check(loaded, ids, tokens, found):
    weights = eager_weights(loaded, ids)
    torch.testing.assert_close(found[RECEIVED], summed(weights, 0, tokens), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[WINDOW], summed(weights, tokens - 16, tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("block_bytes", [2 << 20, 4096])
@pytest.mark.parametrize("chunk", [None, 7])
def test_equal_sums_of_eager_weights(tiny, prompt, scored, chunk, block_bytes, monkeypatch):
    monkeypatch.setitem(attention._BLOCK_BYTES, "cpu", block_bytes)
    monkeypatch.setattr(attention, "_LEAST_QUERIES", 3)
    check(tiny, prompt, 60, scored(tiny, [RECEIVED, WINDOW], prompt, chunk=chunk))


def test_equal_sums_on_further_architectures(further, prompt, scored):
    # Gemma 2 caps its attention scores.
    check(further, prompt, 60, scored(further, [RECEIVED, WINDOW], prompt, chunk=25))


@pytest.mark.parametrize("chunk", [None, 20])
def test_queries_behind_the_scored_tokens_do_not_count(tiny, prompt, scored, chunk):
    found = scored(tiny, [RECEIVED, WINDOW], prompt, chunk=chunk, tokens=45)
    assert found[RECEIVED].shape == (len(tiny.shape.quantized_layers), 45)
    check(tiny, prompt, 45, found)


def test_received_attention_adds_up_to_the_number_of_queries(tiny, prompt, scored):
    found = scored(tiny, [RECEIVED, WINDOW], prompt, chunk=13)
    layers = len(tiny.shape.quantized_layers)
    torch.testing.assert_close(found[RECEIVED].sum(-1), torch.full((layers,), 60.0))
    torch.testing.assert_close(found[WINDOW].sum(-1), torch.full((layers,), 16.0))


def test_a_window_longer_than_the_prompt_is_the_whole_prompt(tiny_llama, prompt, scored):
    found = scored(tiny_llama, [RECEIVED, AttentionWindow(1000)], prompt)
    assert torch.equal(found[RECEIVED], found["attention_window-1000"])


def test_an_eager_model_is_scored_alike(copied, prompt, scored):
    by_sdpa = scored(copied, [RECEIVED, "key_norm"], prompt)
    copied.model.set_attn_implementation("eager")
    by_eager = scored(copied, [RECEIVED, "key_norm"], prompt)
    assert copied.model.config._attn_implementation == "eager"
    torch.testing.assert_close(by_eager, by_sdpa, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("budget", [0, 1, 17, 1000, 58254])
@pytest.mark.parametrize("begin", [0, 1, 63, 4000])
def test_blocks_are_as_large_as_the_budget_allows(budget, begin):
    count = attention._queries_in(budget, begin)
    least = attention._LEAST_QUERIES
    assert count == least or count * (begin + count) <= budget
    assert count >= least and (count + 1) * (begin + count + 1) > budget
