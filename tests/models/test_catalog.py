import json
import shutil

import pytest
from huggingface_hub import constants

from semkv_bench.cli import main


def _hub_folder(root, repository: str, local_folder):
    """The hub's cache layout with one snapshot of a tiny model."""
    top = root / f"models--{repository.replace('/', '--')}"
    (top / "refs").mkdir(parents=True)
    (top / "refs" / "main").write_text("abc")
    return shutil.copytree(local_folder, top / "snapshots" / "abc")


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """No model on this disk, no network; returns the hub's cache folder."""
    monkeypatch.setenv("SEMKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(
        "semkv_bench.models.load.hub_reachable", lambda: pytest.fail("the network was asked for")
    )
    monkeypatch.setattr("semkv_bench.models.embedded._installed_gguf", lambda: None)
    return tmp_path / "hub"


def _entries(capsys, *arguments: str) -> dict[str, dict]:
    assert main(["models", *arguments, "--json"]) == 0
    return {entry["choice"]: entry for entry in json.loads(capsys.readouterr().out)}


def test_nothing_here_still_tells_shapes_and_how_to_fetch(bare, capsys):
    found = _entries(capsys)
    assert set(found) == {"smollm2", "llama31", "mistral7b", "qwen25"}
    assert {entry["state"] for entry in found.values()} == {"absent"}
    llama = found["llama31"]
    assert llama["fetch"] == "hf download meta-llama/Llama-3.1-8B-Instruct"
    # 2 (keys and values) x 32 layers x 8 heads x 128 values x 2 bytes = 128 KiB a token.
    assert llama["cache_bytes_per_token"] == 128 * 1024 and llama["shape_from"] == "publication"
    assert llama["fetch_bytes"] == 16_060_522_496
    assert found["qwen25"]["cache_bytes_per_token"] == 56 * 1024
    assert found["smollm2"]["cache_bytes_per_token"] == 22.5 * 1024
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    assert "hf download Qwen/Qwen2.5-7B-Instruct" in out and "as published" in out


def test_a_model_in_the_hubs_cache_is_read_from_there(bare, local_folder, capsys):
    folder = _hub_folder(bare, "Qwen/Qwen2.5-7B-Instruct", local_folder)
    entry = _entries(capsys, "model=qwen25")["qwen25"]
    assert (entry["state"], entry["where"], entry["fetch"]) == ("present", str(folder), None)
    assert entry["size_bytes"] == sum(f.stat().st_size for f in local_folder.iterdir())
    # The tiny model's own shape: 2 layers, 2 KV heads of 16 values, 2 x 2 x 2 x 16 x 2 bytes.
    assert (entry["layers"], entry["cache_bytes_per_token"]) == (2, 256)
    assert entry["shape_from"] == "configuration"


def test_a_download_that_was_cut_short(bare, local_folder, capsys):
    folder = _hub_folder(bare, "Qwen/Qwen2.5-7B-Instruct", local_folder)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}})
    )
    entry = _entries(capsys, "model=qwen25")["qwen25"]
    assert entry["state"] == "incomplete" and entry["fetch"] == "hf download Qwen/Qwen2.5-7B-Instruct"
    (folder / "model-2.safetensors").write_text("x")
    assert _entries(capsys, "model=qwen25")["qwen25"]["state"] == "present"


def test_any_folder(bare, local_folder, tmp_path, capsys):
    assert _entries(capsys, f"model.path={local_folder}")["custom"]["state"] == "present"
    empty = tmp_path / "empty folder"
    empty.mkdir()
    entry = _entries(capsys, f"model.path={empty}")["custom"]
    assert entry["state"] == "incomplete" and entry["layers"] is None
    assert main(["models", f"model.path={empty}"]) == 0
    assert "missing or damaged" in capsys.readouterr().out


def test_the_embedded_model_where_it_is(smollm2, capsys):
    entry = _entries(capsys, "model=smollm2")["smollm2"]
    assert entry["state"] == "present" and entry["layers"] == entry["full_attention_layers"] == 30
    assert entry["shape_from"] == "configuration" and entry["size_bytes"] > 50_000_000


@pytest.mark.parametrize("path", ["/nope", "./nope", "~/nope", "a/b/nope"])
def test_a_path_that_leads_nowhere_is_no_model_to_fetch(path, bare, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["models", f"model.path={path}"]) == 3
    out, err = capsys.readouterr()
    assert err == f"semkv-bench: model.path={path} does not exist\n" and not out
    assert _entries(capsys, "model.path=org/name")["custom"]["fetch"] == "hf download org/name"


def test_storage_falls_back_on_what_is_published_and_says_so(bare, monkeypatch, local_folder, capsys):
    monkeypatch.setattr("semkv_bench.models.load.hub_reachable", lambda: False)
    storage = ["storage", "model=llama31", "grid.levels=[4]", "context=[1024]"]
    assert main([*storage, "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    # 1,024 tokens at 128 KiB; affine at L=4 takes 2.25 bits of 16.
    assert row["full_bytes"] == {"1024": 128 * 2**20} and row["cache_bytes"] == {"1024": 18 * 2**20}
    assert row["shape_from"] == "publication" and row["head_dim"] == 128
    assert main(storage) == 0
    assert "its shape is the one published" in capsys.readouterr().out
    custom = [*storage[:1], "model=custom", f"model.path={local_folder}", *storage[2:]]
    assert main([*custom, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["shape_from"] == "configuration"
    assert main(["storage", "model=custom", "model.path=org/unheard-of"]) == 3


def test_a_plan_without_the_model_tells_what_is_published(bare, monkeypatch, capsys):
    monkeypatch.setattr("semkv_bench.models.load.hub_reachable", lambda: False)
    assert main(["plan", "model=llama31"]) == 3
    err = capsys.readouterr().err
    # 2 bytes for each of 8,030,261,248 parameters.
    assert "weights take 15 GiB" in err and "128 KiB a token" in err and len(err.strip().splitlines()) == 1
    assert main(["plan", "model=custom", "model.path=org/unheard-of"]) == 3
    assert "as published" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["model=nope"], "there is no model 'nope'"),
        (["per_task=3"], "models takes model="),
        (["--all"], "unknown option --all"),
        (["model=custom"], "model.path must be given"),
    ],
)
def test_wrong_usage_is_one_line(arguments, told, capsys):
    assert main(["models", *arguments]) == 2
    err = capsys.readouterr().err
    assert told in err and len(err.strip().splitlines()) == 1
