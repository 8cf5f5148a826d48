"""Weights known by content: what changes the fingerprint, and what does not."""

import json

import pytest
import torch
from safetensors.torch import save_file

from semkv_bench.errors import MissingError
from semkv_bench.models.fingerprint import generation_settings, local_weights
from semkv_bench.models.load import PretrainedModel


def _tensors(seed: int = 0, size: int = 500) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(size, 8, generator=generator) for name in ("a.weight", "b.weight")}


@pytest.fixture
def folder(tmp_path):
    save_file(_tensors(), tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8, "transformers_version": "5.0"}))
    return tmp_path


def test_size_and_tensors_are_told(folder):
    found = local_weights(folder)
    assert (found["tensors"], found["bytes"]) == (2, 2 * 500 * 8 * 4)
    assert set(found) == {"tensors", "bytes", "sha256", "config_sha256"}
    assert local_weights(folder) == found


def test_how_tensors_are_spread_over_files_does_not_matter(folder):
    before = local_weights(folder)
    (folder / "model.safetensors").unlink()
    for name, tensor in _tensors().items():
        save_file({name: tensor}, folder / f"model-{name}.safetensors", {"other": "words"})
    (folder / "config.json").write_text(json.dumps({"transformers_version": "6", "hidden_size": 8}))
    assert local_weights(folder) == before


def _one_value(tensors):
    tensors["b.weight"][250, 3] += 1
    return tensors


@pytest.mark.parametrize(
    "change",
    [
        _one_value,
        lambda t: t | {"a.weight": t["a.weight"].to(torch.float64)},
        lambda t: t | {"a.weight": t["a.weight"].reshape(8, 500)},
        lambda t: {"a.weight": t["a.weight"], "c.weight": t["b.weight"]},
        lambda t: {"a.weight": t["b.weight"], "b.weight": t["a.weight"]},
        lambda t: _tensors(seed=1),
    ],
)
def test_other_values_types_shapes_and_names_are_other_weights(folder, change):
    before = local_weights(folder)
    save_file(change(_tensors()), folder / "model.safetensors")
    assert local_weights(folder)["sha256"] != before["sha256"]


def test_of_large_models_samples_tell(folder, monkeypatch):
    monkeypatch.setattr("semkv_bench.models.fingerprint._WHOLE", 0)
    save_file(_tensors(size=50_000), folder / "model.safetensors")
    before = local_weights(folder)
    save_file(_tensors(size=50_000, seed=1), folder / "model.safetensors")
    assert local_weights(folder)["sha256"] != before["sha256"]
    last = _tensors(size=50_000)
    last["b.weight"][-1, -1] += 1
    save_file(last, folder / "model.safetensors")
    assert local_weights(folder)["sha256"] != before["sha256"]


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.gguf"])
def test_other_formats_are_known_by_their_bytes(tmp_path, name):
    file = tmp_path / name
    file.write_bytes(b"x" * 1000)
    before = local_weights(tmp_path)
    assert before["files"] == 1 and local_weights(file)["sha256"] == before["sha256"]
    file.write_bytes(b"x" * 999 + b"y")
    assert local_weights(tmp_path)["sha256"] != before["sha256"]


def test_another_configuration_is_another_model(folder):
    before = local_weights(folder)
    (folder / "config.json").write_text(json.dumps({"hidden_size": 8, "rope_theta": 500000}))
    after = local_weights(folder)
    assert after["sha256"] == before["sha256"] and after["config_sha256"] != before["config_sha256"]


@pytest.mark.parametrize(
    "content", [b"", b"1234567", b"\xff" * 100, b"\x02\0\0\0\0\0\0\0[]", b"\x05\0\0\0\0\0\0\0[[[[["]
)
def test_damaged_files_are_one_line(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(MissingError, match=r"the weights in .* cannot be read") as caught:
        local_weights(folder)
    assert "\n" not in str(caught.value)


def test_a_folder_without_weights_can_still_be_planned(tmp_path):
    assert local_weights(tmp_path)["files"] == 0


def test_what_a_model_says_of_generation(local_folder, tmp_path):
    assert PretrainedModel(str(local_folder)).generation_config()["eos_token_id"] == 2
    assert generation_settings({"top_p": 0.9, "transformers_version": "5", "x": None}) == {"top_p": 0.9}
