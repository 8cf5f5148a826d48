import copy

import pytest
import torch
from packed_caches import (
    AFFINE,
    L3,
    MIXED,
    T4,
    TURBO,
    UNIFORM,
    append_to,
    greedy,
    mixes,
    open_then_coded,
    small_config,
    some_ids,
    some_states,
    swept,
)
from thinned import of_models
from transformers import DynamicCache

from semkv_bench import SemKVCache
from semkv_bench.errors import UsageError
from semkv_bench.importance import Random, observe
from semkv_bench.packed.layer import PackedLayer
from semkv_bench.settings.sets import uniform_settings

# Against the sweep


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("tiny", "seed"), of_models([(0,), (1,)], (0,)), indirect=["tiny"])
def test_generate_equals_the_sweep(tiny, seed):
    ids, settings = some_ids(40 + 31 * seed, seed), [*UNIFORM, *MIXED]
    for setting, expected in zip(settings, swept(tiny, ids, settings, seed=seed), strict=True):
        cache = SemKVCache(tiny.model.config, setting, seed=seed)
        assert greedy(tiny, cache, ids) == [expected], setting.name
        coded = cache.layers[tiny.shape.quantized_layers[0]]
        assert coded.coded == ids.shape[1] - 1 and coded.length == ids.shape[1] + 7


def test_prefill_first_equals_the_sweep(tiny):
    ids, settings = some_ids(50), [L3, T4, *MIXED[:2]]
    for setting, expected in zip(settings, swept(tiny, ids, settings), strict=True):
        cache = SemKVCache(tiny.model.config, setting)
        cache.prefill(tiny.model, ids, torch.ones_like(ids))
        assert cache.get_seq_length() == 49
        assert greedy(tiny, cache, ids) == [expected]


def test_attention_over_packed_blocks_equals_the_sweep(tiny):
    ids, settings = some_ids(50), [L3, T4, *MIXED[:2]]
    for setting, expected in zip(settings, swept(tiny, ids, settings), strict=True):
        cache = SemKVCache(tiny.model.config, setting, attention="packed")
        assert greedy(tiny, cache, ids) == [expected]


@pytest.mark.parametrize("setting", [L3, T4, MIXED[0], *UNIFORM[-1:]], ids=lambda s: s.name)
def test_packed_attention_equals_dequantized(tiny, setting):
    """Sums run in another order, in float32: logits agree to a hundred-thousandth of their size."""
    ids, logits = some_ids(50), []
    for attention in ("dequantize", "packed"):
        cache = SemKVCache(tiny.model.config, setting, attention=attention)
        with torch.inference_mode():
            tiny.model(input_ids=ids, use_cache=True, **{tiny.cache_keyword: cache})
            for token in (5, 6):
                step = torch.tensor([[token]])
                out = tiny.model(input_ids=step, use_cache=True, **{tiny.cache_keyword: cache})
        logits.append(out.logits)
    assert (logits[0] - logits[1]).abs().max() < 1e-5 * logits[0].abs().max()


def test_packed_attention_makes_no_copy_in_full(tiny_llama, monkeypatch):
    ids = some_ids(50)
    cache = SemKVCache(tiny_llama.model.config, L3, attention="packed")
    cache.prefill(tiny_llama.model, ids)
    monkeypatch.setattr(PackedLayer, "_full", lambda self: pytest.fail("dequantized"))
    greedy(tiny_llama, cache, ids)
    assert cache.workspace_nbytes == 0


@pytest.mark.slow
def test_the_small_model_answers_as_in_the_sweep(smollm2):
    settings = [*uniform_settings(AFFINE, AFFINE, [6]), T4, *mixes("key_norm", "shared", 6, 5, 0.25, AFFINE)]
    text = "Answer in one sentence, as a teacher would. Water is made of two kinds of atoms, namely"
    ids = smollm2.tokenizer(text, return_tensors="pt")["input_ids"]
    for setting, expected in zip(settings, swept(smollm2, ids, settings, new=10, seed=3), strict=True):
        cache = SemKVCache(smollm2.model.config, setting, seed=3)
        assert greedy(smollm2, cache, ids, new=10) == [expected], setting.name


