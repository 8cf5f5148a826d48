import copy
import math
import subprocess
import sys

import pytest
import torch
from transformers import DynamicCache, LlamaConfig

from semkv_bench import SemKVCache
from semkv_bench.allocation import TwoLevel
from semkv_bench.engine import Engine, Request
from semkv_bench.errors import SemkvError, UsageError
from semkv_bench.importance import Random, observe
from semkv_bench.packed.layer import PackedLayer
from semkv_bench.quantizers import Affine, NonFiniteError, TurboQuant, TurboQuantProd, TurboQuantSplit
from semkv_bench.settings import FULL, Coded, Pruned, Setting, TwoLevelMixes, uniform_settings

AFFINE, TURBO = Affine(), TurboQuant()


def _mixes(metric, scope, high=6, low=2, fraction=0.25, quantizer=TURBO):
    return TwoLevelMixes(high, low, fraction, metric, scope).settings(quantizer, quantizer)


UNIFORM = [
    *uniform_settings(AFFINE, AFFINE, [16, 5, 2]),
    *uniform_settings(TURBO, TURBO, [4, 2]),
    *uniform_settings(AFFINE, TURBO, [3]),
    *uniform_settings(AFFINE, AFFINE, [3], value_levels="full"),
]
MIXED = _mixes(["key_norm", "value_norm", "recency"], ["shared", "layer"])
MIXED += _mixes("key_norm", "shared", 5, 3, 0.5, AFFINE)
L3 = uniform_settings(AFFINE, AFFINE, [3])[0]
T4 = uniform_settings(TURBO, TURBO, [4])[0]


def _ids(length, seed=0):
    return torch.randint(3, 97, (1, length), generator=torch.Generator().manual_seed(seed))


def _generate(loaded, cache, ids, mask=None, new=8, **options):
    """New tokens of every row; the model's end token is no end, so that all rows are compared in full."""
    mask = torch.ones_like(ids) if mask is None else mask
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": new, **options}
    out = loaded.model.generate(ids, attention_mask=mask, past_key_values=cache, **options)
    return out[:, ids.shape[1] :].tolist()


def _sweep(loaded, ids, settings, new=8, seed=0):
    request = Request(ids[0].tolist(), [5], new, frozenset(), seed=seed)
    return [outcome.tokens for outcome in Engine(loaded).run(request, [FULL, *settings])[1:]]


def _small_config(layers=2, heads=2, head_dim=64):
    return LlamaConfig(
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=head_dim,
        hidden_size=heads * head_dim,
        max_position_embeddings=4096,
    )


def _states(tokens, rows=1, heads=2, head_dim=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, heads, tokens, head_dim, generator=generator) for _ in "kv"]


def _append(cache, states):
    return [cache.update(*states, layer) for layer in range(len(cache.layers))][-1]


def _open_then_coded(cache, tokens, **shape):
    """A cache of which ``tokens`` tokens are coded and one is open, filled without a model.

    The first call brings the whole prompt, which is one token here, and the rest is generated.
    """
    states = _states(tokens, **shape)
    for part in (slice(0, 1), slice(1, tokens)):
        _append(cache, [x[:, :, part] for x in states])
    _append(cache, [x[:, :, :1] for x in states])
    return states


# Against the sweep


@pytest.mark.parametrize("seed", [0, 1])
def test_generate_equals_the_sweep(tiny, seed):
    ids, settings = _ids(40 + 31 * seed, seed), [*UNIFORM, *MIXED]
    for setting, expected in zip(settings, _sweep(tiny, ids, settings, seed=seed), strict=True):
        cache = SemKVCache(tiny.model.config, setting, seed=seed)
        assert _generate(tiny, cache, ids) == [expected], setting.name
        coded = cache.layers[tiny.shape.quantized_layers[0]]
        assert coded.coded == ids.shape[1] - 1 and coded.length == ids.shape[1] + 7


def test_prefill_first_equals_the_sweep(tiny):
    ids, settings = _ids(50), [L3, T4, *MIXED[:2]]
    for setting, expected in zip(settings, _sweep(tiny, ids, settings), strict=True):
        cache = SemKVCache(tiny.model.config, setting)
        cache.prefill(tiny.model, ids, torch.ones_like(ids))
        assert cache.get_seq_length() == 49
        assert _generate(tiny, cache, ids) == [expected]


