"""Shapes of caches: real configurations against published sizes, small models against transformers' own cache."""

import pytest
import torch
import transformers as T
from transformers import AutoModelForCausalLM, DynamicCache

from semkv_bench.errors import UsageError
from semkv_bench.grid.cost import LayerShape, SideShape
from semkv_bench.models.shape import ModelShape
from semkv_bench.quantizers import Affine
from semkv_bench.settings.sets import uniform_settings
from semkv_bench.settings.setting import FULL

GIB = 2**30


def _dense(kind, layers, heads, kv_heads, hidden, **more):
    return kind(
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        hidden_size=hidden,
        max_position_embeddings=131072,
        **more,
    )


# The cache's GiB in 16 bits at 32,768 and 131,072 tokens: bytes of a token times tokens, windows once.
REAL = {
    # 61 layers of a latent of 512 and a rotary key of 64: 68.6 KiB a token.
    "DeepSeek-V3": (lambda: T.DeepseekV3Config(), 2.145, 8.578),
    # 10 of 62 layers attend to everything, the others to 1,024 tokens.
    "Gemma-3-27B": (
        lambda: _dense(T.Gemma3TextConfig, 62, 32, 16, 5376, head_dim=128, sliding_window=1024),
        2.906,
        10.406,
    ),
    # Every second of 24 layers has a window of 128.
    "gpt-oss-20b": (
        lambda: _dense(
            T.GptOssConfig, 24, 64, 8, 2880, head_dim=64, sliding_window=128, num_local_experts=32
        ),
        0.753,
        3.003,
    ),
    "Llama-3.1-8B": (lambda: _dense(T.LlamaConfig, 32, 32, 8, 4096), 4.0, 16.0),
    "Mistral-7B-v0.3": (lambda: _dense(T.MistralConfig, 32, 32, 8, 4096, sliding_window=None), 4.0, 16.0),
    "Qwen2.5-7B": (lambda: _dense(T.Qwen2Config, 28, 28, 4, 3584), 1.75, 7.0),
    "Qwen3-30B-A3B": (
        lambda: _dense(T.Qwen3MoeConfig, 48, 32, 4, 2048, head_dim=128, num_experts=128),
        3.0,
        12.0,
    ),
    # Its window is wider than its context.
    "Phi-3.5-mini": (
        lambda: _dense(T.Phi3Config, 32, 32, 32, 3072, sliding_window=262144, pad_token_id=0),
        12.0,
        48.0,
    ),
    # Every second of 42 layers has a window of 4,096.
    "Gemma-2-9B": (
        lambda: _dense(T.Gemma2Config, 42, 16, 8, 3584, head_dim=256, sliding_window=4096),
        5.906,
        21.656,
    ),
    # Three in four of 48 layers attend within chunks of 8,192.
    "Llama-4-Scout": (
        lambda: T.Llama4TextConfig(max_position_embeddings=10_485_760),
        2.625,
        7.125,
    ),
    # A quarter of 48 layers attends, the others keep a state.
    "Qwen3-Next-80B-A3B": (lambda: T.Qwen3NextConfig(max_position_embeddings=262144), 0.75, 3.0),
}


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("name", REAL)
def test_sizes_of_real_configurations_are_the_published_ones(name):
    make, at_32k, at_128k = REAL[name]
    shape = ModelShape.of(make())
    for tokens, size in ((32768, at_32k), (131072, at_128k)):
        found = FULL.planned(shape.cache, tokens)
        assert found.nbytes == found.full_bytes
        assert found.nbytes / GIB == pytest.approx(size, rel=0.01)


def test_deepseeks_sides_are_named_and_priced_by_their_sizes():
    shape = ModelShape.of(T.DeepseekV3Config())
    assert shape.cache[0] == LayerShape(SideShape(1, 512), SideShape(1, 64)) and len(shape.cache) == 61
    assert "the keys are the latent (1 x 512), the values the rotary key (1 x 64)" in shape.described
    (setting,) = uniform_settings(Affine(), Affine(), [16])
    assert setting.storage_in(shape.cache).effective_bits == pytest.approx(4 + 1 / 9)
    setting.check_in(shape.cache)
    grouped = Affine(group_size=128)
    with pytest.raises(UsageError, match="does not divide head_dim 64"):
        uniform_settings(grouped, grouped, [16])[0].check_in(shape.cache)