def test_given_importance_equals_the_sweep(tiny_llama):
    ids = some_ids(40)
    settings = [*mixes("surprisal", "shared"), *mixes("hidden_norm", "layer"), *mixes("random", "shared")]
    with observe(tiny_llama, ["surprisal", "hidden_norm"], tokens=39, seed=0) as observer:
        tiny_llama.model(ids)
        scores = observer.scores()
    scores["random"] = Random().score(ids[0, :-1], 0)
    for setting, expected in zip(settings, swept(tiny_llama, ids, settings), strict=True):
        cache = SemKVCache(tiny_llama.model.config, setting, importance=scores)
        assert greedy(tiny_llama, cache, ids) == [expected], setting.name


def test_the_model_is_left_as_it_was(tiny):
    ids, before = some_ids(20), tiny.model.config._attn_implementation
    expected = greedy(tiny, DynamicCache(config=tiny.model.config), ids)
    cache = SemKVCache(tiny.model.config, MIXED[0], attention="packed")
    greedy(tiny, cache, ids)
    assert tiny.model.config._attn_implementation == before
    assert not torch.nn.modules.module._global_forward_hooks
    assert greedy(tiny, DynamicCache(config=tiny.model.config), ids) == expected
    unused = SemKVCache(tiny.model.config, MIXED[0])
    assert torch.nn.modules.module._global_forward_hooks
    del unused
    assert not torch.nn.modules.module._global_forward_hooks


def test_eager_attention(tiny_llama):
    ids = some_ids(40)
    (expected,) = swept(tiny_llama, ids, [L3])
    tiny_llama.model.set_attn_implementation("eager")
    try:
        for attention in ("dequantize", "packed"):
            cache = SemKVCache(tiny_llama.model.config, L3, attention=attention)
            assert greedy(tiny_llama, cache, ids) == [expected]
    finally:
        tiny_llama.model.set_attn_implementation("sdpa")


@pytest.mark.parametrize("setting", [L3, MIXED[0]], ids=lambda s: s.name)
def test_prompt_in_chunks(tiny, setting):
    ids = some_ids(50)
    (expected,) = swept(tiny, ids, [setting])
    cache = SemKVCache(tiny.model.config, setting, prompt_tokens=50)
    assert greedy(tiny, cache, ids, prefill_chunk_size=16) == [expected]
    with pytest.raises(UsageError, match="prompt_tokens=30"):
        greedy(tiny, SemKVCache(tiny.model.config, setting, prompt_tokens=30), ids, prefill_chunk_size=16)


# Batches


PADDED = [(setting, how) for setting in (T4, MIXED[1], L3, MIXED[0]) for how in ("dequantize", "packed")]


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("tiny", "setting", "attention"),
    of_models(PADDED, *PADDED[4:]),
    indirect=["tiny"],
    ids=lambda given: getattr(given, "name", given),
)
def test_left_padded_batch_equals_single_runs(tiny, setting, attention):
    lengths, longest = [40, 7, 23, 1], 40
    ids, mask = torch.zeros(4, longest, dtype=torch.long), torch.zeros(4, longest, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, longest - length :] = some_ids(length, row)
        mask[row, longest - length :] = 1
    alone = [
        greedy(tiny, SemKVCache(tiny.model.config, setting, attention=attention), some_ids(length, row))[0]
        for row, length in enumerate(lengths)
    ]
    cache = SemKVCache(tiny.model.config, setting, attention=attention)
    assert greedy(tiny, cache, ids, mask) == alone
    fed = SemKVCache(tiny.model.config, setting, attention=attention)
    fed.prefill(tiny.model, input_ids=ids, attention_mask=mask)
    assert greedy(tiny, fed, ids, mask) == alone
    pieces = cache.layers[tiny.shape.quantized_layers[0]].sides[0].rows
    assert [sum(p.tokens for p in row) for row in pieces] == [39, 6, 22, 0]


