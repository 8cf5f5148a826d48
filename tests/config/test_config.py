import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from semkv_bench.cli import main
from semkv_bench.config.choices import choices, conf_dir
from semkv_bench.config.compose import build, check_sweeps, compose_config
from semkv_bench.config.overrides import as_overrides
from semkv_bench.errors import UsageError
from semkv_bench.plan.settings import planned_settings
from semkv_bench.stats.options import stats_options

GROUPS = choices("sweep")


def _needs_a_path(group: str, choice: str) -> list[str]:
    needy = (("model", "custom"), ("task", "jsonl"), ("task", "text"))
    return [f"{group}.path=somewhere"] if (group, choice) in needy else []


def _shipped():
    """Every choice of every group; of the quantizers of values alone, which are the same files, a few.

    Experiments and quantizers are slow: those are composed together, too.
    """
    for group, names in GROUPS.items():
        slow = group in ("quantizer", "quantizer@value_quantizer", "experiment")
        shown = ("affine", "kivi", "turboquant") if "@" in group else names
        yield from (
            pytest.param(
                group,
                name,
                marks=[pytest.mark.slow] if slow and name != "kivi" else [],
                id=f"{group}-{name}",
            )
            for name in shown
        )


@pytest.mark.quick_cases(10)
@pytest.mark.parametrize(("group", "choice"), _shipped())
def test_every_shipped_choice_composes(group, choice):
    config = compose_config("sweep", [f"{group}={choice}", *_needs_a_path(group, choice)])
    for part in ("model", "quantizer", "allocation", "protocol"):
        assert build(config[part], part) is not None
    assert planned_settings(config)[0].name == "full"


def test_every_shipped_quantizer_composes_beside_the_others():
    names = GROUPS["quantizer"]
    config = compose_config("sweep", [f"methods=[{','.join(names)}]"])
    for name in names:
        assert build(config.method[name], name) is not None
    assert planned_settings(config)[0].name == "full"


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["quantizer=nope"], "there is no quantizer 'nope'; choose from affine"),
        (["quantizer@value_quantizer=nope"], "there is no value_quantizer 'nope'; choose from affine"),
        (["grdi.levels=[3]"], "there is no key 'grdi.levels'"),
        (["quantizer.width=3"], "there is no key 'quantizer.width'"),
        (["grid.levels=[3"], "cannot read the override 'grid.levels=[3'"),
        (["per_task=many"], "per_task: Value 'many'"),
        (["stats.margin=wide"], "stats.margin: Value 'wide'"),
        (["model=custom"], "model.path must be given"),
        (["seeds=3"], "seeds must be a list, for example seeds=[0]"),
        (["stats.looks=abc"], "stats.looks must be a list, for example stats.looks=[40,80,120]"),
        (["prompts=official"], "prompts=official has no effect on this task"),
        (["prompts=foo", "task=longform"], "prompts=foo has no effect on this task"),
    ],
)
def test_bad_overrides_are_one_clear_line(overrides, told):
    with pytest.raises(UsageError) as raised:
        compose_config("sweep", overrides)
    assert told in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["grid.levels=[]"], "no levels given"),
        (["grid.levels=[-4]"], "not -4"),
        (["grid.levels=[2.5]"], "not 2.5"),
        (["grid.levels=[8,1]"], "not 1"),
        (["grid.levels=[8,8]"], "affine-L8 more than once"),
        (["grid.levels=[8,4]", "grid.key_levels=[8]"], "1 entries, grid.levels has 2"),
        (["grid.key_levels=full", "grid.value_levels=full"], "nothing is quantized"),
        (["grid.key_levels=half"], "grid.key_levels=half"),
        (["allocation=two_level", "allocation.low=6"], "allocation.low=6 must be below"),
        (["allocation=two_level", "allocation.fraction=1.2"], "allocation.fraction=1.2"),
    ],
)
def test_bad_settings_are_one_clear_line(overrides, told):
    with pytest.raises(UsageError, match=told.replace("[", r"\[").replace(".", r"\.")):
        planned_settings(compose_config("sweep", overrides))


def test_the_example_of_looks_is_taken():
    assert stats_options(compose_config("sweep", ["stats.looks=[40,80,120]"])).looks == (40, 80, 120)


def test_prompts_are_checked_by_the_task_that_takes_them():
    for wording in ("auto", "official", "own"):
        assert compose_config("sweep", ["task=longbench", f"prompts={wording}"]).task.prompts == wording
    assert compose_config("sweep", ["prompts=own"]).prompts == "own"
    with pytest.raises(UsageError, match="prompts=foo is not known; choose from auto, official, own"):
        build(compose_config("sweep", ["task=longbench_multiturn", "prompts=foo"]).task, "task")


@pytest.mark.parametrize("protocol", ["generation", "multiturn"])
@pytest.mark.parametrize("override", ["protocol.block=0", "protocol.parts=half"])
def test_what_a_protocol_cannot_be_is_named_by_its_key(protocol, override):
    config = compose_config("sweep", [f"protocol={protocol}", override])
    with pytest.raises(UsageError, match=f"^{override} "):
        build(config.protocol, "protocol")


def test_numbers_in_scientific_notation_are_numbers():
    assert compose_config("sweep", ["stats.alpha=1.0e-5"]).stats.alpha == 1e-5
    assert compose_config("sweep", ["stats.alpha=1e-5"]).stats.alpha == 1e-5


