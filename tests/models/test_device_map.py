import pytest
import torch
from accelerate import cpu_offload
from transformers import LlamaConfig, LlamaForCausalLM

from semkv_bench.engine.engine import Engine, Request
from semkv_bench.engine.options import EngineOptions
from semkv_bench.errors import UsageError
from semkv_bench.models.device_map import check_devices_present, check_modules, input_device
from semkv_bench.models.embedded import EmbeddedModel
from semkv_bench.models.load import LoadedModel, PretrainedModel
from semkv_bench.quantizers import Affine
from semkv_bench.settings.sets import uniform_settings
from semkv_bench.settings.setting import FULL

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.4,
}
SPLIT = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
SPLIT |= {"model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "cpu"}


@pytest.mark.parametrize("value", [None, "auto", "balanced", "sequential", "cpu", "cuda", "cuda:3", 0, 2])
def test_maps_that_make_sense(value):
    parts = {"model": "cpu", "lm_head": value if isinstance(value, int) else "disk"}
    for given in (value, parts):
        assert PretrainedModel("nobody/nothing", device_map=given).device_map == given


@pytest.mark.parametrize(
    "value",
    ["nonsense", "gpu", "", -1, True, 1.5, {}, {"model": "gpu"}, {3: "cpu"}, ["cpu"], "cuda:x", "meta"],
)
def test_nonsense_is_refused_before_anything_is_loaded(value):
    for build in (
        lambda: PretrainedModel("nobody/nothing", device_map=value),
        lambda: EmbeddedModel(device_map=value),
    ):
        with pytest.raises(UsageError, match=r"model\.device_map"):
            build()


def test_devices_that_are_not_there(tmp_path):
    check_devices_present({"": "cpu", "x": "disk"})
    check_devices_present("auto")
    for value in (f"cuda:{torch.cuda.device_count()}", torch.cuda.device_count() + 3):
        with pytest.raises(UsageError, match="this machine has"):
            PretrainedModel(str(tmp_path), device_map=value).load()


def test_a_map_by_module_must_fit_the_model():
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    for fitting in ({"": "cpu"}, {"model": "cpu", "lm_head": "cpu"}, SPLIT):
        check_modules(fitting, model)
    with pytest.raises(UsageError, match=r"no module 'model.layer' \(it begins with model, lm_head\)"):
        check_modules({"": "cpu", "model.layer": "cpu"}, model)
    with pytest.raises(UsageError, match=r"no device to lm_head.weight and 0 more"):
        check_modules({"model": "cpu"}, model)
    # A key is a module and not a prefix of letters: layers.1 is not layers.10.
    with pytest.raises(UsageError, match=r"no device to model\.layers\.2"):
        check_modules({key: v for key, v in SPLIT.items() if key != "model.layers.2"}, model)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model on disk."""
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def expected(folder):
    """Outcomes of the whole model on one device."""
    return _outcomes(LlamaForCausalLM.from_pretrained(folder, device_map="cpu"))


def _outcomes(model) -> list[tuple]:
    loaded = LoadedModel(model.eval(), tokenizer=None, label="tiny", revision=None)
    settings = (FULL, *uniform_settings(Affine(), Affine(), [4, 2]))
    request = Request(tuple(range(5, 45)), (7, 8, 9), max_new_tokens=6, stop_ids=frozenset())
    engine = Engine(loaded, EngineOptions())
    return str(engine.run(request, settings))


@pytest.mark.parametrize("device_map", ["auto", {"": "cpu"}, {"": "disk"}, SPLIT], ids=str)
def test_the_engine_follows_a_model_that_is_spread(device_map, folder, expected):
    model = LlamaForCausalLM.from_pretrained(folder, device_map=device_map)
    assert input_device(model) == torch.device("cpu")
    assert _outcomes(model) == expected


def test_the_engine_follows_offloaded_weights(folder, expected):
    model = LlamaForCausalLM.from_pretrained(folder)
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert model.get_input_embeddings().weight.device.type == "meta"
    assert input_device(model) == torch.device("cpu")
    assert _outcomes(model) == expected