def test_rows_are_selected_repeated_and_reordered(tiny_llama):
    cache = SemKVCache(small_config(), T4, parts="both")
    open_then_coded(cache, 70, rows=3)
    new = some_states(1, rows=3, seed=9)
    before = [x.clone() for x in append_to(cache, new)]
    bytes_before = cache.nbytes.packed

    def now(rows):
        cache.crop(-1)
        return append_to(cache, [x[rows] for x in new])

    for change, rows in (
        (lambda: cache.reorder_cache(torch.tensor([2, 0, 2])), [2, 0, 2]),
        (lambda: cache.batch_repeat_interleave(2), [2, 2, 0, 0, 2, 2]),
        (lambda: cache.batch_select_indices(torch.tensor([0, 2])), [2, 0]),
        (lambda: cache.batch_select_indices(torch.tensor([False, True])), [0]),
    ):
        change()
        for got, expected in zip(now(rows), before, strict=True):
            assert torch.equal(got, expected[rows])
    assert cache.nbytes.packed < bytes_before / 2


def test_copied_rows_share_their_packed_tokens():
    cache = SemKVCache(small_config(), T4, parts="both")
    open_then_coded(cache, 70)
    alone = cache.nbytes
    cache.batch_repeat_interleave(4)
    assert cache.nbytes.packed == alone.packed and cache.nbytes.open == 4 * alone.open


def test_beam_search(tiny):
    ids, sequences = some_ids(40), []
    for attention in ("dequantize", "packed"):
        cache = SemKVCache(tiny.model.config, T4, attention=attention)
        sequences.append(greedy(tiny, cache, ids, num_beams=3, num_return_sequences=3))
    assert sequences[0] == sequences[1] and len({tuple(row) for row in sequences[0]}) == 3
    reference = DynamicCache(config=tiny.model.config)
    with torch.inference_mode():
        tiny.model(input_ids=ids[:, :-1], use_cache=True, **{tiny.cache_keyword: reference})
    for index in tiny.shape.quantized_layers:
        layer = reference.layers[index]
        layer.keys, layer.values = (
            TURBO.coder(16, seed=2 * index + side).quantize_dequantize(x[0], torch.tensor([[4]]))
            for side, x in enumerate((layer.keys, layer.values))
        )
    reference.batch_repeat_interleave(3)
    assert sequences[0] == greedy(tiny, reference, ids, num_beams=3, num_return_sequences=3)


# Blocks of generated tokens


def test_blocks_are_coded_once_when_a_later_token_arrives():
    cache = SemKVCache(small_config(), L3, parts="both", block=16)
    for step in range(48):
        append_to(cache, some_states(1, seed=step))
    layer = cache.layers[0]
    assert (layer.coded, layer.length - layer.coded) == (32, 16)
    words = [side.rows[0][0].streams[0].words.clone() for side in layer.sides]
    for step in range(48, 80):
        append_to(cache, some_states(1, seed=step))
    assert layer.coded == 64
    for side, early in zip(layer.sides, words, strict=True):
        assert torch.equal(side.rows[0][0].streams[0].words[: len(early)], early)


@pytest.mark.parametrize("setting", [L3, T4, mixes("value_norm", "shared")[0]], ids=lambda s: s.name)
def test_blocks_equal_offline_quantization_whatever_the_calls(setting):
    states = some_states(150, seed=3)
    results = []
    for sizes in ([1] * 150, [1, 99, 50], [1, 16, 16, 100, 17]):
        cache = SemKVCache(small_config(layers=1), setting, parts="both", seed=5)
        done = 0
        for size in sizes:
            append_to(cache, [x[:, :, done : done + size] for x in states])
            done += size
        results.append(append_to(cache, [x[:, :, :1] for x in states])[0].clone())
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    keys, values = (x[0] for x in states)
    coder = setting.keys.quantizer.coder(64, seed=10_000)
    for block in (slice(0, 64), slice(64, 128)):
        ranks = torch.linalg.vector_norm(values[:, block], dim=-1).mean(0)
        levels = setting.keys.allocation.levels(64, ranks)[None]
        offline = coder.quantize_dequantize(keys[:, block], levels)[0]
        torch.testing.assert_close(results[0][0, :, block], offline, rtol=1e-6, atol=1e-6)
    assert torch.equal(results[0][0, :, 128:150], keys[:, 128:])


