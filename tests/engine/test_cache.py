import pytest
import torch
from transformers import DynamicCache, LlamaConfig

from semkv_bench.engine.attention import row_attention
from semkv_bench.engine.rows import RowCache, row_mask
from semkv_bench.models.layers import cache_layers
from semkv_bench.models.shape import full_attention_layers


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


@torch.inference_mode()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_rows_of_different_lengths_see_their_own_tokens_only(tiny, attention):
    model, keyword = tiny.model, tiny.cache_keyword
    ids = torch.randint(3, 97, (3, 24), generator=torch.Generator().manual_seed(2))
    lengths, new = [20, 9, 14], 3
    rows = RowCache(model.config)
    rows.reserve(3, 24)
    model.set_attn_implementation(attention)
    try:
        model(input_ids=ids[:, :20], use_cache=True, **{keyword: rows})
        rows.rewind(lengths)
        fresh = torch.stack([row[length : length + new] for row, length in zip(ids, lengths, strict=True)])
        places = torch.tensor(lengths)[:, None] + torch.arange(new)
        with row_attention(tiny, rows):
            got = model(
                input_ids=fresh,
                use_cache=True,
                position_ids=places,
                attention_mask=row_mask(model.config, places, 20 + new),
                **{keyword: rows},
            ).logits
        assert rows.lengths == [23, 12, 17]
        for row, length in enumerate(lengths):
            alone = model(input_ids=ids[row : row + 1, : length + new]).logits[0, -new:]
            torch.testing.assert_close(got[row], alone, atol=2e-4, rtol=1e-4)
    finally:
        model.set_attn_implementation("sdpa")


def _stored(rows, number):
    return [side[number, :, : rows.lengths[number]].clone() for side in rows.layers[0].stored()]


def test_parked_rows_come_back_as_they_were():
    rows = RowCache(LlamaConfig(num_hidden_layers=1))
    rows.reserve(4, 12)
    states = torch.randn(2, 4, 2, 8, 16, generator=torch.Generator().manual_seed(3))
    rows.update(*states, 0)
    rows.rewind([5, 8, 6, 7])
    before = {row.index: _stored(rows, number) for number, row in enumerate(rows.rows)}
    assert rows.park([0, 2]) == [3, 1]
    assert rows.lengths == [7, 8]
    rows.update(*torch.zeros(2, 2, 2, 1, 16), 0)
    rows.unpark()
    assert sorted(row.index for row in rows.rows) == [0, 1, 2, 3]
    for number, row in enumerate(rows.rows):
        grown = row.index in (3, 1)
        for was, now in zip(before[row.index], _stored(rows, number), strict=True):
            assert now.shape[1] == was.shape[1] + grown and torch.equal(now[:, : was.shape[1]], was)


def test_marked_rows_return_to_their_open_tokens():
    rows = RowCache(LlamaConfig(num_hidden_layers=1))
    rows.reserve(3, 12)
    rows.update(*torch.randn(2, 3, 2, 6, 16, generator=torch.Generator().manual_seed(4)), 0)
    for row, settled in zip(rows.rows, (2, 3, 4), strict=True):
        row.settled = (settled, settled)
    before = {row.index: _stored(rows, number) for number, row in enumerate(rows.rows)}
    marks = rows.mark()
    rows.update(*torch.ones(2, 3, 2, 2, 16), 0)
    for number, row in enumerate(rows.rows):
        for side in rows.layers[0].part(number, slice(row.open_from, 8)):
            side.zero_()
        row.settled, row.pieces = (8, 8), ((8,), (8,))
    rows.park([0])
    rows.unpark()
    rows.return_to(marks)
    for number, row in enumerate(rows.rows):
        assert (row.open_from, row.coded) == ((2, 3, 4)[row.index], (0, 0))
        assert all(map(torch.equal, _stored(rows, number), before[row.index]))


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
    kinds = [layer.kind for layer in cache_layers(tiny.model.config)]
    expected = (1,) if tiny.label.startswith("tiny-gemma3") else (0, 1, 2)
    assert full_attention_layers(tiny.model.config) == expected
    assert len(kinds) == 3