def test_attention_over_packed_blocks_equals_the_sweep(tiny):
    ids, settings = _ids(50), [L3, T4, *MIXED[:2]]
    for setting, expected in zip(settings, _sweep(tiny, ids, settings), strict=True):
        cache = SemKVCache(tiny.model.config, setting, attention="packed")
        assert _generate(tiny, cache, ids) == [expected]


@pytest.mark.parametrize("setting", [L3, T4, MIXED[0], *UNIFORM[-1:]], ids=lambda s: s.name)
def test_packed_attention_equals_dequantized(tiny, setting):
    """Sums run in another order, in float32: logits agree to a hundred-thousandth of their size."""
    ids, logits = _ids(50), []
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
    ids = _ids(50)
    cache = SemKVCache(tiny_llama.model.config, L3, attention="packed")
    cache.prefill(tiny_llama.model, ids)
    monkeypatch.setattr(PackedLayer, "_full", lambda self: pytest.fail("dequantized"))
    _generate(tiny_llama, cache, ids)
    assert cache.workspace_nbytes == 0


def test_the_small_model_answers_as_in_the_sweep(smollm2):
    settings = [*uniform_settings(AFFINE, AFFINE, [6]), T4, *_mixes("key_norm", "shared", 6, 5, 0.25, AFFINE)]
    for text in ("The capital of France is", "Water is made of two kinds of atoms, namely"):
        ids = smollm2.tokenizer(f"Answer in one sentence, as a teacher would. {text}", return_tensors="pt")
        ids = ids["input_ids"]
        for setting, expected in zip(settings, _sweep(smollm2, ids, settings, new=10, seed=3), strict=True):
            cache = SemKVCache(smollm2.model.config, setting, seed=3)
            assert _generate(smollm2, cache, ids, new=10) == [expected], setting.name


def test_given_importance_equals_the_sweep(tiny_llama):
    ids = _ids(40)
    settings = [*_mixes("surprisal", "shared"), *_mixes("hidden_norm", "layer"), *_mixes("random", "shared")]
    with observe(tiny_llama, ["surprisal", "hidden_norm"], tokens=39, seed=0) as observer:
        tiny_llama.model(ids)
        scores = observer.scores()
    scores["random"] = Random().score(ids[0, :-1], 0)
    for setting, expected in zip(settings, _sweep(tiny_llama, ids, settings), strict=True):
        cache = SemKVCache(tiny_llama.model.config, setting, importance=scores)
        assert _generate(tiny_llama, cache, ids) == [expected], setting.name


def test_the_model_is_left_as_it_was(tiny):
    ids, before = _ids(20), tiny.model.config._attn_implementation
    expected = _generate(tiny, DynamicCache(config=tiny.model.config), ids)
    cache = SemKVCache(tiny.model.config, MIXED[0], attention="packed")
    _generate(tiny, cache, ids)
    assert tiny.model.config._attn_implementation == before
    assert not torch.nn.modules.module._global_forward_hooks
    assert _generate(tiny, DynamicCache(config=tiny.model.config), ids) == expected
    unused = SemKVCache(tiny.model.config, MIXED[0])
    assert torch.nn.modules.module._global_forward_hooks
    del unused
    assert not torch.nn.modules.module._global_forward_hooks


def test_eager_attention(tiny_llama):
    ids = _ids(40)
    (expected,) = _sweep(tiny_llama, ids, [L3])
    tiny_llama.model.set_attn_implementation("eager")
    try:
        for attention in ("dequantize", "packed"):
            cache = SemKVCache(tiny_llama.model.config, L3, attention=attention)
            assert _generate(tiny_llama, cache, ids) == [expected]
    finally:
        tiny_llama.model.set_attn_implementation("sdpa")


