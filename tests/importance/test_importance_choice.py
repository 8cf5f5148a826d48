"""Metrics as choices of a group: the package's, the user's own, and what is refused."""

import subprocess
import sys

import pytest
import torch

from semkv_bench.cli import main
from semkv_bench.config.choices import conf_dir
from semkv_bench.config.compose import compose_config
from semkv_bench.config.own import joined
from semkv_bench.errors import UsageError
from semkv_bench.importance import choice, choices, metric
from semkv_bench.importance.base import Needs
from semkv_bench.importance.block import cache_scores
from semkv_bench.plan.settings import planned_settings

LOTTERY = """
import torch
from semkv_bench.importance.model_free import ControlMetric


class Lottery(ControlMetric):
    name = "lottery"
    seeded = True

    def score(self, ids, seed):
        return torch.rand(len(ids), generator=torch.Generator().manual_seed(seed))
"""
MIX = ["allocation=two_level", "grid.levels=[6,5]"]


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder with a seeded metric of one's own; a module of one file and a choice of one more."""
    (tmp_path / "metric").mkdir()
    (tmp_path / "lottery.py").write_text(LOTTERY)
    (tmp_path / "metric/lottery.yaml").write_text("_target_: lottery.Lottery\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    choice._of_file.cache_clear()
    with joined([str(tmp_path)]):
        yield tmp_path
    sys.modules.pop("lottery", None)
    choice._of_file.cache_clear()


def test_every_metric_that_ships_has_a_file_and_says_what_it_needs():
    assert {path.stem for path in (conf_dir() / "metric").glob("*.yaml")} == set(choices())
    for name in choices():
        assert metric(name).name == name
        assert metric(name).needs is Needs.RECORDER or not metric(name).per_head or name == "r_kv"
    assert [name for name in choices() if metric(name).seeded] == ["leverage", "random", "random_head"]


def test_a_seeded_metric_of_ones_own_counts_as_seeded(own):
    """Two files make it known; without ``seeded`` the answers of one seed would be copied to the others."""
    config = compose_config("sweep", [*MIX, "allocation.metric=[lottery,key_norm,random]"])
    seeded = {setting.name: setting.seeded for setting in planned_settings(config)}
    assert {name for name, of in seeded.items() if of} == {
        "affine-L6/5@0.25:lottery",
        "affine-L6/5@0.25:random",
    }


def test_a_metric_of_ones_own_with_the_name_of_ours_is_refused(own, capsys):
    (own / "metric/key_norm.yaml").write_text("_target_: lottery.Lottery\n")
    assert main(["storage", "--conf", str(own), *MIX]) == 2
    err = capsys.readouterr().err
    assert "metric=key_norm is a choice of the package's own; rename it" in err
    assert len(err.strip().splitlines()) == 1


def test_a_class_that_takes_the_name_of_ours_takes_nothing(own):
    (own / "lottery.py").write_text(LOTTERY.replace('"lottery"', '"key_norm"'))
    with pytest.raises(UsageError, match=r"name the file key_norm\.yaml"):
        metric("lottery")
    assert type(metric("key_norm")).__module__.startswith("semkv_bench.")


def test_what_may_be_meant_is_said():
    with pytest.raises(UsageError, match=r"did you mean key_norm\?.*choose from attention_received"):
        metric("key_nrom")


def test_one_function_ranks_what_a_cache_holds():
    keys, values = torch.randn(2, 2, 5, 4), torch.randn(2, 2, 5, 4)
    found = cache_scores(metric("key_norm"), [0, 1], lambda at: (keys[at], values[at]), [], 5, seed=0)
    assert found.shape == (2, 5)
    torch.testing.assert_close(found[1], metric("key_norm").score(keys[1], values[1]))
    drawn = cache_scores(metric("random"), [0, 1], lambda at: 1 / 0, [7, *range(5)], 5, seed=3)
    assert drawn.shape == (1, 5)
    assert torch.equal(drawn[0], metric("random").score(torch.tensor([7, *range(5)]), 3)[-5:])
    with pytest.raises(ValueError, match="hidden states, which a cache does not have"):
        cache_scores(metric("hidden_norm"), [0], lambda at: (keys[0], values[0]), [], 5, seed=0)


def test_names_of_metrics_are_known_without_torch():
    code = "import sys; from semkv_bench.config.choices import names_of as names; "
    code += "print(names('metric'), 'torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "key_norm" in told and told.strip().endswith("False")
