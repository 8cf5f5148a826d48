"""The command: what it measures, chooses, confirms and writes."""

import json

import pandas as pd
import pytest
import yaml

from semkv_bench.cli import main
from semkv_bench.packed import SemKVCache
from semkv_bench.quantizers import read_quantizer
from semkv_bench.records.folder import read_run
from semkv_bench.settings import uniform_settings

pytestmark = pytest.mark.usefixtures("without_figures")

FEW = ("task.length=120", "per_task=3", "subset=[niah_noise]", "max_new_tokens=3", "engine.noise_examples=0")


@pytest.fixture(scope="module")
def command(local_folder):
    return ["search", "model=custom", f"model.path={local_folder}", *FEW, "calibration_per_task=2"]


@pytest.fixture(scope="module")
def searched(command, tmp_path_factory):
    out = tmp_path_factory.mktemp("search") / "one"
    args = [*command, "target_bits=4.5", "grid.levels=[256,16,8,5,4,2]", f"out={out}"]
    assert main(args) == 0
    return out, args


@pytest.mark.slow
def test_every_layer_and_side_is_measured_alone(searched):
    out, _ = searched
    frame, _charter = read_run(out / "sensitivity")
    alone = {
        f"affine@{side}.{layer}-L{n}"
        for layer in (0, 1)
        for side in ("keys", "values")
        for n in (256, 16, 8, 5, 4, 2)
    }
    assert alone < set(frame["setting"]) and frame["kl"].notna().all()
    table = pd.read_csv(out / "sensitivity.csv")
    assert len(table) == len(alone) == 24
    worst = table[table["levels"] == 2].set_index(["layer", "side"])["kl"]
    best = table[table["levels"] == 256].set_index(["layer", "side"])["kl"]
    assert (worst > best).all()
    # What is coded is one side of one layer: three of four parts stay in 16 bits.
    bits = frame.set_index("setting")["cache_bits"]
    assert bits[bits.index == "affine@keys.0-L2"].mean() > 12


def test_the_outcome_is_confirmed_on_other_prompts(searched):
    out, _ = searched
    told = json.loads((out / "search.json").read_text())
    names = {row["setting"] for row in told["rows"]}
    assert {"full", "affine[search-4.5]", "affine[even-4.5]", "affine[kvtuner-4.5]", "affine-L2"} <= names
    bits = {row["setting"]: row["prompt_bits"] for row in told["rows"]}
    assert all(bits[f"affine[{one}-4.5]"] <= 4.5 for one in ("search", "even", "kvtuner"))
    assert next(one["setting"] for one in told["against"]) == "affine[even-4.5]"
    assert all(one["n_clusters"] == 3 for one in told["against"])
    one, other = (read_run(out / name)[0] for name in ("sensitivity", "confirm"))
    assert not set(one["prompt_hash"]) & set(other["prompt_hash"])
    assert (out / "confirm" / "report.json").exists()
    assert "affine[search-4.5]" in (out / "search.md").read_text()


def test_a_search_goes_on_where_it_was(searched, capsys):
    out, args = searched
    before = (out / "search.json").read_text()
    assert main(args) == 0
    assert capsys.readouterr().out.count("nothing left to run") == 2
    assert (out / "search.json").read_text() == before