@pytest.mark.parametrize("setting", [L3, MIXED[0]], ids=lambda s: s.name)
def test_prompt_in_chunks(tiny, setting):
    ids = _ids(50)
    (expected,) = _sweep(tiny, ids, [setting])
    cache = SemKVCache(tiny.model.config, setting, prompt_tokens=50)
    assert _generate(tiny, cache, ids, prefill_chunk_size=16) == [expected]
    with pytest.raises(UsageError, match="prompt_tokens=30"):
        _generate(tiny, SemKVCache(tiny.model.config, setting, prompt_tokens=30), ids, prefill_chunk_size=16)


# Batches


@pytest.mark.parametrize("attention", ["dequantize", "packed"])
@pytest.mark.parametrize("setting", [L3, T4, *MIXED[:2]], ids=lambda s: s.name)
def test_left_padded_batch_equals_single_runs(tiny, setting, attention):
    lengths, longest = [40, 7, 23, 1], 40
    ids, mask = torch.zeros(4, longest, dtype=torch.long), torch.zeros(4, longest, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, longest - length :] = _ids(length, row)
        mask[row, longest - length :] = 1
    alone = [
        _generate(tiny, SemKVCache(tiny.model.config, setting, attention=attention), _ids(length, row))[0]
        for row, length in enumerate(lengths)
    ]
    cache = SemKVCache(tiny.model.config, setting, attention=attention)
    assert _generate(tiny, cache, ids, mask) == alone
    fed = SemKVCache(tiny.model.config, setting, attention=attention)
    fed.prefill(tiny.model, input_ids=ids, attention_mask=mask)
    assert _generate(tiny, fed, ids, mask) == alone
    pieces = cache.layers[tiny.shape.quantized_layers[0]].sides[0].rows
    assert [sum(p.layout.tokens for p in row) for row in pieces] == [39, 6, 22, 0]


def test_rows_are_selected_repeated_and_reordered(tiny_llama):
    cache = SemKVCache(_small_config(), T4, parts="both")
    _open_then_coded(cache, 70, rows=3)
    new = _states(1, rows=3, seed=9)
    before = [x.clone() for x in _append(cache, new)]
    bytes_before = cache.nbytes.packed

    def now(rows):
        cache.crop(-1)
        return _append(cache, [x[rows] for x in new])

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
    cache = SemKVCache(_small_config(), T4, parts="both")
    _open_then_coded(cache, 70)
    alone = cache.nbytes
    cache.batch_repeat_interleave(4)
    assert cache.nbytes.packed == alone.packed and cache.nbytes.open == 4 * alone.open


def test_beam_search(tiny):
    ids, sequences = _ids(40), []
    for attention in ("dequantize", "packed"):
        cache = SemKVCache(tiny.model.config, T4, attention=attention)
        sequences.append(_generate(tiny, cache, ids, num_beams=3, num_return_sequences=3))
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
    assert sequences[0] == _generate(tiny, reference, ids, num_beams=3, num_return_sequences=3)


# Blocks of generated tokens


def test_blocks_are_coded_once_when_a_later_token_arrives():
    cache = SemKVCache(_small_config(), L3, parts="both", block=16)
    for step in range(48):
        _append(cache, _states(1, seed=step))
    layer = cache.layers[0]
    assert (layer.coded, layer.length - layer.coded) == (32, 16)
    words = [side.rows[0][0].words.clone() for side in layer.sides]
    for step in range(48, 80):
        _append(cache, _states(1, seed=step))
    assert layer.coded == 64
    for side, early in zip(layer.sides, words, strict=True):
        assert torch.equal(side.rows[0][0].words[: len(early)], early)


@pytest.mark.parametrize("setting", [L3, T4, _mixes("value_norm", "shared")[0]], ids=lambda s: s.name)
def test_blocks_equal_offline_quantization_whatever_the_calls(setting):
    states = _states(150, seed=3)
    results = []
    for sizes in ([1] * 150, [1, 99, 50], [1, 16, 16, 100, 17]):
        cache = SemKVCache(_small_config(layers=1), setting, parts="both", seed=5)
        done = 0
        for size in sizes:
            _append(cache, [x[:, :, done : done + size] for x in states])
            done += size
        results.append(_append(cache, [x[:, :, :1] for x in states])[0].clone())
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
    """The prompt's incomplete last block stays as it is; generated blocks follow it."""
    ids = _ids(40)
    (expected,) = _sweep(tiny, ids, [T4], new=8)
    answers = []
    for attention in ("dequantize", "packed"):
        cache = SemKVCache(tiny.model.config, T4, parts="both", block=16, attention=attention)
        answers.append(_generate(tiny, cache, ids, new=40)[0])
        layer = cache.layers[tiny.shape.quantized_layers[0]]
        assert [p.layout.tokens for p in layer.sides[0].rows[0]] == [39, 32]
    assert answers[0] == answers[1] and answers[0][:8] == expected


