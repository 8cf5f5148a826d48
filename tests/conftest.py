"""Models that several test modules share."""

import gc
import os
from collections import Counter
from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import pytest

from semkv_bench.models.embedded import EmbeddedModel
from semkv_bench.models.load import LoadedModel, PretrainedModel

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_addoption(parser):
    parser.addoption(
        "--slow-part", default=None, metavar="I/N", help="of the tests marked slow only the I-th of N parts"
    )


def pytest_collection_modifyitems(config, items):
    """Mark the cases beyond ``quick_cases`` slow; with ``--slow-part`` leave out the other parts of the slow tests.

    The first cases of a test are those it lists first; a test's name says which part it is of.
    """
    seen = Counter()
    for item in items:
        if quick := item.get_closest_marker("quick_cases"):
            name = item.nodeid.partition("[")[0]
            seen[name] += 1
            if seen[name] > quick.args[0]:
                item.add_marker(pytest.mark.slow)
    if (given := config.getoption("--slow-part")) is None:
        return
    part, count = map(int, given.split("/"))
    if not 1 <= part <= count:
        raise pytest.UsageError(f"--slow-part {given} must be I/N with I from 1 to N")
    left = [
        item
        for item in items
        if item.get_closest_marker("slow") and crc32(item.nodeid.encode()) % count != part - 1
    ]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in set(left)]


_SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
    # Large weights, so that a random model's answers depend on its prompt.
    "initializer_range": 0.4,
}


def _tiny(model_type: str, **others) -> LoadedModel:
    # Here, and not at the top: a process that only hands tests out would import them, too.
    import torch
    import transformers

    config_name, model_name, changes = _ARCHITECTURES[model_type]
    config = getattr(transformers, config_name)(**{**_SMALL, **changes, **others})
    torch.manual_seed(7)
    model = getattr(transformers, model_name)(config).eval()
    tokenizer = SimpleNamespace(
        decode=lambda ids, skip_special_tokens: " ".join(map(str, ids)), eos_token_id=2
    )
    return LoadedModel(model, tokenizer, label=f"tiny-{config.model_type}", revision=None)


_ARCHITECTURES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 16,
        },
    ),
}


def _each(name: str):
    """Llama, and Gemma 3 with its sliding windows, always; the others, which are like Llama, where all is tested."""
    return name if name in ("llama", "gemma3") else pytest.param(name, marks=pytest.mark.slow)


@pytest.fixture(scope="session", params=[_each(name) for name in sorted(_ARCHITECTURES)])
def tiny(request) -> LoadedModel:
    """A random model of three layers, of each architecture in turn."""
    return _tiny(request.param)


@pytest.fixture(scope="session")
def tiny_llama() -> LoadedModel:
    """A random Llama of three layers."""
    return _tiny("llama")


@pytest.fixture(scope="session")
def tiny_wide() -> LoadedModel:
    """A random Llama of three layers, whose heads have room for blocks of 32 channels."""
    return _tiny("llama", head_dim=64)


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """The embedded small model."""
    return EmbeddedModel().load()


@pytest.fixture(scope="session")
def local_folder(tmp_path_factory):
    """Folder of a small random Llama with the embedded model's tokenizer: answers are noise, but fast.

    It is loaded once for all commands of a process, because loading takes as long as a small sweep.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    tokenizer = EmbeddedModel().tokenizer()
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=2, eos_token_id=2, **shape)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("tokenizer", "load"):
            patch.setattr(PretrainedModel, name, _once(getattr(PretrainedModel, name), str(folder)))
        yield folder


def _once(method: Callable[[PretrainedModel], Any], path: str) -> Callable[[PretrainedModel], Any]:
    """The method, of which the model at ``path`` keeps the outcome, one for each way to load it."""
    kept: dict[str, Any] = {}

    @wraps(method)
    def called(model: PretrainedModel) -> Any:
        if model.path != path:
            return method(model)
        if repr(model) not in kept:
            kept[repr(model)] = method(model)
        return kept[repr(model)]

    return called


def pytest_collection_finish() -> None:
    """All that was imported stays: a sweep for garbage, which statsmodels asks for in each analysis, passes it over."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def without_figures(monkeypatch):
    """Reports that draw nothing, for tests of something else: drawing takes longer than all else in a report."""
    monkeypatch.setattr("semkv_bench.report.figures.FIGURE_NAMES", ())
