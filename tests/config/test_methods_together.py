"""``methods=[...]``: several quantizers in one sweep, each said once and nowhere else."""

import pytest

from semkv_bench.config.compose import compose_config
from semkv_bench.errors import UsageError
from semkv_bench.plan.plan import make_plan
from semkv_bench.plan.settings import planned_settings


def test_every_method_has_the_grid_and_full_is_there_once():
    config = compose_config("sweep", ["methods=[turboquant,affine,kivi]", "grid.levels=[8,3]"])
    names = [setting.name for setting in planned_settings(config)]
    assert names == [
        "full",
        "turboquant-L8",
        "turboquant-L3",
        "affine-L8",
        "affine-L3",
        "kivi-L8",
        "kivi-L3",
    ]
    assert config.quantizer is None


def test_a_method_takes_the_points_that_its_codes_have_and_says_so(caplog):
    config = compose_config("sweep", ["methods=[affine,cq,vllm_int8_per_token_head]", "grid.levels=[16,4,3]"])
    names = [setting.name for setting in planned_settings(config)]
    assert names == [
        "full",
        "affine-L16",
        "affine-L4",
        "affine-L3",
        "cq-L4",
        "cq-L3",
        "vllm_int8_per_token_head",
    ]
    assert "of this grid cq leaves out cq-L16" in caplog.text
    # Where none is left, the first is refused as it is alone.
    config = compose_config("sweep", ["methods=[affine,cq]", "grid.levels=[16]"])
    cq = planned_settings(config)[-1]
    with pytest.raises(UsageError, match="have at most 4 levels, not 16"):
        cq.check(64, 3)


def test_options_are_those_of_one_method():
    given = ["methods=[affine,kivi]", "grid.levels=[4]", "method.kivi.values.keep.recent=64"]
    config = compose_config("sweep", [*given, "method.affine.group_size=32"])
    names = [setting.name for setting in planned_settings(config)]
    assert names == ["full", "affine[g32]-L4", "kivi[v.recent64]-L4"]


def test_mixes_are_made_of_every_method_and_deletion_once():
    mixed = compose_config(
        "sweep", ["methods=[affine,turboquant]", "grid.levels=[6,5]", "allocation=two_level"]
    )
    kinds = [setting.kind for setting in planned_settings(mixed)]
    assert kinds.count("mixed") == 2
    pruned = compose_config("sweep", ["methods=[affine,turboquant]", "grid.levels=[6]", "allocation=prune"])
    assert [setting.kind for setting in planned_settings(pruned)].count("prune") == 1


def test_the_charter_says_what_each_method_is():
    given = ["methods=[affine,kivi]", "grid.levels=[4]", "method.affine.group_size=32", "per_task=1"]
    charter = make_plan(compose_config("sweep", given)).charter
    assert charter["quantizer"] is None
    assert charter["methods"]["affine"]["group_size"] == 32
    described = charter["settings"]["affine[g32]-L4"]
    assert (described["family"], described["options"]) == ("affine", {"group_size": 32})
    assert charter["settings"]["kivi-L4"]["family"] == "kivi"


def test_one_quantizer_leaves_the_charter_as_it_was():
    charter = make_plan(
        compose_config("sweep", ["quantizer=affine", "grid.levels=[4]", "per_task=1"])
    ).charter
    assert "methods" not in charter and charter["quantizer"]["group_size"] is None


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize(
    ("command", "overrides", "told"),
    [
        ("sweep", ["methods=[affine,kiwi]"], "there is no quantizer 'kiwi' (did you mean kivi?)"),
        ("sweep", ["methods=[affine,affine]"], "methods names affine twice"),
        ("sweep", ["methods=affine"], "must be a list of quantizers, for example methods=["),
        ("sweep", ["methods=[]"], "must be a list of quantizers"),
        ("sweep", ["methods=[kivi]", "quantizer=affine"], "takes the place of quantizer; leave one out"),
        ("sweep", ["methods=[kivi]", "quantizer.group_size=32"], "takes the place of quantizer.group_size"),
        ("sweep", ["methods=[kivi]", "quantizer@value_quantizer=affine"], "takes the place of quantizer@"),
        ("sweep", ["methods=[kivi]", "method.affine.group_size=32"], "affine is not in methods=[kivi]"),
        ("sweep", ["method.affine.group_size=32"], "give methods=[...] too"),
        ("sweep", ["methods=[kivi]", "method.kivi.keys.keep.recnt=3"], "there is no key"),
        ("recipe", ["methods=[affine,kivi]"], "recipe follows one quantizer"),
        ("regress", ["methods=[affine,kivi]"], "regress follows one quantizer"),
    ],
)
def test_what_is_said_twice_or_not_at_all_is_refused(command, overrides, told):
    with pytest.raises(UsageError) as raised:
        compose_config(command, overrides)
    assert told in str(raised.value) and "\n" not in str(raised.value)


def test_an_engine_of_its_own_formats_takes_no_methods():
    with pytest.raises(UsageError, match="are simulated, and engine"):
        make_plan(compose_config("sweep", ["methods=[affine]", "engine=llamacpp"]))
