"""What a method cannot do is one clear line before the model is even loaded: the list of all kinds."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from semkv_bench.cli import main
from semkv_bench.models.embedded import EmbeddedModel
from semkv_bench.quantizers import calibration

SWEEP = ["subset=niah_noise", "per_task=1", "task.length=220", "max_new_tokens=3", "stats.margin=0.3"]
HEADS, HEAD_DIM = 3, 24


def _save(folder, **changes):
    tokenizer = EmbeddedModel().tokenizer()
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=HEADS * HEAD_DIM, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, head_dim=HEAD_DIM, max_position_embeddings=1024,
        eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if changes:
        told = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(told | changes))
    return folder


@pytest.fixture(scope="module")
def three_heads(tmp_path_factory):
    """A model of three heads of 24 channels: no power of two divides much of it."""
    return _save(tmp_path_factory.mktemp("odd"))


@pytest.fixture(scope="module")
def by_length(tmp_path_factory):
    scaled = {"rope_type": "longrope", "factor": 2.0, "rope_theta": 1e4}
    scaled |= {name: [1.0] * (HEAD_DIM // 2) for name in ("short_factor", "long_factor")}
    return _save(tmp_path_factory.mktemp("long"), rope_parameters=scaled)


@pytest.fixture
def unloaded(monkeypatch):
    """No model can be loaded, so that nothing is read by it."""

    def refuse(*args, **kwargs):
        raise AssertionError("the model is loaded")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)


def _told(capsys, code, *arguments):
    capsys.readouterr()
    assert main([*arguments]) == code
    told = capsys.readouterr().err.strip()
    assert "\n" not in told and "unexpected" not in told and "Traceback" not in told
    return told


BAD = {
    "a group beside head_dim": (["affine", "quantizer.group_size=16"], "does not divide head_dim 24"),
    "a group of channels": (["kivi"], "group.channels=32 does not divide head_dim 24"),
    "a group over heads": (
        ["gear"],
        "group.channels=64 does not divide the 72 channels of all heads",
    ),
    "a group beside its block": (
        ["kivi", "quantizer.keys.keep.block=100"],
        "keep.block=100 must be a multiple",
    ),
    "a head no rotation fits": (
        ["quarot"],
        "a Hadamard step of size 24 does not fit head_dim 24",
    ),
    "a block no rotation fits": (["q4_0_rotated"], "the rotation is for head_dim that 64 divides, not 24"),
    "a vector no code fits": (
        ["nsnquant", "quantizer.keys.code.dim=7", "quantizer.keys.transform=[]"],
        "code.dim=7 does not divide the 24 channels",
    ),
    "levels beyond a code": (
        ["nsnquant", "quantizer.keys.transform=[]", "quantizer.values.transform=[]", "grid.levels=[16]"],
        "has at most 4 levels, not 16",
    ),
    "levels beyond a budget": (
        ["qaq", "quantizer.keys.budget.ceiling=8", "grid.levels=[16]"],
        "budget.ceiling=8",
    ),
    "mixed levels in a channel group": (
        ["kivi", "quantizer.values.group.channels=24", "allocation=two_level"],
        "must have one level count; use allocation=uniform",
    ),
    "mixed levels under a budget": (["qaq", "allocation=two_level"], "must have one level count"),
    "all layers left out": (
        ["ott", "quantizer.values.group.channels=24"],
        "leaves the first 2 and the last 0 layers in 16 bits, and so all 2",
    ),
    "no calibration": (["cq"], "semkv-bench calibrate model=... quantizer=cq"),
    "an outlier share": (
        ["gear", "quantizer.keys.outliers.share=2"],
        "outliers.share=2 must be a number between 0",
    ),
    "a window below nothing": (
        ["kivi", "quantizer.values.keep.recent=-1"],
        "keep.recent=-1 must be a whole number",
    ),
}


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("kind", BAD)
def test_one_line_before_the_model_is_loaded(kind, three_heads, unloaded, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (name, *changes), word = BAD[kind]
    grid = [] if any(change.startswith("grid") for change in changes) else ["grid.levels=[4]"]
    model = ["model=custom", f"model.path={three_heads}"]
    code = 3 if kind == "no calibration" else 2
    told = _told(capsys, code, "sweep", *model, f"quantizer={name}", *changes, *grid, *SWEEP, "out=run")
    assert word in told
    assert not (tmp_path / "run").exists()


def test_heads_that_no_pairs_fit(capsys):
    told = _told(capsys, 2, "storage", "quantizer=polarquant", "head_dim=33")
    assert "polar coordinates pair channels; head_dim 33 is odd" in told
    told = _told(capsys, 2, "storage", "quantizer=rotatekv", "head_dim=64", "kv_heads=6")
    assert "joins 4 heads, which do not divide this model's 6 key-value heads; legal are 1, 2" in told


@pytest.mark.parametrize("name", ["skvq", "wkvquant_lite", "aquakv", "nsnquant"])
def test_angles_that_hang_on_the_length(name, by_length, unloaded, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = ["model=custom", f"model.path={by_length}"]
    told = _told(capsys, 2, "sweep", *model, f"quantizer={name}", "grid.levels=[4]", *SWEEP)
    assert "rope_type=longrope" in told


def test_a_calibration_of_another_model(three_heads, unloaded, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    about = {"method": "aquakv", "model": {"name": "other", "weights": {"sha256": "0"}}, "fits": {}}
    calibration.write(tmp_path / "other.safetensors", about, {"0/keys/code:none": torch.zeros(1)})
    chosen = ["quantizer=aquakv", "quantizer.calibration=other.safetensors", "grid.levels=[4]"]
    told = _told(capsys, 2, "sweep", "model=custom", f"model.path={three_heads}", *chosen, *SWEEP)
    assert "is of another model or revision (other, not this" in told


def test_a_window_longer_than_the_prompt_is_said_and_priced(three_heads, tmp_path, monkeypatch, capsys):
    """Nothing is coded: a note says so, the answers are those of full, and the cache costs 16 bits a value."""
    from semkv_bench.records.folder import read_run

    monkeypatch.chdir(tmp_path)
    window = ["quantizer=affine", "quantizer.keep.recent=5000", "grid.levels=[2]"]
    assert main(["sweep", "model=custom", f"model.path={three_heads}", *window, *SWEEP, "out=run"]) == 0
    noted = capsys.readouterr()
    assert "no example is long enough for a token to leave the window" in noted.err + noted.out
    frame, _ = read_run(tmp_path / "run")
    coded, full = (frame[frame.setting == name].iloc[0] for name in ("affine[recent5000]-L2", "full"))
    assert coded.cache_bits == 16 and coded.kl == 0 and coded.prediction == full.prediction
    assert main(["storage", *window, "tokens=1000", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cache_bits"] == 16