# Crop, copy, reset


def test_crop_in_the_open_part_leaves_no_trace(tiny_llama):
    ids = _ids(40)
    cache = SemKVCache(tiny_llama.model.config, T4)
    expected = _generate(tiny_llama, cache, ids, new=12)
    cache.crop(-8)
    assert cache.is_croppable and cache.get_seq_length() == 43
    tokens = torch.cat([ids, torch.tensor(expected)[:, :4]], dim=1)
    assert _generate(tiny_llama, cache, tokens, new=8) == [expected[0][4:]]


@pytest.mark.parametrize("setting", [L3, MIXED[0]], ids=lambda s: s.name)
def test_crop_in_the_coded_part_keeps_codes(setting):
    cache = SemKVCache(_small_config(), setting, parts="both")
    _open_then_coded(cache, 192, rows=2)
    new = _states(1, rows=2, seed=9)
    before = [x.clone() for x in _append(cache, new)]
    for kept, how in ((100, -(before[0].shape[2] - 100)), (64, 64), (7, 7)):
        cache.crop(how)
        assert cache.get_seq_length() == kept
        after = _append(cache, new)
        for got, expected, fresh in zip(after, before, new, strict=True):
            assert torch.equal(got[:, :, :kept], expected[:, :, :kept]) and torch.equal(
                got[:, :, kept:], fresh
            )
        cache.crop(-1)


def test_a_copied_prompt_is_used_twice(tiny):
    ids = _ids(40)
    expected = _generate(tiny, SemKVCache(tiny.model.config, MIXED[0]), ids)
    prompt = SemKVCache(tiny.model.config, MIXED[0])
    prompt.prefill(tiny.model, ids)
    for _ in range(2):
        assert _generate(tiny, copy.deepcopy(prompt), ids) == expected
    assert prompt.get_seq_length() == 39
    empty = copy.deepcopy(SemKVCache(tiny.model.config, MIXED[0]))
    assert _generate(tiny, empty, ids) == expected


def test_reset(tiny):
    cache = SemKVCache(tiny.model.config, MIXED[0])
    first = _generate(tiny, cache, _ids(40))
    _generate(tiny, cache, torch.cat([_ids(40), torch.tensor(first), _ids(3, 5)], dim=1))
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.nbytes.total == 0
    assert _generate(tiny, cache, _ids(40)) == first


def test_training_mode_graphs_are_not_kept(tiny_llama):
    cache = SemKVCache(tiny_llama.model.config, L3)
    for ids in (_ids(20), _ids(1)):
        tiny_llama.model(input_ids=ids, use_cache=True, **{tiny_llama.cache_keyword: cache})
    assert not cache.layers[0].sides[0].buffer.requires_grad


# Storage


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("quantizer", [AFFINE, TURBO, Affine(group_size=32)], ids=lambda q: str(q))
@pytest.mark.parametrize("levels", [2, 3, 4, 5, 6, 7, 8, 16])
def test_uniform_buffers_are_as_large_as_predicted(head_dim, quantizer, levels):
    (setting,) = uniform_settings(quantizer, quantizer, [levels])
    _check_size(setting, head_dim)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("high", "low", "fraction"), [(6, 5, 0.25), (4, 3, 0.75), (16, 2, 0.5), (7, 3, 0.125)]
)
@pytest.mark.parametrize("quantizer", [AFFINE, TURBO], ids=lambda q: q.name)
def test_mixed_buffers_are_as_large_as_predicted(head_dim, high, low, fraction, quantizer):
    (setting,) = _mixes("key_norm", "shared", high, low, fraction, quantizer)
    _check_size(setting, head_dim)


