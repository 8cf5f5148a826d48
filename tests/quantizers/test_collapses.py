"""What is known of models whose keys have large constant offsets, as a pattern on a tiny model with planted ones.

Qwen2.5-7B answers nothing with transformers' cache of 4 bits, Qwen3-4B nothing with 4 bits per token and head, and
nearly all with the keys rotated before.
"""

import pytest
import torch
from requested import some_ids, some_request
from transformers import LlamaConfig, LlamaForCausalLM

from semkv_bench.config.compose import compose_config
from semkv_bench.engine.engine import Engine
from semkv_bench.engine.options import EngineOptions
from semkv_bench.models.load import LoadedModel
from semkv_bench.plan.settings import planned_settings

OFFSET, HEADS, HEAD_DIM = 20.0, 2, 64
# Half of a head's channels turn with the other half; the last pair turns slowest, and hardly at all in a short text.
SLOWEST = HEAD_DIM // 2 - 1
# Four bits; no windows, so that nothing but the codes differs.
COMPARED = [
    "methods=[affine,hf_quanto,kivi,hadamard,saw_int4,turboquant]",
    "grid.levels=[16]",
    "method.kivi.keys.keep.block=32",
    "method.kivi.values.keep.recent=0",
]


def _model(offset: float) -> LoadedModel:
    """A random Llama whose keys have ``offset`` added to one channel of every head and layer."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=97, hidden_size=128, intermediate_size=96, num_hidden_layers=3, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, head_dim=HEAD_DIM, max_position_embeddings=512, eos_token_id=2, bos_token_id=1,
        pad_token_id=0, initializer_range=0.1, attention_bias=True, rope_theta=1e6,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.view(HEADS, HEAD_DIM)[:, SLOWEST] += offset
    return LoadedModel(model, None, label="planted", revision=None)


def _divergence(offset: float) -> dict[str, float]:
    """KL divergence from full precision by method."""
    settings = planned_settings(compose_config("sweep", COMPARED))
    engine = Engine(_model(offset), EngineOptions(teacher_tokens=24))
    outcomes = engine.run(some_request(129, reference_ids=some_ids(24, 5), new=1), settings)
    families = [outcome.setting.name.partition("-")[0].partition("[")[0] for outcome in outcomes]
    return dict(zip(families, (outcome.kl for outcome in outcomes), strict=True))


@pytest.fixture(scope="module")
def planted() -> dict[str, float]:
    return _divergence(OFFSET)


@pytest.fixture(scope="module")
def plain() -> dict[str, float]:
    return _divergence(0.0)


def test_a_constant_offset_collapses_codes_per_token(planted, plain):
    for method in ("affine", "hf_quanto"):
        assert planted[method] > 5 * plain[method]


def test_codes_per_channel_do_not_see_it(planted, plain):
    assert planted["kivi"] == pytest.approx(plain["kivi"], rel=0.1)
    assert min(planted["affine"], planted["hf_quanto"]) > 10 * planted["kivi"]


def test_a_rotation_spreads_it_over_the_channels(planted):
    for method in ("hadamard", "saw_int4"):
        assert planted["affine"] > 3 * planted[method]
    assert planted["affine"] > planted["turboquant"]


def test_without_offsets_the_methods_are_alike(plain):
    coded = [
        plain[method] for method in ("affine", "hf_quanto", "kivi", "hadamard", "saw_int4", "turboquant")
    ]
    assert max(coded) < 2 * min(coded)
