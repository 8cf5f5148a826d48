import re

import pytest

from semkv_bench.config.compose import compose_config
from semkv_bench.errors import UsageError
from semkv_bench.plan.plan import make_plan
from semkv_bench.tasks import SyntheticMultiturn

LENGTH = 2000


@pytest.fixture(scope="module")
def drawn(chatml):
    return SyntheticMultiturn(length=LENGTH, turns=6).examples(chatml, [0, 3], per_task=4)


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
    assert {e.turns for e in drawn} == {6}


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
        assert [role for role, _ in parts] == ["user", "assistant"] * 6


def _asked(tokenizer, example, turn):
    """The last question and the begun answer to it."""
    ids = example.follow_ups[turn - 1].input_ids if turn else example.input_ids
    question, begun = tokenizer.decode(ids).split("<|im_end|>\n<|im_start|>assistant\n")
    return re.split(r"\n", question)[-1], begun


def test_read_name_read_name_recall_recall(chatml, drawn):
    for example in drawn:
        haystack = chatml.decode(example.input_ids)
        answers = [example.at(turn).answers[0] for turn in range(6)]
        assert answers[0] == answers[1] != answers[2] == answers[3]
        told = {}
        for turn in (0, 2):
            question, begun = _asked(chatml, example, turn)
            (key,) = re.fullmatch(
                r"What is the secret number of the (\w+ \w+) in the text above\?", question
            ).groups()
            assert begun == f"The secret number of the {key} is"
            assert haystack.count(f"The secret number of the {key} is {answers[turn]}") == 1
            question, begun = _asked(chatml, example, turn + 1)
            (name,) = re.fullmatch(r"That is (\w+)'s number[.] What is \1's number\?", question).groups()
            assert begun == f"{name}'s number is" and name not in haystack
            told[name] = answers[turn]
        recalled = [_asked(chatml, example, turn) for turn in (4, 5)]
        assert recalled == [(f"What is {name}'s number?", f"{name}'s number is") for name in told]
        assert answers[4:] == list(told.values())


def test_a_later_round_recalls_names_of_earlier_ones(chatml):
    examples = SyntheticMultiturn("multiturn_noise", LENGTH, 12).examples(chatml, [1], 4)
    first_round = 0
    for example in examples:
        names = [_asked(chatml, example, turn)[0].split("'")[0].split()[-1] for turn in (1, 3, 7, 9, 10, 11)]
        assert len(set(names[:4])) == 4 and set(names[4:]) < set(names[:4]) and names[4] != names[5]
        first_round += sum(name in names[:2] for name in names[4:])
    assert 0 < first_round < 8


def test_depths_say_where_the_needle_asked_for_stands(chatml, drawn):
    for example in drawn:
        haystack = chatml.decode(example.input_ids).split("\n\n")[1]
        for turn in (0, 2):
            (depth,) = example.at(turn).depths
            place = haystack.index(example.at(turn).answers[0]) / len(haystack)
            assert place == pytest.approx(depth, abs=0.12)
        assert example.at(1).depths == example.at(4).depths == ()


def test_same_seed_and_index_same_conversation(chatml, drawn):
    again = SyntheticMultiturn(length=LENGTH, turns=6).examples(chatml, [3], per_task=2)
    assert again == [e for e in drawn if e.seed == 3 and int(e.example_id[-4:]) < 2]


def test_score_is_the_turns_own(drawn):
    task = SyntheticMultiturn()
    for example in drawn:
        for turn in range(6):
            asked = example.at(turn)
            assert task.score(asked, f" {asked.answers[0]}") == 1.0
            assert task.score(asked, asked.answers[0].replace(".", "0")) == 0.0
        assert task.score(example.at(2), example.answers[0]) == 0.0


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
        ({"turns": 31}, "task.turns=31 asks for more needles than there are; at most 30"),
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
    overrides = [
        "model=custom",
        f"model.path={local_folder}",
        "task=synthetic_multiturn",
        "protocol=multiturn",
        "per_task=2",
    ]
    plan = make_plan(compose_config("sweep", [*overrides, "task.turns=3", "task.length=300"]))
    assert plan.task == SyntheticMultiturn(turns=3, length=300)
    assert {example.turns for example in plan.examples} == {3} and len(plan.examples) == 4
    assert plan.charter["chance"] == {"multiturn_noise": 0.0, "multiturn_prose": 0.0}
    assert make_plan(compose_config("sweep", overrides)).task == SyntheticMultiturn()
