import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
from thinned import thinned

from semkv_bench.cli import main
from semkv_bench.config.compose import compose_config
from semkv_bench.config.own import joined
from semkv_bench.models.shape import ModelShape
from semkv_bench.plan.settings import planned_settings, quantizers
from semkv_bench.regress import read_baseline, write_baseline
from semkv_bench.regress.checksums import code_checks

pytestmark = pytest.mark.usefixtures("without_figures")

ROOT = Path(__file__).resolve().parents[2]


def _script(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


faults = _script("plant_faults")
AFFINE_FAULTS = [fault for fault in faults.FAULTS if fault.quantizer == "affine"]
CODER = {"codes", "values"}
# What a fault breaks in the code; what it does to scores is measured by the script.
SEEN_BY = {
    "rounding half up": CODER | {"packed"},
    "scale (max - min)/L": CODER | {"metadata", "packed", "rows"},
    "clamp one too low": CODER | {"packed", "rows"},
    "keys and values swapped": {"rows"},
    "one layer left unquantized": {"rows"},
    "levels one too many": CODER | {"metadata", "packed", "rows"},
    "clamp one too high": CODER,
    "states of keys and values swapped": {"rows"},
    "first layer taken for a sliding one": {"rows"},
    "levels one too few in the settings": {"rows", "storage"},
    "zeros not counted as stored": {"storage"},
    "digits packed in reverse": {"packed"},
}

# Few settings and tokens: answers of a random model are noise, but the same noise.
JUDGE = "judge.min_examples=6"
QUICK = ["task.length=300", "per_task=6", "max_new_tokens=3", JUDGE]
GRID = ["grid.levels=[16,6,3,16]", "grid.key_levels=[16,6,3,16]", "grid.value_levels=[16,6,3,8]"]


def _regress(folder, *more: str) -> list[str]:
    return ["regress", "model=custom", f"model.path={folder}", *QUICK, *GRID, *more]


@pytest.fixture(scope="module")
def place(tmp_path_factory, local_folder):
    """A baseline of the small random model, and the run that it was made of."""
    place = tmp_path_factory.mktemp("regress")
    files = [f"baseline={place / 'baseline.json'}", f"out={place / 'run'}"]
    assert main(_regress(local_folder, *files, "--update")) == 0
    return place


def _against(place, *more: str) -> list[str]:
    """Judge the run that the baseline was made of."""
    return ["regress", f"run={place / 'run'}", f"baseline={place / 'baseline.json'}", JUDGE, *more]


def _quick(place, local_folder, *more: str) -> list[str]:
    return _regress(local_folder, f"baseline={place / 'baseline.json'}", "quick=true", *more)


def _last_line(capsys) -> str:
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_an_unchanged_tree_is_the_same(place, local_folder, tmp_path, capsys):
    files = [f"baseline={place / 'baseline.json'}", f"out={tmp_path / 'run'}"]
    assert main(_regress(local_folder, *files)) == 0
    out = capsys.readouterr().out
    assert "SAME: affine on" in out and "every record is alike on 12 examples" in out
    content = json.loads((tmp_path / "run/regress.json").read_text())
    assert (content["status"], content["exit_code"], content["findings"]) == ("same", 0, [])
    assert main(_regress(local_folder, *files)) == 2
    assert "holds a run already" in _last_line(capsys)


def test_a_finished_run_can_be_judged_and_told_as_json(place, tmp_path, capsys):
    assert main(_against(place, f"out={tmp_path}", "--json")) == 0
    content = json.loads(capsys.readouterr().out)
    assert content == json.loads((tmp_path / "regress.json").read_text())
    assert content["alike"] and content["examples"] == 12
    # KL of three settings and all, scores of four and full, and the cliff.
    witnesses = [(shift["witness"], shift["setting"]) for shift in content["shifts"]]
    assert len(witnesses) == 5 + 5 + 1 and ("cliff", "all settings") in witnesses


@pytest.mark.slow
def test_a_fault_moves_the_answers_too(place, local_folder, tmp_path, capsys):
    (fault,) = (fault for fault in faults.FAULTS if fault.name == "keys and values swapped")
    with faults.planted(fault):
        files = [f"baseline={place / 'baseline.json'}", f"out={tmp_path}"]
        assert main(_regress(local_folder, *files)) == 1
    findings = json.loads((tmp_path / "regress.json").read_text())["findings"]
    assert {"rows", "kl"} <= {finding["witness"] for finding in findings}
    moved = [finding["what"] for finding in findings if finding["witness"] == "kl"]
    assert any("affine-K16V8" in what for what in moved) and not any("affine-L6 " in what for what in moved)
    assert "MOVED" in capsys.readouterr().out


def test_without_a_baseline_nothing_is_run(local_folder, tmp_path, capsys):
    files = [f"baseline={tmp_path / 'none.json'}", f"out={tmp_path / 'run'}"]
    assert main(_regress(local_folder, *files)) == 3
    assert "there is no baseline" in _last_line(capsys) and not (tmp_path / "run").exists()


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("task.length=310", "differs from the baseline in task (task.length: 300 there, 310 here);"),
        ("stats.margin=0.2", "differs from the baseline in stats"),
        ("quantizer.group_size=8", "in quantizer, grid (quantizer.group_size: None there, 8 here; grid: "),
        ("grid.key_levels=[16,6,4,16]", "(grid: ['affine-L3'] there, ['affine-K4V3'] here);"),
        ("quantizer=turboquant", "differs from the baseline in quantizer, grid"),
        pytest.param("engine.temperature=1", "differs from the baseline in engine", marks=pytest.mark.slow),
        pytest.param("model.label=another", "differs from the baseline in model", marks=pytest.mark.slow),
        ("judge.min_examples=2", "judge.min_examples=2 must be at least 4"),
        ("judge.kl_tolerance=0", "judge.kl_tolerance=0"),
        ("shard=1/2", "judges whole sweeps"),
    ],
)
def test_like_is_compared_with_like(override, told, place, local_folder, tmp_path, capsys):
    files = [f"baseline={place / 'baseline.json'}", f"out={tmp_path / 'run'}"]
    assert main(_regress(local_folder, *files, override)) == 2
    assert told in _last_line(capsys) and not (tmp_path / "run").exists()


