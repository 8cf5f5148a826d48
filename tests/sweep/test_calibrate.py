"""Methods that are fitted to a model: what a calibration is of, who takes it, and what it decides."""

import json

import pytest
import torch
import yaml
from safetensors.torch import load_file
from thinned import thinned
from transformers import LlamaConfig, LlamaForCausalLM

from semkv_bench.cli import main
from semkv_bench.models.embedded import EmbeddedModel
from semkv_bench.quantizers import calibration
from semkv_bench.records.folder import read_run

SMALL = ["sequences=2", "length=48"]
SWEEP = [
    "per_task=1",
    "task.length=220",
    "max_new_tokens=3",
    "grid.levels=[4]",
    "stats.margin=0.3",
    "subset=niah_noise",
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("calibrated")


@pytest.fixture
def here(place, monkeypatch):
    """A working folder whose results the tests of this module share."""
    monkeypatch.chdir(place)
    return place


@pytest.fixture(scope="module")
def four_heads(tmp_path_factory):
    """Folder of a small random Llama whose four heads fit every method."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = EmbeddedModel().tokenizer()
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=32, max_position_embeddings=1024, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def of(folder):
    return ["model=custom", f"model.path={folder}"]


METHODS = ["kvquant", "skvq", "rotatekv", "wkvquant_lite", "cq", "aquakv"]
SHORTER = {"skvq": ["quantizer.keys.keep.recent=4", "quantizer.values.keep.recent=4"]}


@pytest.mark.parametrize("name", thinned(METHODS, "kvquant", "aquakv"))
def test_a_method_is_fitted_and_swept(here, four_heads, name, capsys):
    assert main(["calibrate", *of(four_heads), f"quantizer={name}", *SMALL]) == 0
    run = here / "runs" / name
    changed = SHORTER.get(name, [])
    assert main(["sweep", *of(four_heads), f"quantizer={name}", *changed, *SWEEP, f"out={run}"]) == 0
    told = yaml.safe_load((run / "protocol.yaml").read_text())["calibrations"][name]
    (path,) = calibration.CALIBRATIONS.glob(f"{name}-*.safetensors")
    assert told["file"] == path.name and told["sha256"] == calibration.read(path).sha256
    assert told["text"]["source"] == "generated" and (told["sequences"], told["length"]) == (2, 48)
    frame, _ = read_run(run)
    coded = frame[frame.kind == "uniform"].iloc[0]
    assert coded.family == name and coded.quantized_reads > 0 and coded.kl > 0


@pytest.mark.slow
def test_the_same_text_gives_the_same_file(here, four_heads):
    main(["calibrate", *of(four_heads), "quantizer=kvquant", *SMALL, "out=one.safetensors"])
    main(["calibrate", *of(four_heads), "quantizer=kvquant", *SMALL, "out=two.safetensors"])
    assert (here / "one.safetensors").read_bytes() == (here / "two.safetensors").read_bytes()


def test_fisher_weights_move_the_levels(here, four_heads):
    plain = ["quantizer.keys.code.weights=none", "quantizer.values.code.weights=none"]
    main(["calibrate", *of(four_heads), "quantizer=kvquant", *SMALL, "out=fisher.safetensors"])
    main(["calibrate", *of(four_heads), "quantizer=kvquant", *plain, *SMALL, "out=plain.safetensors"])
    fisher, none = (load_file(here / f"{name}.safetensors") for name in ("fisher", "plain"))
    for layer in range(2):
        for side in ("keys", "values"):
            weighed, counted = (found[f"{layer}/{side}/code:bins"] for found in (fisher, none))
            assert not torch.allclose(weighed[0], counted[0], rtol=0.01)
            assert float(weighed[0].sum()) == pytest.approx(1) == pytest.approx(float(counted[0].sum()))


def _refused(capsys, *arguments) -> str:
    capsys.readouterr()
    assert main([*arguments]) in (2, 3)
    told = capsys.readouterr().err.strip()
    assert "\n" not in told and "unexpected" not in told
    return told


def test_without_a_calibration_the_command_is_named(four_heads, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    told = _refused(capsys, "sweep", *of(four_heads), "quantizer=kvquant", *SWEEP)
    assert "has no calibration of" in told and "semkv-bench calibrate model=... quantizer=kvquant" in told


def test_the_calibration_of_another_model_is_refused(here, four_heads, local_folder, capsys):
    main(["calibrate", *of(four_heads), "quantizer=cq", *SMALL, "out=cq.safetensors"])
    file = "quantizer.calibration=cq.safetensors"
    told = _refused(capsys, "sweep", *of(local_folder), "quantizer=cq", file, *SWEEP)
    assert "is of another model or revision" in told
    told = _refused(capsys, "sweep", *of(four_heads), "quantizer=kvquant", file, *SWEEP)
    assert "is of cq, not of kvquant" in told
    other = "quantizer.keys.code.dim=2"
    told = _refused(capsys, "sweep", *of(four_heads), "quantizer=cq", file, other, *SWEEP)
    assert "with other options of its keys" in told


def test_the_text_of_the_evaluation_is_refused(here, four_heads, capsys):
    text = here / "evaluated.txt"
    text.write_text("A sentence of a text that is measured. " * 60)
    main(
        [
            "calibrate",
            *of(four_heads),
            "quantizer=wkvquant_lite",
            *SMALL,
            f"text={text}",
            "out=same.safetensors",
        ]
    )
    told = _refused(
        capsys, "sweep", *of(four_heads), "quantizer=wkvquant_lite", "quantizer.calibration=same.safetensors",
        "task=text", f"task.path={text}", "task.length=64", "grid.levels=[4]",
    )  # fmt: skip
    assert "calibrate on another text" in told


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["quantizer=affine"], "needs no calibration"),
        (["quantizer=kvquant", "length=8"], "length=8 must be"),
        (["quantizer=kvquant", "length=4096"], "is beyond the 1024 positions"),
        (["quantizer=kvquant", "text=nothing.txt"], "cannot be read"),
        (["quantizer=skvq", "sequences=3", "text=short.txt"], "fewer than sequences=3"),
    ],
)
def test_what_cannot_be_fitted_is_said_in_one_line(here, four_heads, capsys, arguments, word):
    (here / "short.txt").write_text("Too short.")
    assert word in _refused(capsys, "calibrate", *of(four_heads), *arguments)


def test_heads_that_a_rotation_cannot_join_are_refused(here, local_folder, capsys):
    told = _refused(capsys, "calibrate", *of(local_folder), "quantizer=rotatekv", *SMALL)
    assert "joins 4 heads, which do not divide this model's 2 key-value heads" in told


def test_rotary_scaling_by_length_is_refused(here, four_heads, tmp_path, capsys):
    for file in four_heads.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for command in (["calibrate", *SMALL], ["sweep", *SWEEP]):
        told = _refused(capsys, command[0], *of(tmp_path), "quantizer=kvquant", *command[1:])
        assert "rope_type=dynamic" in told
