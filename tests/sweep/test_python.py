"""Sweeps, reports and comparisons from Python, of a model in memory."""

import copy
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from hydra import initialize
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, AutoTokenizer

import semkv_bench as sb
from semkv_bench.cli import main
from semkv_bench.config.compose import build, compose_config
from semkv_bench.config.overrides import as_overrides, override
from semkv_bench.errors import MissingError, UsageError
from semkv_bench.models.memory import ModelInMemory
from semkv_bench.quantizers import Affine
from semkv_bench.stats.result import Report

PROMPTS = [
    {"prompt": f"Number {number} of many, and what follows it?", "answers": [str(number)]}
    for number in range(3)
]
CAPITALS = [{"prompt": "The capital of France is called?", "answers": ["Paris"]}]
FEW = ("engine.noise_examples=1", "max_new_tokens=4", "stats.resamples=200")


@dataclass(frozen=True)
class Half(Affine):
    """Affine under another name: a quantizer of one's own."""

    name = "half"
    strength: float = 1.0


@pytest.fixture(scope="module")
def held(local_folder):
    return AutoModelForCausalLM.from_pretrained(local_folder), AutoTokenizer.from_pretrained(local_folder)


@pytest.fixture(scope="module")
def swept(held, tmp_path_factory):
    model, tokenizer = held
    model.train()
    methods = ["affine", Affine(group_size=8), Half(strength=2.0)]
    out = tmp_path_factory.mktemp("runs") / "one"
    given = {
        "methods": methods,
        "levels": [16, 4],
        "task": PROMPTS,
        "out": out,
        "overrides": FEW,
        "name": "mine",
    }
    assert sb.sweep(model, tokenizer, **given) == out
    assert model.training
    return given


def test_a_model_in_memory_is_swept_under_every_method(swept):
    records = sb.read_records(swept["out"])
    assert set(records["setting"]) == {
        "full",
        *(f"{name}-L{levels}" for name in ("affine", "affine[g8]", "half[strength=2]") for levels in (16, 4)),
    }
    assert len(records) == 7 * len(PROMPTS) and set(records["model"]) == {"mine"}
    assert (records[records["setting"] != "full"]["quantized_reads"] > 0).any()


def test_the_same_call_goes_on_where_the_run_ended(held, swept):
    before = sorted(path.read_bytes() for path in swept["out"].glob("records-*.jsonl"))
    sb.sweep(*held, **swept)
    assert sorted(path.read_bytes() for path in swept["out"].glob("records-*.jsonl")) == before


def test_other_weights_are_another_run(held, swept):
    model, tokenizer = held
    weight = model.lm_head.weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight[0, 0] += 1
    try:
        with pytest.raises(UsageError, match="weights"):
            sb.sweep(model, tokenizer, **swept)
    finally:
        weight.data.copy_(before)


def test_records_are_those_of_the_command(held, tmp_path, local_folder, capsys):
    task = tmp_path / "prompts.jsonl"
    task.write_text('{"prompt": "The capital of France is called?", "answers": ["Paris"]}\n')
    given = [
        f"model={local_folder}",
        "model.dtype=float32",
        "quantizer=affine",
        "grid.levels=[4]",
        "task=jsonl",
    ]
    assert main(["sweep", *given, f"task.path={task}", *FEW, f"out={tmp_path / 'command'}"]) == 0
    sb.sweep(*held, levels=[4], task=CAPITALS, out=tmp_path / "python", overrides=FEW)
    by_command, from_python = (sb.read_records(tmp_path / name) for name in ("command", "python"))
    same = ["setting", "prediction", "score", "kl", "cache_bits", "prompt_hash"]
    assert by_command[same].to_dict() == from_python[same].to_dict()


def test_a_report_is_typed_and_written(swept, without_figures):
    result = sb.report(swept["out"])
    assert isinstance(result, Report)
    assert {row.setting for row in result.settings} == set(sb.read_records(swept["out"])["setting"])
    assert (swept["out"] / "report.json").exists()
    other = sb.report(swept["out"], margin=0.3)
    assert other.margin == 0.3 and not other.preregistered and result.preregistered
    assert (swept["out"] / "exploratory" / "report.json").exists()


def test_runs_are_compared(held, swept, tmp_path, without_figures):
    other = {**swept, "methods": "turboquant", "out": tmp_path / "other"}
    sb.sweep(*held, **other)
    result = sb.compare([swept["out"], other["out"]], out=tmp_path / "both")
    assert {point.method for point in result.methods.points} >= {"affine", "turboquant"}
    assert (
        result.preregistered
        and not sb.compare([swept["out"], other["out"]], tmp_path / "other_margin", margin=0.4).preregistered
    )
    assert (tmp_path / "both" / "report.json").exists()