def test_sweep_storage_and_the_cache_take_the_file(searched, local_folder, tmp_path, capsys):
    out, _ = searched
    (file,) = (out / "quantizer").glob("*.yaml")
    model = ["--conf", str(out), "model=custom", f"model.path={local_folder}", f"quantizer={file.stem}"]
    capsys.readouterr()
    assert main(["storage", *model, "tokens=119", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    told = json.loads((out / "search.json").read_text())
    planned = {one["setting"]: one["prompt_bits"] for one in told["rows"]}
    assert row["setting"] == "affine[search-4.5]"
    assert row["cache_bits"] == pytest.approx(planned["affine[search-4.5]"], rel=1e-3)
    assert main(["sweep", *model, *FEW, f"out={tmp_path / 'r'}", "per_task=1"]) == 0
    frame, _charter = read_run(tmp_path / "r")
    assert set(frame["setting"]) == {"full", "affine[search-4.5]"}
    assert yaml.safe_load(file.read_text())["keys"]["layers"]["called"] == "search-4.5"
    made = read_quantizer(file)
    (setting,) = uniform_settings(made.of_side("keys"), made.for_values(), [16])
    _check_packed(setting, local_folder)


def _check_packed(setting, folder):
    """The bytes that the packed cache holds are those that the levels by layer take."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    cache = SemKVCache(model.config, setting)
    with torch.no_grad():
        model(torch.arange(3, 131)[None], **{_keyword(model): cache})
    shape = [None] * 0
    measured = cache.effective_bits()
    from semkv_bench.models.shape import ModelShape

    shape = ModelShape.alike(2, 2, 16).cache
    assert measured == pytest.approx(setting.planned(shape, 128).cache_bits, rel=0.02)


def _keyword(model):
    from inspect import signature

    return "cache" if "cache" in signature(type(model).forward).parameters else "past_key_values"


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize(
    ("given", "code", "told"),
    [
        (["target_bits=2.9"], 2, "target_bits=2.9 is below 3.000"),
        (["target_bits=15"], 2, "there is nothing to choose"),
        (["target_bits=20"], 2, "target_bits=20.0 must be a number from 0 to 16"),
        ([], 2, "search needs a budget"),
        (["target_bits=4", "calibration_seeds=[0]"], 2, "cannot confirm the choice"),
        (["target_bits=4", "+quantizer.layers.others=8"], 2, "has them already"),
        (["target_bits=4", "grid.key_levels=8"], 2, "leave grid.key_levels and value_levels out"),
        (["target_bits=4", "grid.levels=[8]"], 2, "two level counts or more"),
        (["target_bits=4", "methods=[affine,kivi]"], 2, "search follows one quantizer"),
        (["target_bits=4", "model=nope"], 2, "there is no model 'nope'"),
        (["target_bits=4", "model.path=/nowhere"], 3, "/nowhere"),
        (["target_bits=4", "stats.looks=[2,3]"], 2, "leave it out"),
        (["target_bits=4", "stats.race=true"], 2, "stats.race plans a sweep"),
        (["target_bits=4", "fresh=true"], 2, "fresh=true"),
        (["target_bits=4", "allocation=two_level"], 2, "leave allocation=... out"),
        (["target_bits=4", "allocation=evict", "allocation.levels=4"], 2, "leave allocation=... out"),
        (["target_bits=4", "read=blocks"], 2, "leave read=... out"),
        (["target_bits=4", "grid.levels=null"], 2, "no levels given"),
        (["target_bits=4", "grid.levels=5"], 2, "two level counts or more"),
        (["target_bits=4", "calibration_seeds=null"], 2, "calibration_seeds takes no null"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(given, code, told, command, tmp_path, capsys):
    where = [] if "fresh=true" in given else [f"out={tmp_path / 'r'}"]
    assert main([*command, *where, *given]) == code
    err = capsys.readouterr().err.strip().splitlines()[-1]
    assert told in err and "unexpected" not in err
    assert not (tmp_path / "r").exists()


def test_prompts_that_calibrate_cannot_confirm(local_folder, tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"Number {n} of many, and what follows?", "answers": [str(n)]} for n in range(3)]
    file.write_text("\n".join(map(json.dumps, rows)))
    model = ["model=custom", f"model.path={local_folder}", "task=jsonl", f"task.path={file}", "target_bits=4"]
    assert main(["search", *model, "calibration_per_task=3", "per_task=3", f"out={tmp_path / 'r'}"]) == 2
    assert "that the choice is made by, and cannot confirm it" in " ".join(capsys.readouterr().err.split())
