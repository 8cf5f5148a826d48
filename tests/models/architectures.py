"""Tiny random models of the architectures that the installed transformers has."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

# Set where a configuration has a field of the name; sizes of all kinds of layers at once.
_SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "sliding_window": 32,
    "sliding_window_size": 32,
    "attention_chunk_size": 64,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "intermediate_size_mlp": 96,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 300,
    "is_decoder": True,
}
# Where a configuration has latent attention: its head_dim is that of the rotary part.
_LATENT = {"num_key_value_heads": 4, "head_dim": 8, "v_head_dim": 16}
_FULL_AND_SLIDING = {"layer_types": ["sliding_attention", "full_attention"] * 2}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}

CHANGES: Mapping[str, Mapping[str, Any]] = {
    "bailing_hybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "laurel_rank": 4,
        "activation_sparsity_pattern": [0.0] * 4,
        "intermediate_size": [96] * 4,
    },
    "inkling_text": {"layer_types": ["hybrid_sliding", "hybrid"] * 2},
    "inkling2_text": {"layer_types": ["hybrid_sliding", "hybrid"] * 2},
    "inkling2_loop_text": {"layer_types": ["hybrid_sliding", "hybrid"] * 2},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "kolibri1": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "bamba": {**_MAMBA, "attn_layer_indices": [1, 3]},
    "codegen": {"rotary_dim": 8},
    "doge": {"sliding_window": None},
    "falcon_h1": {
        **_MAMBA,
        "mamba_d_ssm": 128,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_chunk_size": 16,
    },
    "gemma3_text": _FULL_AND_SLIDING,
    "gptj": {"rotary_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 32},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["linear_attention", "full_attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "mamba_dt_rank": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "ministral": _FULL_AND_SLIDING,
    "ministral3": {"sliding_window": None},
    "mistral": {"sliding_window": None},
    "mixtral": {"sliding_window": None},
    "nemotron_h": {
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 1,
        "ssm_state_size": 8,
        "chunk_size": 16,
    },
    "phi3": {"sliding_window": 4096},
    "phi4_multimodal": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False},
    "zamba": {
        "num_attention_heads": 4,
        "attention_head_dim": 32,
        "attention_hidden_size": 128,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "n_mamba_heads": 2,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "mamba_d_state": 8,
        "mamba_ngroups": 1,
        "mamba_headdim": 16,
        "n_mamba_heads": 8,
        "attention_head_dim": 32,
        "num_key_value_heads": 4,
        "chunk_size": 16,
    },
    "zaya": {"num_experts_per_tok": 1},
    "starcoder2": {"sliding_window": None},
}


def tiny_config(model_type: str, **changes: Any) -> Any:
    """A configuration of ``model_type`` small enough to run in a moment, and so are those within it."""
    return _tiny(CONFIG_MAPPING[model_type], changes)


def _tiny(kind: Any, changes: Mapping[str, Any]) -> Any:
    default = kind()
    sizes = {name: value for name, value in _SIZES.items() if _settable(default, name)}
    if _settable(default, "kv_lora_rank") and _settable(default, "qk_rope_head_dim"):
        sizes |= {name: value for name, value in _LATENT.items() if _settable(default, name)}
    within = {name: getattr(default, name, None) for name in kind.sub_configs}
    sizes |= {name: _tiny(type(part), {}) for name, part in within.items() if part is not None}
    return kind(**{**sizes, **CHANGES.get(kind.model_type, {}), **changes})


def _settable(config: Any, name: str) -> bool:
    described = getattr(type(config), name, None)
    if isinstance(described, property) and described.fset is None:
        return False
    try:
        return hasattr(config, name)
    except Exception:
        return True


def tiny_model(model_type: str, **changes: Any) -> Any:
    """A random model of ``model_type`` in float32, its weights large enough that answers differ."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type, **changes)).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and "embed" not in name:
                weight.mul_(4)
    return model
