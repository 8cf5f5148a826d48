import re

import pytest

from semkv_bench.config import compose_config
from semkv_bench.errors import UsageError
from semkv_bench.plan import make_plan
from semkv_bench.tasks import SyntheticMultiturn

LENGTH = 2000


@pytest.fixture(scope="module")
def drawn(chatml):
    return SyntheticMultiturn(length=LENGTH, turns=5).examples(chatml, [0, 3], per_task=4)


def _history(tokenizer, example):
    """What is fed and answered up to the last turn, with the reference answers."""
    text = tokenizer.decode(example.input_ids)
    for turn, later in enumerate(example.follow_ups):
        text += tokenizer.decode(example.at(turn).target_ids) + tokenizer.decode(later.input_ids)
    return text


def test_counts_ids_and_order(drawn):
    assert [e.example_id for e in drawn[::4]] == [
        f"multiturn_{filler}-s{seed}-0000" for filler in ("noise", "prose") for seed in (0, 3)
    ]
    assert len({e.input_ids for e in drawn}) == len(drawn) == 16
    assert {e.turns for e in drawn} == {5}


def test_first_prompt_is_filled_to_just_under_the_length(drawn):
    for example in drawn:
        assert LENGTH - 140 < len(example.input_ids) <= LENGTH


def test_conversation_is_the_templates_own_rendering(chatml, drawn):
    for example in drawn[::5]:
        text = _history(chatml, example)
        parts = re.findall(r"<\|im_start\|>(user|assistant)\n(.*?)(?:<\|im_end\|>|$)", text, flags=re.S)
        messages = [{"role": role, "content": content} for role, content in parts[:-1]]
        rendered = chatml.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert text == rendered + parts[-1][1]
        assert [role for role, _ in parts] == ["user", "assistant"] * 5


def test_every_needle_is_asked_for_once_and_then_the_first_again(chatml, drawn):
    for example in drawn:
        answers = [example.at(turn).answers[0] for turn in range(5)]
        assert answers[2] == answers[4] == answers[0]
        assert len(set(answers)) == 3
        haystack = chatml.decode(example.input_ids)
        for turn in (0, 1, 3):
            asked = chatml.decode(example.follow_ups[turn - 1].input_ids) if turn else haystack
            key = re.findall(r"What is the secret number of the (\w+ \w+) in the text above", asked)[-1]
            assert f"The secret number of the {key} is {answers[turn]}" in haystack
            assert asked.endswith(f"The secret number of the {key} is")
        for turn in (2, 4):
            asked = chatml.decode(example.follow_ups[turn - 1].input_ids)
            assert "first secret number" in asked and not re.search(r"\d", asked)


def test_depths_say_where_the_needle_asked_for_stands(chatml, drawn):
    for example in drawn:
        haystack = chatml.decode(example.input_ids).split("\n\n")[1]
        for turn in (0, 1, 3):
            (depth,) = example.at(turn).depths
            place = haystack.index(example.at(turn).answers[0]) / len(haystack)
            assert place == pytest.approx(depth, abs=0.12)
        assert example.at(2).depths == ()


def test_same_seed_and_index_same_conversation(chatml, drawn):
    again = SyntheticMultiturn(length=LENGTH, turns=5).examples(chatml, [3], per_task=2)
    assert again == [e for e in drawn if e.seed == 3 and int(e.example_id[-4:]) < 2]


def test_score_is_the_turns_own(drawn):
    task = SyntheticMultiturn()
    for example in drawn:
        for turn in range(5):
            asked = example.at(turn)
            assert task.score(asked, f" {asked.answers[0]}") == 1.0
            assert task.score(asked, asked.answers[0].replace(".", "0")) == 0.0
        assert task.score(example.at(1), example.answers[0]) == 0.0


def test_limits(chatml):
    (example,) = SyntheticMultiturn("multiturn_noise", LENGTH, 2).examples(chatml, [0], 1, 900, 3)
    assert len(example.input_ids) <= 900
    assert example.max_new_tokens == example.at(1).max_new_tokens == 3
    (own,) = SyntheticMultiturn("multiturn_noise", LENGTH, 2).examples(chatml, [0], 1)
    # A space, seven digits, a full stop, and eight to spare.
    assert own.max_new_tokens == own.at(1).max_new_tokens == 17


def test_one_turn_is_no_conversation(chatml):
    (example,) = SyntheticMultiturn("multiturn_prose", LENGTH, 1).examples(chatml, [0], 1)
    assert (example.turns, example.follow_ups) == (1, ())


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"turns": 0}, "task.turns=0 must be a whole number"),
        ({"turns": 1.5}, "task.turns=1.5"),
        ({"turns": 20}, "task.turns=20 asks for more needles than there are; at most 19"),
        ({"length": 0}, "task.length=0"),
        ({"subset": "niah"}, "choose from all, multiturn_noise, multiturn_prose"),
    ],
)
def test_bad_keys(keys, words):
    with pytest.raises(UsageError, match=words):
        SyntheticMultiturn(**keys)


def test_too_short_for_the_needles(chatml):
    with pytest.raises(UsageError, match="too short for multiturn_noise, which takes"):
        SyntheticMultiturn(length=300).examples(chatml, [0], 1)


def test_shipped_configuration_plans(local_folder):
    overrides = ["model=custom", f"model.path={local_folder}", "task=synthetic_multiturn", "per_task=2"]
    plan = make_plan(compose_config("sweep", [*overrides, "task.turns=3", "task.length=300"]))
    assert plan.task == SyntheticMultiturn(turns=3, length=300)
    assert {example.turns for example in plan.examples} == {3} and len(plan.examples) == 4
    assert plan.protocol["chance"] == {"multiturn_noise": 0.0, "multiturn_prose": 0.0}
    assert make_plan(compose_config("sweep", overrides)).task == SyntheticMultiturn()