def _check_size(setting, head_dim):
    cache = SemKVCache(_small_config(heads=4, head_dim=head_dim), setting, parts="both")
    _open_then_coded(cache, 128, heads=4, head_dim=head_dim)
    measured = sum(p.nbytes for p in _buffers(cache))
    assert cache.nbytes.packed == measured
    values = 2 * 2 * 4 * 128 * head_dim
    expected = setting.storage(head_dim).effective_bits
    assert 8 * measured / values == pytest.approx(expected, rel=0.005)
    assert cache.effective_bits() == pytest.approx(expected, rel=0.005)


def _buffers(cache):
    """Every tensor behind coded tokens, once."""
    found = {}
    for layer in cache.layers:
        for side in layer.sides:
            for packed in side.rows[0]:
                tensors = [packed.words, packed.scale, packed.zero]
                tensors += [packed.layout.token_class, packed.layout.block_start]
                found |= {t.data_ptr(): t for t in tensors if t is not None and t.nbytes}
                # The level counts of the classes, as one byte each.
                found[id(packed.layout)] = torch.zeros(len(packed.layout.class_levels), dtype=torch.uint8)
    return found.values()


def test_paper_storage_figures():
    """Measured on buffers: 25 % at 6 and 75 % at 5 levels affine is 2.65 bits, TurboQuant 4/3 at 75 % is 2.025."""
    for setting, bits in (
        (_mixes("key_norm", "shared", 6, 5, 0.25, AFFINE)[0], 2.65),
        (_mixes("key_norm", "shared", 4, 3, 0.75, TURBO)[0], 2.025),
    ):
        cache = SemKVCache(_small_config(layers=8, heads=8, head_dim=128), setting, parts="both")
        _open_then_coded(cache, 256, heads=8, head_dim=128)
        assert cache.effective_bits() == pytest.approx(bits, rel=0.005)


def test_nbytes_by_part(tiny):
    cache = SemKVCache(tiny.model.config, L3)
    _generate(tiny, cache, _ids(130), new=6)
    layers, part = len(tiny.shape.quantized_layers), cache.nbytes
    # 129 tokens of 2 heads: 16 values in 5-digit groups of 8 bits a head and class, whole blocks at a time.
    block_words = [math.ceil(2 * math.ceil(n * 16 / 5) * 8 / 32) for n in (64, 64, 1)]
    assert part.codes == layers * 2 * sum(block_words) * 4
    assert part.metadata == layers * 2 * 2 * 129 * 2 * 2
    assert part.layout == 4 * 4 + 1  # one layout for all layers, keys and values
    assert part.open == layers * 2 * 2 * 8 * 16 * 4
    assert (part.sliding > 0) == (layers < 3)
    assert part.total == part.packed + part.open + part.sliding
    one_layer = 2 * 2 * 16 * 4 * 192
    assert 0 < cache.workspace_nbytes <= one_layer


def test_uncoded_side_stays_in_the_models_type():
    (setting,) = uniform_settings(AFFINE, AFFINE, [4], value_levels="full")
    cache = SemKVCache(_small_config(), setting, parts="both")
    _append(cache, [x.bfloat16() for x in _states(1)])
    _append(cache, [x.bfloat16() for x in _states(128)])
    _append(cache, [x.bfloat16() for x in _states(1)])
    assert cache.effective_bits() == pytest.approx(setting.storage(64).effective_bits, rel=0.005)
    values = cache.layers[0].sides[1]
    assert values.opened == 130 and values.buffer.dtype == torch.bfloat16


# Refusals


@pytest.mark.parametrize(
    ("setting", "options", "message"),
    [
        (FULL, {}, "DynamicCache"),
        (Pruned().settings(AFFINE, AFFINE)[0], {}, "deletes"),
        (uniform_settings(AFFINE, AFFINE, [17])[0], {}, "16 levels"),
        (uniform_settings(TurboQuantSplit(), TurboQuantSplit(), [4])[0], {}, "turboquant_split"),
        (uniform_settings(TurboQuantProd(), TURBO, [4])[0], {}, "turboquant_prod"),
        (uniform_settings(Affine(group_size=24), AFFINE, [4])[0], {}, "legal sizes"),
        (_mixes("surprisal", "shared")[0], {}, "key_norm, random, recency, value_norm"),
        (L3, {"parts": "all"}, "prompt, generated, both"),
        (_mixes("hidden_drift", "shared")[0], {"parts": "generated"}, "parts='prompt'"),
        (L3, {"attention": "flash"}, "dequantize or packed"),
        (L3, {"block": 0}, "at least 1"),
        (L3, {"prompt_tokens": 0}, "at least 1"),
    ],
)
def test_bad_arguments_are_refused(setting, options, message):
    with pytest.raises(UsageError, match=message) as caught:
        SemKVCache(_small_config(), setting, **options)
    assert "\n" not in str(caught.value)