def test_keys_and_values_with_different_quantizers_and_levels():
    config = compose_config("sweep", ["quantizer@value_quantizer=turboquant", "grid.levels=[4,3]"])
    assert [s.name for s in planned_settings(config)] == [
        "full",
        "affine+turboquant-L4",
        "affine+turboquant-L3",
    ]
    config = compose_config("sweep", ["grid.levels=[4,3]", "grid.value_levels=8"])
    names = [s.name for s in planned_settings(config)]
    assert names == ["full", "affine-K4V8", "affine-K3V8"]
    config = compose_config("sweep", ["grid.levels=[4]", "grid.value_levels=full"])
    setting = planned_settings(config)[1]
    assert setting.name == "affine-K4Vfull"
    assert setting.storage(128).effective_bits == (2.25 + 16) / 2


def test_mixes_come_on_top_of_the_grid():
    config = compose_config(
        "sweep", ["grid.levels=[6,5]", "allocation=two_level", "allocation.fraction=[0.25,0.5]"]
    )
    names = [setting.name for setting in planned_settings(config)]
    assert names == [
        "full",
        "affine-L6",
        "affine-L5",
        "affine-L6/5@0.25:key_norm",
        "affine-L6/5@0.5:key_norm",
    ]


def test_multirun_is_checked_before_the_first_job():
    check_sweeps("sweep", ["quantizer=affine,turboquant", "per_task=3"])
    with pytest.raises(UsageError, match="there is no quantizer 'nope'"):
        check_sweeps("sweep", ["quantizer=affine,nope"])


def test_found_from_any_working_directory(tmp_path):
    code = "from semkv_bench.config.compose import compose_config; print(compose_config('sweep').prompts)"
    root = str(Path(__file__).resolve().parents[2])
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert ran.stdout.strip() == "auto", ran.stderr


def test_every_configuration_file_is_readable():
    files = list(conf_dir().rglob("*.yaml"))
    assert len(files) > 15
    for path in files:
        assert OmegaConf.load(path) is not None


@pytest.mark.parametrize(
    ("argument", "several", "value"),
    [
        ("out=my run", False, "my run"),
        ("out=it's (1) a=b, #2 é", False, "it's (1) a=b, #2 é"),
        ("out=a,b", False, "a,b"),
        ("model.path=~/models/[x]", False, "~/models/[x]"),
        ("task.path=1e3", False, "1e3"),
        ("out='quoted already'", False, "quoted already"),
        (r"out=escaped\ already", False, "escaped already"),
        ("out=null", False, None),
        ("out=a b", True, "a b"),
    ],
)
def test_paths_need_no_quotes_of_hydra(argument, several, value):
    (quoted,) = as_overrides([argument], several=several)
    assert OverridesParser.create().parse_override(quoted).value() == value


def test_what_is_no_path_stays_as_it_is():
    for argument in ("grid.levels=[4,3]", "per_task=3", "out=${x}/y", "~value_quantizer"):
        assert as_overrides([argument]) == [argument]
    assert as_overrides(["out=a,b"], several=True) == ["out=a,b"]


def test_storage_does_not_pass_over_an_unknown_model():
    with pytest.raises(UsageError, match="there is no model 'nope'; choose from custom"):
        compose_config("storage", ["model=nope"])
    assert compose_config("storage").model is None


@pytest.mark.parametrize(
    ("content", "told"),
    [("a: 1", "a Quantizer; it makes a dict"), ("_target_: os.getcwd", "makes a str"), ("a: [1", "bad.yaml")],
)
def test_a_wrong_file_of_ones_own_is_one_clear_line(content, told, tmp_path, capsys):
    (tmp_path / "quantizer").mkdir()
    (tmp_path / "quantizer/bad.yaml").write_text(content)
    assert main(["storage", "--conf", str(tmp_path), "quantizer=bad"]) == 2
    err = capsys.readouterr().err.strip()
    assert told in err and len(err.splitlines()) == 1


def test_a_list_of_one_length_is_that_length():
    one, listed = (compose_config("sweep", [f"task.length={length}"]) for length in ("150", "[150]"))
    assert one == listed and one.task.length == 150


def test_two_folders_of_ones_own_may_not_hold_the_same_choice(tmp_path, capsys):
    folders = [tmp_path / name for name in "ab"]
    for size, folder in enumerate(folders, start=3):
        (folder / "quantizer").mkdir(parents=True)
        text = f"_target_: semkv_bench.quantizers.Affine\ngroup_size: {2**size}\n"
        (folder / "quantizer/blocks.yaml").write_text(text)
    storage = ["storage", "quantizer=blocks", "grid.levels=[4]"]
    assert main([*storage, "--conf", str(folders[0]), "--conf", str(folders[0])]) == 0
    assert main([*storage, "--conf", str(folders[0]), "--conf", str(folders[1])]) == 2
    err = capsys.readouterr().err.strip()
    assert "b/quantizer/blocks.yaml: quantizer=blocks is a choice of " in err and err.endswith(
        "too; rename one"
    )


@pytest.mark.parametrize("name", ["affine", "turboquant_split", "kivi", None])
def test_a_quantizer_of_ones_own_may_not_be_called_like_ours(name, tmp_path, monkeypatch, capsys):
    module = f"impostor_{name}"
    body = "pass" if name is None else f"name = {name!r}"
    text = f"from semkv_bench.quantizers import Affine\n\n\nclass Mine(Affine):\n    {body}\n"
    (tmp_path / f"{module}.py").write_text(text)
    (tmp_path / "quantizer").mkdir()
    (tmp_path / "quantizer/mine.yaml").write_text(f"_target_: {module}.Mine\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["storage", "--conf", str(tmp_path), "quantizer=mine", "grid.levels=[4]"]) == 2
    told = f"quantizer: Mine is called {name or 'affine'}, like a quantizer of the package's own"
    assert told in capsys.readouterr().err