def test_a_run_of_something_else_is_refused(place, tmp_path, capsys):
    content = json.loads((place / "baseline.json").read_text())
    content["identity"]["model_revision"] = "another"
    (tmp_path / "other.json").write_text(json.dumps(content))
    assert main(_against(place, f"baseline={tmp_path / 'other.json'}", f"out={tmp_path}")) == 2
    assert "model_revision: another there" in _last_line(capsys)


@pytest.mark.parametrize("text", ["[]", "{", '{"schema": 0}', '{"schema": 1, "settings": {}}'])
def test_a_damaged_baseline_is_one_line(text, place, tmp_path, capsys):
    (tmp_path / "baseline.json").write_text(text)
    assert main(_against(place, f"baseline={tmp_path / 'baseline.json'}", f"out={tmp_path}")) == 2
    assert "baseline" in _last_line(capsys)


def test_too_few_examples_are_not_judged(place, tmp_path, capsys):
    assert main(_against(place, f"out={tmp_path}", "judge.min_examples=13")) == 3
    assert "NOT JUDGED" in capsys.readouterr().out


@pytest.mark.slow
def test_update_shows_the_difference_and_then_accepts_it(place, tmp_path, capsys):
    content = json.loads((place / "baseline.json").read_text())
    content["settings"]["affine-L6"]["effective_bits"] += 0.5
    path = tmp_path / "baseline.json"
    path.write_text(json.dumps(content))
    arguments = _against(place, f"baseline={path}", f"out={tmp_path}")
    assert main(arguments) == 1
    assert main([*arguments, "--update"]) == 0
    out = capsys.readouterr().out
    assert out.count("moved  storage: affine-L6: effective bits 5.1000 -> 4.6000") == 2
    assert path.read_bytes() == (place / "baseline.json").read_bytes()
    assert main(arguments) == 0