def test_importance_of_the_wrong_length_is_refused(tiny_llama):
    setting = _mixes("surprisal", "shared")[0]
    cache = SemKVCache(tiny_llama.model.config, setting, importance={"surprisal": torch.zeros(1, 5)})
    with pytest.raises(UsageError, match=r"\[3, 19\] or \[1, 19\]"):
        _generate(tiny_llama, cache, _ids(20))
    with pytest.raises(UsageError, match="parts='prompt'"):
        scores = {"surprisal": torch.arange(19.0)}
        SemKVCache(tiny_llama.model.config, setting, parts="both", block=16, importance=scores)


def test_a_foreign_configuration_is_noticed(tiny_llama):
    foreign = copy.deepcopy(tiny_llama.model.config)
    cache = SemKVCache(foreign, L3)
    with pytest.raises(SemkvError, match="own configuration"):
        _generate(tiny_llama, cache, _ids(20))
    with pytest.raises(SemkvError, match="own configuration"):
        _generate(tiny_llama, SemKVCache(copy.deepcopy(foreign), L3), _ids(20))
    fed = SemKVCache(foreign, L3)
    fed.prefill(tiny_llama.model, _ids(20))
    assert _generate(tiny_llama, fed, _ids(20)) == _sweep(tiny_llama, _ids(20), [L3])


def test_nan_names_layer_and_tensor():
    cache = SemKVCache(_small_config(), L3, parts="both", block=16)
    states = _states(17)
    states[1][0, 1, 3, 2] = math.nan
    for part in (slice(0, 1), slice(1, 17)):
        _append(cache, [x[:, :, part] for x in states])
    with pytest.raises(NonFiniteError, match="layer 0, values"):
        _append(cache, _states(1))


def test_offloading_and_filling_twice_are_refused(tiny_llama):
    cache = SemKVCache(tiny_llama.model.config, L3)
    cache.prefill(tiny_llama.model, _ids(20))
    with pytest.raises(UsageError, match="empty"):
        cache.prefill(tiny_llama.model, _ids(20))
    with pytest.raises(SemkvError, match="offload"):
        cache.offload(0)


def test_two_level_values_by_another_metric(tiny_llama):
    keys = Coded(TURBO, TwoLevel(6, 2, 0.25, "key_norm"))
    values = Coded(AFFINE, TwoLevel(5, 3, 0.5, "value_norm", "layer"))
    setting = Setting("two", "mixed", "turboquant+affine", keys, values)
    ids = _ids(40)
    cache = SemKVCache(tiny_llama.model.config, setting)
    assert _generate(tiny_llama, cache, ids) == _sweep(tiny_llama, ids, [setting])


def test_a_second_turn_goes_on(tiny):
    """What comes after the prompt stays open, or is coded in blocks, also when it comes many tokens at a time."""
    ids = _ids(40)
    for parts, coded in (("prompt", 39), ("both", 39 + 32)):
        cache = SemKVCache(tiny.model.config, T4, parts=parts, block=16)
        first = torch.tensor(_generate(tiny, cache, ids, new=4))
        _generate(tiny, cache, torch.cat([ids, first, _ids(30, 1)], dim=1), new=6)
        layer = cache.layers[tiny.shape.quantized_layers[0]]
        assert (layer.coded, layer.length) == (coded, 40 + 4 + 30 + 5)


def test_the_package_stays_cheap_to_import():
    code = "import sys, semkv_bench; assert 'torch' not in sys.modules; print(semkv_bench.__version__)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout.strip()
