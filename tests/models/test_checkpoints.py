"""Checkpoints of every form: adapters, quantized weights, more arguments, attention that a class has, end tokens."""

import json
import logging

import pytest
from architectures import tiny_model
from byte_tokenizers import CHATML_TEMPLATE, byte_tokenizer

from semkv_bench.config.compose import compose_config
from semkv_bench.errors import MissingError, UsageError
from semkv_bench.models import quantized
from semkv_bench.models.load import LoadedModel, PretrainedModel
from semkv_bench.plan.plan import make_plan


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    tiny_model("llama").save_pretrained(path)
    byte_tokenizer(["<s>", "</s>"], None, adds_bos=False).save_pretrained(path)
    return path


def test_an_adapter_is_named_as_one(tmp_path):
    told = {"peft_type": "LORA", "base_model_name_or_path": "some/base"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(told))
    for read in ("shape", "tokenizer", "load"):
        with pytest.raises(UsageError, match=r"LORA adapter of some/base.*merge"):
            getattr(PretrainedModel(str(tmp_path)), read)()


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "compressed-tensors"])
def test_quantized_weights_name_the_packages_that_are_missing(method, folder, tmp_path, monkeypatch):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4, "config_groups": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(quantized, "_present", lambda module: False)
    with pytest.raises(MissingError, match=r"pip install") as raised:
        PretrainedModel(str(tmp_path)).load()
    assert method in str(raised.value) and "\n" not in str(raised.value)
    monkeypatch.setattr(quantized, "_present", lambda module: True)
    assert quantized.missing_packages(method) == []


def test_more_arguments_reach_from_pretrained(folder):
    loaded = PretrainedModel(str(folder), kwargs={"use_safetensors": True, "attention_dropout": 0.25}).load()
    assert loaded.model.config.attention_dropout == 0.25
    with pytest.raises(UsageError, match=r"model.kwargs"):
        PretrainedModel(str(folder), kwargs={"no_such_argument": 1}).load()
    with pytest.raises(UsageError, match=r"give model.dtype instead"):
        PretrainedModel(str(folder), kwargs={"torch_dtype": "float16"})


def test_more_arguments_are_given_on_the_command_line(folder):
    options = ["model=custom", f"model.path={folder}", "task.length=260", "subset=[niah_noise]", "per_task=1"]
    given = "model.kwargs={attention_dropout: 0.25, trust_remote_code: true}"
    plan = make_plan(compose_config("sweep", [*options, given]))
    assert plan.charter["model_config"]["kwargs"] == {"attention_dropout": 0.25, "trust_remote_code": True}
    assert plan.source.load().model.config.attention_dropout == 0.25


def test_a_plan_names_the_packages_that_quantized_weights_need(folder, tmp_path, monkeypatch):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(quantized, "_present", lambda module: False)
    options = ["task.length=260", "subset=[niah_noise]", "per_task=1"]
    with pytest.raises(
        MissingError, match="weights quantized by awq, which gptqmodel would read: pip install"
    ):
        make_plan(compose_config("sweep", ["model=custom", f"model.path={tmp_path}", *options]))


@pytest.mark.parametrize(("kind", "used"), [("gpt_oss", "eager"), ("gemma2", "eager"), ("llama", "sdpa")])
def test_attention_is_what_the_class_has_unless_one_is_asked_for(kind, used, tmp_path):
    tiny_model(kind).save_pretrained(tmp_path)
    byte_tokenizer(["<s>", "</s>"], None, adds_bos=False).save_pretrained(tmp_path)
    assert PretrainedModel(str(tmp_path)).load().model.config._attn_implementation == used
    asked = PretrainedModel(str(tmp_path), attention="sdpa")
    if used == "sdpa":
        asked.shape()
    else:
        with pytest.raises(UsageError, match=r"model.attention=sdpa: .* does not have it"):
            asked.shape()


def test_an_answer_ends_at_every_end_token_that_is_named(caplog):
    model = tiny_model("llama", eos_token_id=7)
    model.generation_config.eos_token_id = [8, 9]
    tokenizer = byte_tokenizer(["<s>", "</s>", "<|im_start|>", "<|im_end|>"], CHATML_TEMPLATE, adds_bos=False)
    with caplog.at_level(logging.WARNING):
        assert LoadedModel(model, tokenizer, "mine", None).eos_ids == (1, 3, 7, 8, 9)
    (said,) = caplog.messages
    assert "generation_config [8, 9]" in said and "chat template [3]" in said and "config [7]" in said


def test_one_end_token_needs_no_note(caplog):
    model = tiny_model("llama", eos_token_id=1)
    model.generation_config.eos_token_id = 1
    with caplog.at_level(logging.WARNING):
        assert LoadedModel(
            model, byte_tokenizer(["<s>", "</s>"], None, adds_bos=False), "mine", None
        ).eos_ids == (1,)
    assert not caplog.messages
