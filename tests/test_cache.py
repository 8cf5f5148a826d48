import pytest
import torch
from transformers import DynamicCache

from semkv_bench.cache import RowCache, full_attention_layers, layer_types


def _poison(cache: RowCache) -> None:
    for layer in cache.layers:
        for buffer in (layer.keys, layer.values):
            buffer[:, :, layer.length :] = float("nan")


@torch.inference_mode()
def test_matches_dynamic_cache_at_every_step(tiny):
    model, keyword = tiny.model, tiny.cache_keyword
    ids = torch.randint(3, 97, (2, 20), generator=torch.Generator().manual_seed(0))
    rows = RowCache(model.config)
    rows.reserve(2, 40)
    dynamic = DynamicCache(config=model.config)
    for chunk in ids.split([12, 1, 3, 1, 1, 2], dim=1):
        got = model(input_ids=chunk, use_cache=True, **{keyword: rows}).logits
        expected = model(input_ids=chunk, use_cache=True, **{keyword: dynamic}).logits
        torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-4)
        _poison(rows)
    assert rows.get_seq_length() == 20


@torch.inference_mode()
def test_dropped_rows_leave_the_others_untouched(tiny_llama):
    model, keyword = tiny_llama.model, tiny_llama.cache_keyword
    ids = torch.randint(3, 97, (5, 12), generator=torch.Generator().manual_seed(1))
    rows = RowCache(model.config)
    rows.reserve(5, 20)
    model(input_ids=ids, use_cache=True, **{keyword: rows})
    order = rows.drop([1, 4])
    assert sorted(order) == [0, 2, 3]
    step = torch.full((3, 1), 9)
    got = model(input_ids=step, use_cache=True, **{keyword: rows}).logits
    alone = model(input_ids=torch.cat([ids[order], step], dim=1)).logits[:, -1:]
    torch.testing.assert_close(got, alone, atol=2e-4, rtol=1e-4)


def test_drop_everything_and_start_anew(tiny_llama):
    rows = RowCache(tiny_llama.model.config)
    rows.reserve(3, 8)
    rows.layers[0].update(torch.ones(3, 2, 4, 16), torch.ones(3, 2, 4, 16))
    assert rows.layers[0].rows == 3
    rows.layers[1:] = []
    assert rows.drop([0, 1, 2]) == []
    rows.reserve(2, 8)
    assert rows.get_seq_length() == 0 and rows.layers[0].keys is not None


def test_crop_takes_transformers_negative_count(tiny_llama):
    rows = RowCache(tiny_llama.model.config)
    rows.reserve(1, 8)
    for index in range(3):
        rows.update(torch.ones(1, 2, 5, 16), torch.ones(1, 2, 5, 16), index)
    rows.crop(-2)
    assert rows.get_seq_length() == 3 and rows.layers[2].stored()[0].shape[2] == 3


def test_overflow_is_refused(tiny_llama):
    rows = RowCache(tiny_llama.model.config)
    rows.reserve(1, 3)
    with pytest.raises(ValueError, match="holds 3 tokens"):
        rows.layers[0].update(torch.ones(1, 2, 4, 16), torch.ones(1, 2, 4, 16))


def test_only_full_attention_layers_are_quantized(tiny):
    kinds = layer_types(tiny.model.config)
    expected = (1,) if tiny.label.startswith("tiny-gemma3") else (0, 1, 2)
    assert full_attention_layers(tiny.model.config) == expected
    assert len(kinds) == 3