SMALL = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
}
WINDOW = {**SMALL, "head_dim": 32, "sliding_window": 100}
TINY = {
    "llama": lambda: T.LlamaConfig(**SMALL),
    "gemma3": lambda: T.Gemma3TextConfig(**WINDOW),
    "gemma4": lambda: T.Gemma4TextConfig(
        **WINDOW, hidden_size_per_layer_input=8, vocab_size_per_layer_input=300
    ),
    "gemma3n": lambda: T.Gemma3nTextConfig(
        **WINDOW,
        num_kv_shared_layers=3,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=300,
        laurel_rank=4,
        activation_sparsity_pattern=[0.0] * 6,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    ),
    "gptoss": lambda: T.GptOssConfig(**WINDOW, num_local_experts=4, num_experts_per_tok=2),
    "llama4": lambda: T.Llama4TextConfig(
        **SMALL, head_dim=32, attention_chunk_size=128, num_local_experts=2, intermediate_size_mlp=96
    ),
    "lfm2": lambda: T.Lfm2Config(**SMALL, layer_types=["conv", "full_attention"] * 3),
    "phi3": lambda: T.Phi3Config(**SMALL, sliding_window=4096),
    "diff": lambda: T.DiffLlamaConfig(**SMALL),
    "gpt2": lambda: T.GPT2Config(vocab_size=300, n_embd=64, n_layer=2, n_head=4, n_positions=320),
    "dsv3": lambda: T.DeepseekV3Config(
        **{**SMALL, "num_key_value_heads": 4},
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        n_group=1,
        topk_group=1,
    ),
    "bloom": lambda: T.BloomConfig(vocab_size=300, hidden_size=64, n_layer=2, n_head=4),
}


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("name", TINY)
def test_bytes_are_those_of_transformers_own_cache(name):
    config = TINY[name]()
    shape = ModelShape.of(config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    cache = DynamicCache(config=config)
    named = "cache" if "cache" in model.forward.__code__.co_varnames else "past_key_values"
    ids = torch.randint(3, 300, (1, 300), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(input_ids=ids, use_cache=True, **{named: cache})
    sides = [
        side
        for layer in cache.layers
        for side in (getattr(layer, "keys", None), getattr(layer, "values", None))
    ]
    held = sum(side.nbytes for side in sides if side is not None)
    assert FULL.planned(shape.cache, 300).nbytes == pytest.approx(held, rel=0.01)
    none = [i for i, layer in enumerate(cache.layers) if getattr(layer, "keys", None) is None]
    assert none == [i for i, layer in enumerate(shape.cache) if layer is None]


def test_states_are_told_apart_from_keys_and_values():
    shape = ModelShape.of(TINY["lfm2"]())
    assert shape.quantized_layers == (1, 3, 5) and shape.state_values == 3 * 64 * 3
    assert shape.described == "3 of 6 layers are coded; 3 have no keys and values of their own"


def test_a_shape_is_found_once_and_quickly():
    config = T.Qwen2Config(num_hidden_layers=80)
    first = ModelShape.of(config)
    assert ModelShape.of(T.Qwen2Config(num_hidden_layers=80)) is first
    assert ModelShape.of(T.Qwen2Config(num_hidden_layers=79)).layers == 79
    assert ModelShape.from_json(first.to_json()) == first


def test_a_model_without_attention_has_no_cache():
    shape = ModelShape.of(T.Lfm2Config(**SMALL, layer_types=["conv"] * 6))
    assert shape.cache == (None,) * 6 and not shape.quantized_layers


def test_what_cannot_be_built_or_called_is_one_line():
    with pytest.raises(UsageError, match="makes no model of kind llama from this configuration"):
        ModelShape.of(T.LlamaConfig(**{**SMALL, "hidden_act": "no_such_thing"}))
