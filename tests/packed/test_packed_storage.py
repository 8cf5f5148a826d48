"""Bytes of the packed cache, and what it refuses."""

import copy
import math
import subprocess
import sys

import pytest
import torch
from packed_caches import (
    AFFINE,
    L3,
    T4,
    TURBO,
    append_to,
    greedy,
    mixes,
    open_then_coded,
    small_config,
    some_ids,
    some_states,
    swept,
)
from thinned import thinned
from transformers import DynamicCache

from semkv_bench import SemKVCache
from semkv_bench.errors import SemkvError, UsageError
from semkv_bench.grid.cost import Stored, Tokens
from semkv_bench.models.shape import ModelShape
from semkv_bench.packed.ranking import Layouts
from semkv_bench.protocols.rule import coder_seed
from semkv_bench.quantizers import Affine, NonFiniteError, TurboQuantSplit
from semkv_bench.settings.allocation import TwoLevel
from semkv_bench.settings.sets import Pruned, uniform_settings
from semkv_bench.settings.setting import FULL, Coded, Setting

# Storage


@pytest.mark.quick_cases(9)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("quantizer", [AFFINE, TURBO, Affine(group_size=32)], ids=lambda q: str(q))
@pytest.mark.parametrize(
    "levels", thinned([2, 3, 4, 5, 6, 7, 8, 16, 24, 32, 64, 100, 242, 256], 2, 3, 5, 16, 100, 256)
)
def test_uniform_buffers_are_as_large_as_predicted(head_dim, quantizer, levels):
    (setting,) = uniform_settings(quantizer, quantizer, [levels])
    _check_size(setting, head_dim)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("high", "low", "fraction"), [(6, 5, 0.25), (4, 3, 0.75), (16, 2, 0.5), (7, 3, 0.125), (100, 24, 0.5)]
)
@pytest.mark.parametrize("quantizer", [AFFINE, TURBO], ids=lambda q: q.name)
def test_mixed_buffers_are_as_large_as_predicted(head_dim, high, low, fraction, quantizer):
    (setting,) = mixes("key_norm", "shared", high, low, fraction, quantizer)
    _check_size(setting, head_dim)


def _check_size(setting, head_dim):
    cache = SemKVCache(small_config(heads=4, head_dim=head_dim), setting, parts="both")
    open_then_coded(cache, 128, heads=4, head_dim=head_dim)
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
                tensors = [*packed.by_token, *packed.shared]
                for stream in packed.streams:
                    layout = stream.layout
                    tensors += [stream.words, layout.token_class, layout.block_start]
                    # The level counts of the classes, as one byte each.
                    found[id(layout)] = torch.zeros(len(layout.class_levels), dtype=torch.uint8)
                found |= {t.data_ptr(): t for t in tensors if t.nbytes}
    return found.values()


def test_paper_storage_figures():
    """Measured on buffers: 25 % at 6 and 75 % at 5 levels affine is 2.65 bits, TurboQuant 4/3 at 75 % is 2.025."""
    for setting, bits in (
        (mixes("key_norm", "shared", 6, 5, 0.25, AFFINE)[0], 2.65),
        (mixes("key_norm", "shared", 4, 3, 0.75, TURBO)[0], 2.025),
    ):
        cache = SemKVCache(small_config(layers=8, heads=8, head_dim=128), setting, parts="both")
        open_then_coded(cache, 256, heads=8, head_dim=128)
        assert cache.effective_bits() == pytest.approx(bits, rel=0.005)


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("quantizer", [AFFINE, TURBO, Affine(group_size=32)], ids=lambda q: str(q))
@pytest.mark.parametrize("levels", thinned([3, 5, 24, 32, 64, 100, 242, 256], 5, 32, 242))
def test_a_whole_cache_costs_what_it_was_said_to_cost(levels, quantizer, block):
    """Bytes of the packed blocks and the open rest against what reports and ``storage tokens=N`` tell."""
    config = small_config(layers=2, heads=4, head_dim=64)
    (setting,) = uniform_settings(quantizer, quantizer, [levels])
    cache = SemKVCache(config, setting, parts="both", block=block)
    tokens = 4 * block
    states = [x.bfloat16() for x in some_states(tokens + 1, heads=4)]
    for part in (slice(0, 1), slice(1, tokens), slice(tokens, tokens + 1)):
        append_to(cache, [x[:, :, part] for x in states])
    held = Tokens.of([block] * 4, open=1)
    told = setting.cost(Stored.of(ModelShape.of(config).cache, held, held))
    layer = cache.layers[0]
    assert (layer.coded, layer.length) == (tokens, tokens + 1)
    one_open = 2 * 2 * 4 * 64 * 2
    assert cache.nbytes.packed + one_open == pytest.approx(told.nbytes, rel=0.005)
    assert told.nbytes <= cache.nbytes.packed + one_open


