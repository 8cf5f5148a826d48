"""Observers, rows and the packed cache take part in one model's attention together, and leave it as it was."""

import contextlib

import pytest
import torch
from packed_caches import L3, MIXED, greedy, some_ids
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from semkv_bench import SemKVCache
from semkv_bench.engine.attention import row_attention
from semkv_bench.engine.rows import RowCache
from semkv_bench.errors import SemkvError
from semkv_bench.importance import observe
from semkv_bench.importance.hooks import watch_attention
from semkv_bench.models import attention_hook

METRICS = ["key_norm", "attention_received", "attention_window-8", "snapkv-8"]


def name_of(loaded):
    return loaded.model.config._attn_implementation


def observed(loaded, ids, cache):
    with torch.inference_mode(), observe(loaded, METRICS, tokens=ids.shape[1] - 1) as observer:
        logits = loaded.model(ids, **{loaded.cache_keyword: cache}).logits
    return observer.scores(), logits


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("way", ["dequantize", "packed"])
def test_an_observer_beside_the_packed_cache_scores_what_it_scores_alone(tiny_llama, way, attention):
    """The cache asks attention a second time for the prompt's last token; the observer hears one call a layer."""
    ids = some_ids(40)
    tiny_llama.model.set_attn_implementation(attention)
    try:
        alone, _ = observed(tiny_llama, ids, DynamicCache(config=tiny_llama.model.config))
        expected = greedy(tiny_llama, SemKVCache(tiny_llama.model.config, L3, attention=way), ids)
        cache = SemKVCache(tiny_llama.model.config, L3, attention=way)
        scores, logits = observed(tiny_llama, ids, cache)
        assert name_of(tiny_llama) == attention
        assert scores.keys() == alone.keys()
        assert all(scores[label].equal(alone[label]) for label in alone)
        assert logits[0, -1].argmax() == expected[0][0]
        # What it observed during decoding changes no token either.
        with watch_attention(tiny_llama, lambda layer, call: None):
            again = greedy(tiny_llama, SemKVCache(tiny_llama.model.config, L3, attention=way), ids)
        assert again == expected
    finally:
        tiny_llama.model.set_attn_implementation("sdpa")


def test_attention_is_wrapped_once_however_many_take_part(tiny_llama):
    ids, calls = some_ids(20), []
    loaded = tiny_llama

    def hear(layer, call):
        calls.append((layer, name_of(loaded)))

    cache = SemKVCache(loaded.model.config, L3, attention="packed")
    with torch.inference_mode(), watch_attention(loaded, hear), watch_attention(loaded, hear):
        loaded.model(ids, **{loaded.cache_keyword: cache})
        loaded.model(ids[:, :1], **{loaded.cache_keyword: cache})
    layers = loaded.shape.quantized_layers
    assert [layer for layer, _ in calls] == [layer for layer in layers for _ in range(2)] * 2
    assert {name for _, name in calls} == {"sdpa+semkv"}
    assert name_of(loaded) == "sdpa"
    assert not [name for name in ALL_ATTENTION_FUNCTIONS.valid_keys() if name.count("+") > 1]


@pytest.mark.parametrize("rows_first", [True, False])
def test_rows_and_observers_nest_either_way(tiny_llama, rows_first):
    """Observers are told what the rows' attention was asked; rows are served by it whoever came first."""
    loaded, ids, heard = tiny_llama, some_ids(9), []

    def run(*others):
        rows = RowCache(loaded.model.config)
        rows.reserve(2, 16)
        managers = [row_attention(loaded, rows), *others]
        with torch.inference_mode(), contextlib.ExitStack() as stack:
            for manager in managers if rows_first else reversed(managers):
                stack.enter_context(manager)
            assert attention_hook.model_attention(loaded.model.config) == "sdpa"
            return loaded.model(ids.expand(2, -1), **{loaded.cache_keyword: rows}).logits

    plain = run()
    watched = run(watch_attention(loaded, lambda layer, call: heard.append(call), batch=True))
    assert watched.equal(plain)
    assert [tuple(call.queries.shape[:1]) for call in heard] == [(2,)] * len(loaded.shape.quantized_layers)
    assert name_of(loaded) == "sdpa"


def test_nothing_is_left_after_an_exception(tiny_llama):
    loaded, ids = tiny_llama, some_ids(20)
    expected = greedy(loaded, DynamicCache(config=loaded.model.config), ids)

    def fail(layer, call):
        raise RuntimeError("out of memory")

    for cache in (DynamicCache(config=loaded.model.config), SemKVCache(loaded.model.config, MIXED[0])):
        rows = RowCache(loaded.model.config)
        with (
            pytest.raises(RuntimeError, match="out of memory"),
            row_attention(loaded, rows),
            watch_attention(loaded, fail),
        ):
            loaded.model(ids, **{loaded.cache_keyword: cache})
        assert name_of(loaded) == "sdpa"
        assert not any(attention_hook._listeners.values()) and not any(attention_hook._readers.values())
        assert attention_hook.DELETED.get()(0) is None
    assert greedy(loaded, DynamicCache(config=loaded.model.config), ids) == expected


def test_a_loan_that_did_not_come_back_is_called_off(tiny_llama):
    """A model whose attention does not use transformers' interface never reads what it was lent."""
    loaded = tiny_llama
    cache = SemKVCache(loaded.model.config, L3)
    states = [torch.randn(1, loaded.model.config.num_key_value_heads, 5, loaded.model.config.head_dim)] * 2
    cache.update(*states, 0)
    assert name_of(loaded) == "sdpa+semkv"
    with pytest.raises(SemkvError, match="did not come back"):
        cache.update(*states, 1)
    assert name_of(loaded) == "sdpa"
