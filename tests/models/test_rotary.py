"""The rotary embedding of keys and its inverse, by what models themselves do."""

import pytest
import torch
from architectures import tiny_model
from transformers import DynamicCache

from semkv_bench.errors import UsageError
from semkv_bench.models.architecture import length_dependent
from semkv_bench.models.load import LoadedModel
from semkv_bench.models.rotary import rotary_of

# Halves and neighbours turned together, a part of the head turned, norms before it, layers without, scaled angles.
KINDS = {
    "llama": {},
    "qwen3": {},
    "gemma3_text": {},
    "cohere": {},
    "glm": {},
    "phi": {},
    "smollm3": {},
    "gpt_oss": {},
}


def keys_of(loaded, ids):
    cache = DynamicCache(config=loaded.model.config)
    with torch.inference_mode():
        loaded.model(ids, **{loaded.cache_keyword: cache})
    return {layer: cache.layers[layer].keys[0] for layer in loaded.shape.quantized_layers}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_come_back(kind, dtype):
    loaded = LoadedModel(tiny_model(kind, **KINDS[kind]).to(dtype), None, kind, None)
    rotary = rotary_of(loaded)
    ids = torch.randint(3, 90, (1, 40), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(40)
    for layer, keys in keys_of(loaded, ids).items():
        turn = rotary[layer]
        back = turn.apply(turn.undo(keys.double(), positions), positions)
        assert (back - keys.double()).abs().max() < 1e-14 * keys.double().abs().max()
        # In 16 bits a component may be so small beside its partner that float64 does not hold both.
        assert dtype != torch.float32 or torch.equal(back.float(), keys)
        single = turn.apply(turn.undo(keys.float(), positions), positions)
        assert (single - keys.float()).abs().max() < 1e-6 * keys.float().abs().max()
    assert any(turn.pairs != "none" for turn in rotary.values())


def test_what_is_undone_is_what_the_projection_gave():
    """Position by position, against keys of the same token where nothing is turned: at position 0."""
    loaded = LoadedModel(tiny_model("llama"), None, "llama", None)
    (first, *_) = rotary_of(loaded).values()
    layer = loaded.shape.quantized_layers[0]
    same = keys_of(loaded, torch.full((1, 30), 7))[layer]
    # Equal tokens have equal keys in the first layer, but for where they stand.
    undone = first.undo(same.double(), torch.arange(30))
    assert (undone - undone[:, :1]).abs().max() < 1e-5 * undone.abs().max()
    assert (same - same[:, :1]).abs().max() > 0.1 * same.abs().max()


def test_keys_that_cannot_be_seen_are_refused_in_one_line():
    for kind, word in (("phi3", "are not to be seen"), ("gpt2", "are not to be seen")):
        loaded = LoadedModel(tiny_model(kind), None, kind, None)
        with pytest.raises(UsageError, match=word) as caught:
            rotary_of(loaded)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("told", [{"rope_type": "dynamic", "factor": 2.0}, {"rope_type": "longrope"}])
def test_angles_that_hang_on_the_length_are_known(told):
    class Config:
        rope_parameters = told

        def get_text_config(self, decoder):
            return self

    assert length_dependent(Config()) == told["rope_type"]
    Config.rope_parameters = {"full_attention": told, "sliding_attention": {"rope_type": "default"}}
    assert length_dependent(Config()) == told["rope_type"]
    Config.rope_parameters = {"rope_type": "yarn", "factor": 4.0}
    assert length_dependent(Config()) is None