@pytest.mark.parametrize("quantizer", [AFFINE, TURBO], ids=lambda q: q.name)
@pytest.mark.parametrize("levels", thinned([24, 100, 242, 256], 24, 256))
def test_many_levels_answer_as_the_sweep_does(levels, quantizer, tiny_llama):
    (setting,) = uniform_settings(quantizer, quantizer, [levels])
    ids = some_ids(40)
    cache = SemKVCache(tiny_llama.model.config, setting)
    assert greedy(tiny_llama, cache, ids) == swept(tiny_llama, ids, [setting])
    read = SemKVCache(tiny_llama.model.config, setting)
    read.prefill(tiny_llama.model, ids)
    coded = quantizer.coder(16, coder_seed(0, 0, 0))
    raw = DynamicCache(config=tiny_llama.model.config)
    with torch.no_grad():
        tiny_llama.model(ids, past_key_values=raw)
    keys = raw.layers[0].keys[0, :, :39]
    expected = coded.decode(coded.encode(keys, levels), torch.float32)
    assert torch.equal(read.layers[0]._full()[0][0, :, :39], expected)


def test_nbytes_by_part(tiny):
    cache = SemKVCache(tiny.model.config, L3)
    greedy(tiny, cache, some_ids(130), new=6)
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
    cache = SemKVCache(small_config(), setting, parts="both")
    append_to(cache, [x.bfloat16() for x in some_states(1)])
    append_to(cache, [x.bfloat16() for x in some_states(128)])
    append_to(cache, [x.bfloat16() for x in some_states(1)])
    assert cache.effective_bits() == pytest.approx(setting.storage(64).effective_bits, rel=0.005)
    values = cache.layers[0].sides[1]
    assert values.opened == 130 and values.buffer.dtype == torch.bfloat16


# Refusals


@pytest.mark.parametrize(
    ("setting", "options", "message"),
    [
        (FULL, {}, "DynamicCache"),
        (Pruned().settings(AFFINE, AFFINE)[0], {}, "deletes"),
        (uniform_settings(TurboQuantSplit(), TurboQuantSplit(), [129])[0], {}, "258 codes"),
        (uniform_settings(Affine(group_size=24), AFFINE, [4])[0], {}, "legal sizes"),
        (mixes("surprisal", "shared")[0], {}, "key_norm, random, recency, value_norm"),
        (L3, {"parts": "all"}, "prompt, generated, both"),
        (mixes("hidden_drift", "shared")[0], {"parts": "generated"}, "parts='prompt'"),
        (L3, {"attention": "flash"}, "dequantize or packed"),
        (L3, {"block": 0}, "at least 1"),
        (L3, {"prompt_tokens": 0}, "at least 1"),
    ],
)
def test_bad_arguments_are_refused(setting, options, message):
    with pytest.raises(UsageError, match=message) as caught:
        SemKVCache(small_config(), setting, **options)
    assert "\n" not in str(caught.value)


def test_importance_of_the_wrong_length_is_refused(tiny_llama):
    setting = mixes("surprisal", "shared")[0]
    cache = SemKVCache(tiny_llama.model.config, setting, importance={"surprisal": torch.zeros(1, 5)})
    with pytest.raises(UsageError, match=r"\[3, 19\] or \[1, 19\]"):
        greedy(tiny_llama, cache, some_ids(20))
    with pytest.raises(UsageError, match="parts='prompt'"):
        scores = {"surprisal": torch.arange(19.0)}
        SemKVCache(tiny_llama.model.config, setting, parts="both", block=16, importance=scores)


def test_a_foreign_configuration_is_noticed(tiny_llama):
    foreign = copy.deepcopy(tiny_llama.model.config)
    cache = SemKVCache(foreign, L3)
    with pytest.raises(SemkvError, match="own configuration"):
        greedy(tiny_llama, cache, some_ids(20))
    with pytest.raises(SemkvError, match="own configuration"):
        greedy(tiny_llama, SemKVCache(copy.deepcopy(foreign), L3), some_ids(20))
    fed = SemKVCache(foreign, L3)
    fed.prefill(tiny_llama.model, some_ids(20))
    assert greedy(tiny_llama, fed, some_ids(20)) == swept(tiny_llama, some_ids(20), [L3])


def test_nan_names_layer_and_tensor():
    cache = SemKVCache(small_config(), L3, parts="both", block=16)
    states = some_states(17)
    states[1][0, 1, 3, 2] = math.nan
    for part in (slice(0, 1), slice(1, 17)):
        append_to(cache, [x[:, :, part] for x in states])
    with pytest.raises(NonFiniteError, match="layer 0, values"):
        append_to(cache, some_states(1))