@pytest.mark.parametrize("options", thinned([[], ["--json"]], []))
def test_a_move_stays_a_move_where_nobody_reads_on(options, place, tmp_path, monkeypatch):
    content = json.loads((place / "baseline.json").read_text())
    content["settings"]["affine-L6"]["effective_bits"] += 0.5
    (tmp_path / "baseline.json").write_text(json.dumps(content))
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert (
            main(_against(place, f"baseline={tmp_path / 'baseline.json'}", f"out={tmp_path}", *options)) == 1
        )
    assert json.loads((tmp_path / "regress.json").read_text())["status"] == "moved"


def test_update_replaces_what_cannot_be_read(place, tmp_path, capsys):
    path = tmp_path / "baseline.json"
    path.write_text("{")
    assert main(_against(place, f"baseline={path}", f"out={tmp_path}", "--update")) == 0
    assert path.read_bytes() == (place / "baseline.json").read_bytes()


def test_a_quantizer_of_ones_own(tmp_path):
    (tmp_path / "quantizer").mkdir()
    (tmp_path / "quantizer" / "coarse.yaml").write_text("_target_: regress_coarse.Coarse\n")
    (tmp_path / "regress_coarse.py").write_text(
        "from semkv_bench.quantizers import Affine\n\n\nclass Coarse(Affine):\n    name = 'coarse'\n"
    )
    with joined([str(tmp_path)]):
        config = compose_config("regress", ["quantizer=coarse"])
        settings, pair = planned_settings(config), quantizers(config)
    assert [setting.name for setting in settings][:3] == ["full", "coarse-K32V12", "coarse-L16"]
    checks = code_checks(*pair, settings, ModelShape.alike(2, 1, 16))
    assert checks["codes"] and {"L2", "L2 bytes", "L2 read back"} <= checks["packed"].keys()


def test_update_refuses_what_could_not_be_judged_by(place, tmp_path, capsys):
    path = tmp_path / "baseline.json"
    assert main(_against(place, f"baseline={path}", "judge.min_examples=13", "--update")) == 2
    assert "baseline of 12 examples" in _last_line(capsys) and not path.exists()
    assert main(["regress", "quick=true", f"baseline={path}", "--update"]) == 2


def test_code_alone_is_compared_in_seconds(place, local_folder, capsys):
    assert main(_quick(place, local_folder)) == 0
    assert "code and storage only" in capsys.readouterr().out


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("fault", AFFINE_FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_turns_it_red(fault, place, local_folder, tmp_path, capsys):
    with faults.planted(fault):
        assert main(_quick(place, local_folder, f"out={tmp_path}")) == 1
    content = json.loads((tmp_path / "regress.json").read_text())
    assert {finding["witness"] for finding in content["findings"]} == SEEN_BY[fault.name]


@pytest.mark.parametrize("quantizer", ["affine", "turboquant"])
def test_the_code_is_that_of_the_committed_baselines(quantizer, capsys):
    assert main(["regress", f"quantizer={quantizer}", "quick=true"]) == 0


@pytest.mark.parametrize(
    "path", sorted((ROOT / "results" / "baselines").glob("*.json")), ids=lambda p: p.stem
)
def test_a_committed_baseline_is_written_as_it_is_read(path, tmp_path):
    write_baseline(read_baseline(path), tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    "fault", [f for f in faults.FAULTS if f.quantizer == "turboquant"], ids=lambda fault: fault.name
)
def test_a_fault_in_turboquant_turns_it_red(fault, tmp_path):
    with faults.planted(fault):
        assert main(["regress", "quantizer=turboquant", "quick=true", f"out={tmp_path}"]) == 1
    findings = json.loads((tmp_path / "regress.json").read_text())["findings"]
    assert {"codes", "values"} <= {finding["witness"] for finding in findings}
