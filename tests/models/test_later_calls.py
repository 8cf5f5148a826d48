"""Prompts in parts and positions in later calls: right, or refused."""

import pytest
import torch
from architectures import tiny_config, tiny_model
from byte_tokenizers import byte_tokenizer
from transformers import LlamaForCausalLM

from semkv_bench.config.compose import compose_config
from semkv_bench.engine import options as options_of_engine
from semkv_bench.engine.engine import Engine
from semkv_bench.engine.options import EngineOptions
from semkv_bench.errors import UsageError
from semkv_bench.models.architecture import read_whole, reads_in_parts
from semkv_bench.models.layers import cache_layers
from semkv_bench.models.load import LoadedModel
from semkv_bench.plan.plan import make_plan

STATES = (
    "bamba", "falcon_h1", "granitemoehybrid", "jamba", "lfm2", "nemotron_h", "olmo_hybrid", "qwen3_next", "zamba",
    "zamba2",
)  # fmt: skip
OTHERS = ("bloom", "gemma3_text", "gpt2", "llama", "minicpm3")
IDS = torch.randint(3, 250, (41,), generator=torch.Generator().manual_seed(0)).tolist()


def _prefilled(loaded, chunk):
    """The last hidden state, then keys, values and states of all layers."""
    prefilled = Engine(loaded, EngineOptions(prefill_chunk=chunk)).prefill(IDS)
    cache = prefilled.cache
    sides = [side for layer in cache.attending.values() for side in layer.stored()]
    states = [layer.row_state(0) for layer in cache.recurrent.values()]
    return [
        prefilled.hidden,
        *sides,
        *(x for kinds in states for held in kinds.values() for x in held.values()),
    ]


def _away(found, expected):
    return max(float((x - y).norm() / y.norm()) for x, y in zip(found, expected, strict=True))


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("kind", STATES + OTHERS)
def test_a_prompt_in_parts_is_the_prompt_or_is_refused(kind):
    loaded = LoadedModel(tiny_model(kind), None, kind, None)
    assert any(layer.states for layer in cache_layers(loaded.model.config)) == (kind in STATES)
    # What is known beforehand is what the model is seen to do.
    assert loaded.later_calls.parts == reads_in_parts(loaded.model.config)
    if not loaded.later_calls.parts:
        with pytest.raises(UsageError, match="cannot be read in parts"):
            _prefilled(loaded, 16)
        return
    whole = _prefilled(loaded, None)
    # Transformers' formulas for one and for several tokens give states that differ by half a percent.
    noise = 1e-2 if kind in STATES else 1e-5
    for chunk in (1, 3, 16, 40):
        assert _away(_prefilled(loaded, chunk), whole) < noise, chunk


@pytest.mark.parametrize("kind", ["jamba", "zamba"])
def test_the_plan_refuses_parts_of_what_begins_anew(kind, tmp_path):
    tiny_config(kind).save_pretrained(tmp_path)
    byte_tokenizer(["<s>", "</s>"], None, adds_bos=False).save_pretrained(tmp_path)
    options = [
        "model=custom",
        f"model.path={tmp_path}",
        "task.length=260",
        "subset=[niah_noise]",
        "per_task=1",
    ]
    with pytest.raises(UsageError, match=r"leave engine\.prefill_chunk out"):
        make_plan(compose_config("sweep", [*options, "engine.prefill_chunk=64"]))


def test_a_rotary_embedding_that_hangs_on_the_length_is_read_whole(tmp_path, monkeypatch):
    """A prompt in parts would begin with keys turned as for a shorter one."""
    config = tiny_config("llama")
    config.max_position_embeddings = 16
    config.rope_parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    torch.manual_seed(0)
    loaded = LoadedModel(LlamaForCausalLM(config).eval(), None, "far", None)
    line = r"far scales its rotary embedding by how much was read \(rope_type=dynamic\).*leave engine\.prefill_chunk"
    with pytest.raises(UsageError, match=line):
        _prefilled(loaded, 8)
    whole = _prefilled(loaded, None)
    # What a GPU cuts by default is left whole, and so is what a prompt before has of the document.
    monkeypatch.setattr(options_of_engine, "_GPU_CHUNK", 8)
    assert EngineOptions().chunk_of(41, "cuda", lambda: None) == 8
    assert EngineOptions().chunk_of(41, "cuda", lambda: read_whole(config, "far")) == 41
    engine = Engine(loaded, EngineOptions())
    engine.prefill(IDS[:20], document="d")
    assert _away([engine.prefill(IDS, document="d").hidden], whole[:1]) == 0
    assert not engine._padded
    # That parts would differ is why.
    monkeypatch.setattr(Engine, "_undivided", None)
    assert _away(_prefilled(loaded, 8), whole) > 1e-2


def test_a_model_that_begins_at_position_0_again_is_given_positions():
    loaded = LoadedModel(tiny_model("bamba"), None, "bamba", None)
    assert loaded.later_calls.positions
    with torch.no_grad():
        whole = loaded.decoder(input_ids=torch.tensor([IDS]), use_cache=False).last_hidden_state[0, -1]
    chunked = Engine(loaded, EngineOptions(prefill_chunk=40)).prefill(IDS)
    assert float((chunked.hidden - whole).norm() / whole.norm()) < 1e-4


@pytest.mark.parametrize("kind", ["llama", "camembert", "gemma3_text"])
def test_a_model_that_counts_on_by_itself_is_left_to_it(kind):
    assert not LoadedModel(tiny_model(kind), None, kind, None).later_calls.positions