def test_offloading_and_filling_twice_are_refused(tiny_llama):
    cache = SemKVCache(tiny_llama.model.config, L3)
    cache.prefill(tiny_llama.model, some_ids(20))
    with pytest.raises(UsageError, match="empty"):
        cache.prefill(tiny_llama.model, some_ids(20))
    with pytest.raises(SemkvError, match="offload"):
        cache.offload(0)


def test_two_level_values_by_another_metric(tiny_llama):
    keys = Coded(TURBO, TwoLevel(6, 2, 0.25, "key_norm"))
    values = Coded(AFFINE, TwoLevel(5, 3, 0.5, "value_norm", "layer"))
    setting = Setting("two", "mixed", "turboquant+affine", keys, values)
    ids = some_ids(40)
    cache = SemKVCache(tiny_llama.model.config, setting)
    assert greedy(tiny_llama, cache, ids) == swept(tiny_llama, ids, [setting])


def test_a_second_turn_goes_on(tiny):
    """What comes after the prompt stays open, or is coded in blocks, also when it comes many tokens at a time."""
    ids = some_ids(40)
    for parts, coded in (("prompt", 39), ("both", 39 + 32)):
        cache = SemKVCache(tiny.model.config, T4, parts=parts, block=16)
        first = torch.tensor(greedy(tiny, cache, ids, new=4))
        greedy(tiny, cache, torch.cat([ids, first, some_ids(30, 1)], dim=1), new=6)
        layer = cache.layers[tiny.shape.quantized_layers[0]]
        assert (layer.coded, layer.length) == (coded, 40 + 4 + 30 + 5)


def test_the_package_stays_cheap_to_import():
    code = "import sys, semkv_bench; assert 'torch' not in sys.modules; print(semkv_bench.__version__)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout.strip()


def _filled(setting, attention, tokens=200):
    """A cache of two rows, coded in blocks of 64, with open tokens behind."""
    cache = SemKVCache(small_config(head_dim=32), setting, parts="both", attention=attention)
    states = some_states(tokens, rows=2, head_dim=32)
    for part in (slice(0, 1), slice(1, 130), slice(130, tokens)):
        append_to(cache, [x[:, :, part] for x in states])
    return cache


@pytest.mark.parametrize(
    "setting",
    [
        *mixes("key_norm", "layer", 6, 5, 0.25, AFFINE),
        *mixes("value_norm", "layer", 4, 3, 0.75, TURBO),
        *uniform_settings(AFFINE, TURBO, [3]),
    ],
    ids=lambda s: s.name,
)
def test_the_layout_for_attention_holds_the_same_values(setting):
    """Tokens lie in another order and words are others; what is read back is the same to the bit."""
    dense, aligned = (_filled(setting, attention) for attention in ("dequantize", "packed"))
    assert aligned.layers[1].sides[0].rows[0][0].layouts[0].ends_block is False
    for change in (
        lambda layer: None,
        lambda layer: layer._select([1, 0, 1]),
        lambda layer: layer.crop(77),
    ):
        for of_dense, of_aligned in zip(dense.layers, aligned.layers, strict=True):
            change(of_dense), change(of_aligned)
            for mine, theirs in zip(of_aligned._full(), of_dense._full(), strict=True):
                assert torch.equal(mine, theirs)


def test_the_layout_for_attention_costs_what_it_was_said_to_cost():
    (setting,) = mixes("key_norm", "shared", 6, 5, 0.25, AFFINE)
    config = small_config(layers=4, heads=8, head_dim=128)
    cache = SemKVCache(config, setting, parts="both", block=768, attention="packed")
    states = some_states(770, heads=8, head_dim=128)
    for part in (slice(0, 1), slice(1, 768), slice(768, 770)):
        append_to(cache, [x[:, :, part] for x in states])
    assert setting.aligned_storage(128).effective_bits == pytest.approx(2 + 2 / 3)
    assert cache.effective_bits() == pytest.approx(2 + 2 / 3, rel=0.005)


def test_blocks_of_wide_vectors_are_shorter():
    """65,536 values of a head are the most that a block has: 256 tokens of 512 channels are two."""
    layouts, levels = Layouts(256), torch.full((300,), 5)
    first = layouts.layout(levels, 1, 512)
    assert (first.block, layouts.layout(levels, 1, 64).block) == (128, 256)
    more = layouts.layout(torch.full((20,), 6), 1, 512)
    joined = layouts.joined(first, more)
    assert joined.block == 128 and joined.levels().tolist() == [5] * 300 + [6] * 20