def test_a_command_on_the_run_says_that_its_model_is_gone(swept):
    config = yaml.safe_load((swept["out"] / "config.yaml").read_text())
    assert config["model"]["name"] == "mine" and list(config["method"]) == ["affine", "affine#2", "half"]
    with pytest.raises(UsageError, match="memory of the process"):
        build(OmegaConf.create(config["model"]), "model")


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokenizer": None}, "needs its tokenizer"),
        ({"methods": []}, "methods is empty"),
        ({"methods": ["nope"]}, "there is no quantizer 'nope'"),
        ({"methods": [object()]}, "not <object"),
        ({"levels": [1]}, "levels"),
        ({"task": []}, "empty list"),
        ({"task": [{"prompt": "?"}]}, "answers"),
        ({"task": "nothing"}, "there is no task 'nothing'"),
        ({"overrides": ["nope=1"]}, "there is no key 'nope'"),
        ({"model": "smollm2", "tokenizer": object()}, "brings its own"),
        ({"model": None}, "give a transformers model"),
        ({"tokenizer": "gpt2"}, "load it first"),
        ({"levels": "8,2"}, "levels must be whole numbers"),
        ({"levels": {8: 2}}, "grid.levels takes numbers"),
        ({"seeds": [0.5]}, "seeds"),
        ({"task": {"prompt": "?", "answers": ["!"]}}, "list of prompts"),
        ({"task": ["a prompt"]}, "list of prompts"),
        ({"task": [{"prompt": "\ud83d", "answers": ["!"]}]}, "prompt 1 of task is no plain data"),
        ({"task": [{"prompt": "?", "answers": [object()]}]}, "prompt 1 of task is no plain data"),
        ({"overrides": "nope=1"}, "there is no key 'nope'"),
        ({"overrides": ["model=llama31"]}, "overrides names model"),
        ({"overrides": ["quantizer=kivi"]}, "the argument methods"),
        ({"overrides": ["task=synthetic"]}, "overrides names task"),
        ({"model": torch.nn.Linear(1, 1)}, "Linear generates no text"),
    ],
)
def test_bad_input_is_one_line(held, tmp_path, changes, said):
    model, tokenizer = held
    given = {"model": model, "tokenizer": tokenizer, "task": CAPITALS, "out": tmp_path / "run", **changes}
    with pytest.raises(UsageError, match=said) as raised:
        sb.sweep(given.pop("model"), given.pop("tokenizer"), **given)
    assert "\n" not in str(raised.value) and not (tmp_path / "run").exists()


@pytest.mark.parametrize("part", ["headless", "float64"])
def test_models_that_cannot_be_swept_are_refused(held, part):
    model, tokenizer = held
    other = copy.deepcopy(model).double() if part == "float64" else model.model
    with pytest.raises(UsageError, match=r"language-model head|is in float64"):
        sb.sweep(other, tokenizer, task=CAPITALS)


def test_a_longer_list_of_prompts_extends_a_run(held, tmp_path):
    given = {"levels": [4], "out": tmp_path / "run", "overrides": FEW}
    sb.sweep(*held, task=PROMPTS[:2], **given)
    sb.sweep(*held, task=PROMPTS, **given)
    records = sb.read_records(tmp_path / "run")
    assert set(records["task"]) == {"prompts"} and records["example_id"].nunique() == 3


@pytest.mark.slow
def test_hydra_of_the_caller_is_left_as_it_was(swept):
    with initialize(version_base="1.3", config_path=None):
        before = GlobalHydra.instance().hydra
        sb.report(swept["out"], margin=0.4)
        assert GlobalHydra.instance().hydra is before


def test_numbers_of_numpy_and_frames_are_taken(held, tmp_path):
    model, tokenizer = held
    model.model.layers[0].eval()
    model.lm_head.train()
    prompts = pd.DataFrame([{"prompt": "Two and two?", "answers": [np.int64(4)]}])
    given = {
        "per_task": np.int64(1),
        "seeds": 0,
        "levels": np.array([16, 4]),
        "overrides": [*FEW, "seeds=[0]"],
    }
    out = tmp_path / "it's mine, [all] of it"
    sb.sweep(model, tokenizer, task=prompts, out=out, **given)
    assert set(sb.read_records(out)["setting"]) == {"full", "affine-L16", "affine-L4"}
    assert model.lm_head.training and not model.model.layers[0].training
    with pytest.raises(UsageError, match="a list of runs"):
        sb.compare(str(out))


@pytest.mark.parametrize("value", ["it's", "a,b]", "ends in \\\\", "\\\\'", "a=b", "${x}"[1:]])
def test_texts_reach_the_configuration_as_they_are(value):
    assert compose_config("sweep", as_overrides([override("out", value)], "sweep")).out == value


def test_a_quantizer_from_inside_a_function_is_refused(held, tmp_path):
    @dataclass(frozen=True)
    class Inner(Affine):
        name = "inner"

    with pytest.raises(UsageError, match="defined inside a function"):
        sb.sweep(*held, methods=[Inner()], task=CAPITALS, out=tmp_path / "run")


@pytest.mark.parametrize(
    ("places", "said"), [(("meta",), "meta device"), (("cpu", "cuda:0"), "lies on cpu and cuda:0")]
)
def test_weights_that_are_nowhere_or_torn_are_refused(places, said):
    torn = SimpleNamespace(
        config=None,
        can_generate=lambda: True,
        dtype=torch.float32,
        parameters=lambda: [SimpleNamespace(device=place) for place in places],
    )
    with pytest.raises(UsageError, match=said):
        ModelInMemory(torn, None, "torn")


def test_what_is_not_there_is_missing(tmp_path):
    with pytest.raises(MissingError):
        sb.report(tmp_path / "nope")
    with pytest.raises(MissingError):
        sb.read_records(tmp_path / "nope.jsonl")