def test_prompt_and_generated_blocks(tiny):
    """The prompt's incomplete last block stays as it is, and generated blocks follow it; for attention over codes all
    of it is stored together, as far as it is short."""
    ids = some_ids(40)
    (expected,) = swept(tiny, ids, [T4], new=8)
    answers = []
    for attention, stored in (("dequantize", [39, 32]), ("packed", [71])):
        cache = SemKVCache(tiny.model.config, T4, parts="both", block=16, attention=attention)
        answers.append(greedy(tiny, cache, ids, new=40)[0])
        layer = cache.layers[tiny.shape.quantized_layers[0]]
        assert [p.tokens for p in layer.sides[0].rows[0]] == stored
    assert answers[0] == answers[1] and answers[0][:8] == expected


# Crop, copy, reset


def test_crop_in_the_open_part_leaves_no_trace(tiny_llama):
    ids = some_ids(40)
    cache = SemKVCache(tiny_llama.model.config, T4)
    expected = greedy(tiny_llama, cache, ids, new=12)
    cache.crop(-8)
    assert cache.is_croppable and cache.get_seq_length() == 43
    tokens = torch.cat([ids, torch.tensor(expected)[:, :4]], dim=1)
    assert greedy(tiny_llama, cache, tokens, new=8) == [expected[0][4:]]


@pytest.mark.parametrize("setting", [L3, MIXED[0]], ids=lambda s: s.name)
def test_crop_in_the_coded_part_keeps_codes(setting):
    cache = SemKVCache(small_config(), setting, parts="both")
    open_then_coded(cache, 192, rows=2)
    new = some_states(1, rows=2, seed=9)
    before = [x.clone() for x in append_to(cache, new)]
    for kept, how in ((100, -(before[0].shape[2] - 100)), (64, 64), (7, 7)):
        cache.crop(how)
        assert cache.get_seq_length() == kept
        after = append_to(cache, new)
        for got, expected, fresh in zip(after, before, new, strict=True):
            assert torch.equal(got[:, :, :kept], expected[:, :, :kept]) and torch.equal(
                got[:, :, kept:], fresh
            )
        cache.crop(-1)


def test_a_copied_prompt_is_used_twice(tiny):
    ids = some_ids(40)
    expected = greedy(tiny, SemKVCache(tiny.model.config, MIXED[0]), ids)
    prompt = SemKVCache(tiny.model.config, MIXED[0])
    prompt.prefill(tiny.model, ids)
    for _ in range(2):
        assert greedy(tiny, copy.deepcopy(prompt), ids) == expected
    assert prompt.get_seq_length() == 39
    empty = copy.deepcopy(SemKVCache(tiny.model.config, MIXED[0]))
    assert greedy(tiny, empty, ids) == expected


def test_reset(tiny):
    cache = SemKVCache(tiny.model.config, MIXED[0])
    first = greedy(tiny, cache, some_ids(40))
    greedy(tiny, cache, torch.cat([some_ids(40), torch.tensor(first), some_ids(3, 5)], dim=1))
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.nbytes.total == 0
    assert greedy(tiny, cache, some_ids(40)) == first


def test_training_mode_graphs_are_not_kept(tiny_llama):
    cache = SemKVCache(tiny_llama.model.config, L3)
    for ids in (some_ids(20), some_ids(1)):
        tiny_llama.model(input_ids=ids, use_cache=True, **{tiny_llama.cache_keyword: cache})
    assert not cache.layers[0].sides[0].buffer.requires_grad
