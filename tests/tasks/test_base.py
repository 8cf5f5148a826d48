import pytest

from semkv_bench.errors import UsageError
from semkv_bench.tasks.base import Example, FollowUp, check_draw, choose_names

NAMES = ("a", "b", "c", "d")
GROUPS = {"all": NAMES, "vowels": ("a",), "rest": ("b", "c", "d")}


@pytest.mark.parametrize(
    ("value", "chosen", "by_name"),
    [
        ("b", ("b",), ("b",)),
        ("all", NAMES, ()),
        (["d", "a"], ("a", "d"), ("a", "d")),
        (["vowels", "d"], ("a", "d"), ("d",)),
        (["rest", "b", "b"], ("b", "c", "d"), ("b",)),
    ],
)
def test_names_groups_and_mixtures(value, chosen, by_name):
    assert choose_names("subset", value, NAMES, GROUPS) == (chosen, by_name)


@pytest.mark.parametrize("value", ["e", ["a", "e"], [["a"]], [3]])
def test_unknown_names_list_the_choices(value):
    with pytest.raises(UsageError, match="choose from all, vowels, rest, a, b, c, d"):
        choose_names("subset", value, NAMES, GROUPS)


@pytest.mark.parametrize("value", [[], 5, {"a": 1}])
def test_values_that_are_no_names(value):
    with pytest.raises(UsageError, match="subset"):
        choose_names("subset", value, NAMES, GROUPS)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seeds": []}, "seeds="),
        ({"seeds": [0, -1]}, "0 and more"),
        ({"seeds": [0.5]}, "whole numbers"),
        ({"seeds": [True]}, "whole numbers"),
        ({"seeds": [1, 1]}, "twice"),
        ({"seeds": "012"}, "seeds=012"),
        ({"seeds": 3}, "seeds=3"),
        ({"per_task": 0}, "per_task=0"),
        ({"per_task": 2.5}, "per_task=2.5"),
        ({"max_prompt_tokens": -1}, "max_prompt_tokens=-1"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
    ],
)
def test_bad_draws(changes, words):
    good = {"seeds": [0, 1], "per_task": 3, "max_prompt_tokens": None, "max_new_tokens": 5}
    check_draw(**good)
    with pytest.raises(UsageError, match=words):
        check_draw(**{**good, **changes})


def test_a_later_turn_is_scored_with_its_own_references():
    follow_up = FollowUp(
        input_ids=(7, 8), answers=("two",), max_new_tokens=3, target_ids=(9,), min_new_tokens=1
    )
    example = Example("t", "e", 0, (1, 2), ("one",), 5, follow_ups=(follow_up,))
    later = example.at(1)
    assert example.turns == 2 and example.at(0) is example
    assert (later.turn, later.answers, later.max_new_tokens, later.target_ids) == (1, ("two",), 3, (9,))
    assert later.input_ids == (1, 2) and later.min_new_tokens == 1
