"""Further architectures, and a prefill to observe."""

import copy

import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from semkv_bench.engine.engine import Engine
from semkv_bench.engine.options import EngineOptions
from semkv_bench.importance import observe
from semkv_bench.models.load import LoadedModel

_SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
    "initializer_range": 0.4,
}

_FURTHER = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    # Caps attention scores, which sdpa cannot, and logits; one layer in two slides.
    "gemma2": (
        Gemma2Config,
        Gemma2ForCausalLM,
        {
            "sliding_window": 8,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
            "attn_implementation": "eager",
        },
    ),
    "gemma3": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {"sliding_window": 8, "sliding_window_pattern": 3, "final_logit_softcapping": 6.0},
    ),
    "cohere": (CohereConfig, CohereForCausalLM, {"logit_scale": 0.125}),
    "granite": (GraniteConfig, GraniteForCausalLM, {"logits_scaling": 8.0}),
}


@pytest.fixture(scope="session", params=sorted(_FURTHER))
def further(request) -> LoadedModel:
    """A random model of three layers, of each further architecture in turn."""
    config_class, model_class, changes = _FURTHER[request.param]
    torch.manual_seed(7)
    model = model_class(config_class(**{**_SMALL, **changes})).eval()
    return LoadedModel(model, None, label=request.param, revision=None)


@pytest.fixture
def copied(tiny_llama) -> LoadedModel:
    """A Llama that a test may spoil."""
    return LoadedModel(copy.deepcopy(tiny_llama.model), None, label="copy", revision=None)


@pytest.fixture(scope="session")
def prompt() -> list[int]:
    """Sixty token ids."""
    return torch.randint(3, 97, (60,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="session")
def scored():
    """Function: scores of ``metrics`` over a prefill of ``ids``, cut into chunks."""

    def scored(loaded, metrics, ids, *, chunk=None, tokens=None, **options):
        with observe(loaded, metrics, tokens=tokens or len(ids), **options) as observer:
            Engine(loaded, EngineOptions(prefill_chunk=chunk)).prefill(ids)
        return observer.scores()

    return scored
