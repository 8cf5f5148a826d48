import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from semkv_bench import recipe
from semkv_bench.cli import main
from semkv_bench.config.compose import compose_config
from semkv_bench.errors import CheckFailed
from semkv_bench.recipe import Chosen, _mixed_config, choose_levels, run_recipe
from semkv_bench.records.folder import RunFolder
from semkv_bench.records.runs import newest_run

pytestmark = pytest.mark.usefixtures("without_figures")

LEVELS = {f"affine-L{n}": n for n in (16, 8, 6, 5, 4)}


def _report(status, upper=None, lower=None) -> SimpleNamespace:
    """As much of a report as choosing levels reads."""
    return SimpleNamespace(cliff=SimpleNamespace(status=status, upper_setting=upper, lower_setting=lower))


def test_the_two_points_just_above_the_cliff():
    assert choose_levels(_report("located", "affine-L6", "affine-L4"), LEVELS) == Chosen(
        high=8, low=6, control=4
    )


@pytest.mark.parametrize("status", ["undetermined", "above_grid", "below_grid"])
def test_without_a_cliff_there_is_nothing_to_build_on(status):
    with pytest.raises(CheckFailed, match=f"status {status}"):
        choose_levels(_report(status), LEVELS)


def test_one_holding_point_is_not_enough():
    with pytest.raises(CheckFailed, match="L=16, holds"):
        choose_levels(_report("located", "affine-L16", "affine-L8"), LEVELS)


def test_the_second_sweep_uses_other_seeds_and_mixes():
    config = compose_config("recipe", ["seeds=[0,3]", "allocation.metric=value_norm"])
    mixed = _mixed_config(config, Chosen(8, 6, 4))
    assert list(mixed.seeds) == [4, 7] and list(mixed.grid.levels) == [8, 6, 4]
    assert (mixed.allocation.high, mixed.allocation.low) == (8, 6)
    assert list(mixed.allocation.fraction) == [0.1, 0.25, 0.5, 0.75]
    assert mixed.allocation.metric == "value_norm" and "context" not in mixed


def test_a_model_that_cannot_do_the_task_ends_with_one_line(local_folder, tmp_path, capsys):
    model = [
        "model=custom",
        f"model.path={local_folder}",
        "task.length=300",
        "per_task=2",
        "max_new_tokens=3",
    ]
    assert main(["recipe", *model, "grid.levels=[8,4,2]", f"out={tmp_path / 'r'}"]) == 1
    err = capsys.readouterr().err.strip().splitlines()
    assert err[-1].startswith("semkv-bench: the uniform sweep did not locate a cliff")
    assert json.loads((tmp_path / "r/uniform/report.json").read_text())["cliff"]["status"] != "located"


class _Stop(Exception):
    pass


def _folder_of(overrides: list[str]) -> Path:
    """Where the first sweep of a recipe goes."""
    places = []

    def run(plan, config):
        places.append(Path(config.out))
        raise _Stop

    with pytest.MonkeyPatch.context() as patch, pytest.raises(_Stop):
        patch.setattr(recipe, "run_plan", run)
        run_recipe(compose_config("recipe", overrides), Console(quiet=True))
    return places[0]


@pytest.mark.slow
def test_a_recipe_is_continued_where_it_was_begun_and_another_has_another_folder(
    local_folder, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    command = ["model=custom", f"model.path={local_folder}", "task.length=300", "per_task=1"]
    command += ["grid.levels=[8,4,2]", "subset=[niah_noise]"]
    first = _folder_of(command)
    assert first.parts[:2] == ("results", "runs") and first.name == "uniform"
    assert first.parts[2].startswith("recipe-")
    assert _folder_of(command) == _folder_of([*command, "context=[4096]"]) == first
    others = {_folder_of([*command, o]) for o in ("allocation.fraction=[0.5]", "seeds=[1]", "fresh=true")}
    assert len(others | {first}) == 4
    assert _folder_of([*command, "out=mine"]) == Path("mine/uniform")
    RunFolder.open(first, {"settings": {}, "examples": {"count": 1}}, "")
    assert newest_run() == first


def test_settings_apart_for_keys_and_values_are_refused(local_folder, tmp_path, capsys):
    arguments = ["model=custom", f"model.path={local_folder}", "grid.value_levels=8", f"out={tmp_path / 'r'}"]
    assert main(["recipe", *arguments]) == 2
    assert "grid.key_levels" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("grid.levels=[8,4]", "three grid points"),
        pytest.param("context=[-5]", "context=[-5]", marks=pytest.mark.slow),
        pytest.param("allocation.metric=nope", "no importance metric 'nope'", marks=pytest.mark.slow),
        pytest.param("allocation.fraction=7", "allocation.fraction=7", marks=pytest.mark.slow),
        ("allocation=prune", "leave allocation=two_level"),
        ("allocation.high=16", "finds allocation.high and allocation.low itself"),
    ],
)
def test_what_only_the_second_sweep_needs_is_checked_first(override, told, local_folder, tmp_path, capsys):
    model = [
        "model=custom",
        f"model.path={local_folder}",
        "task.length=300",
        "per_task=1",
        "grid.levels=[8,4,2]",
    ]
    assert main(["recipe", *model, override, f"out={tmp_path / 'r'}"]) == 2
    err = capsys.readouterr().err.strip().splitlines()
    assert told in err[-1] and not (tmp_path / "r").exists()
