import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semkv_bench.config.compose import compose_config
from semkv_bench.errors import UsageError
from semkv_bench.plan.plan import make_plan
from semkv_bench.tasks import Longform
from semkv_bench.tasks.base import Example
from semkv_bench.tasks.longform import SUBTASKS, overlap_in_order
from semkv_bench.tasks.words import WORDS

ITEMS = 12


@pytest.fixture(scope="module")
def drawn(chatml):
    return Longform(items=ITEMS).examples(chatml, [0, 3], per_task=4)


def _request(tokenizer, example):
    return re.search(r"user\n(.*)<\|im_end\|>", tokenizer.decode(example.input_ids), flags=re.S).group(1)


def _begun(tokenizer, example):
    return tokenizer.decode(example.input_ids).rpartition("assistant\n")[2]


def test_words_are_many_different_and_plain():
    assert len(WORDS) == len(set(WORDS)) >= 300
    assert all(re.fullmatch("[a-z]+", word) for word in WORDS)


def test_counts_ids_and_order(drawn):
    assert len(drawn) == len(SUBTASKS) * 2 * 4
    assert [e.example_id for e in drawn[::4]] == [f"{n}-s{s}-0000" for n in SUBTASKS for s in (0, 3)]
    assert len({e.input_ids for e in drawn}) == len({e.answers for e in drawn}) == len(drawn)
    assert all(e.turns == 1 and e.depths == () and not e.truncated for e in drawn)


STEPS = {"longform_count": {1}, "longform_countdown": {-1}, "longform_steps": {2, 5, 10}}


@pytest.mark.parametrize("name", STEPS)
def test_counting_goes_on_from_the_begun_answer_to_the_number_asked_for(chatml, drawn, name):
    found = set()
    for example in (e for e in drawn if e.task == name):
        request = _request(chatml, example)
        first, last, *by = map(int, re.findall(r"\d+", request))
        step = (by or [1])[0] * (-1 if "Count down" in request else 1)
        begun = [int(n) for n in re.findall(r"\d+", _begun(chatml, example))]
        rest = [int(n) for n in re.findall(r"\d+", example.answers[0])]
        assert begun + rest == list(range(first, last + step, step))
        assert (len(begun), len(rest)) == (12, ITEMS) and min(rest) >= 100
        assert first % step == 0
        found.add(step)
    assert found == STEPS[name]


def test_list_is_to_be_copied_whole(chatml, drawn):
    for example in (e for e in drawn if e.task == "longform_list"):
        begun = _begun(chatml, example)
        copied = begun.rpartition("\n")[2] + " " + example.answers[0]
        assert copied in _request(chatml, example)
        words = re.findall("[a-z]+", example.answers[0])
        assert len(words) == len(set(words)) == ITEMS and set(words) <= set(WORDS)


def test_reference_scores_one_and_target_spells_it(chatml, drawn):
    task = Longform(items=ITEMS)
    for example in drawn:
        assert task.score(example, example.answers[0]) == 1.0
        assert chatml.decode(example.target_ids).strip() == example.answers[0]
        assert task.score(example, "") == task.score(example, ".") == 0.0


def test_answer_has_room_to_go_wrong(drawn):
    for example in drawn:
        n = len(example.target_ids)
        assert n + 8 <= example.max_new_tokens <= 1.2 * n + 8
        assert example.min_new_tokens == 0


def test_same_seed_and_index_same_example(chatml, drawn):
    again = Longform(items=ITEMS).examples(chatml, [3], per_task=2)
    assert again == [e for e in drawn if e.seed == 3 and int(e.example_id[-4:]) < 2]


@pytest.mark.parametrize(
    ("reference", "prediction", "score"),
    [
        ("abcd", "abcd", 1.0),
        ("abcd", "", 0.0),
        ("", "", 0.0),
        ("abcd", "abc", 6 / 7),
        ("abcd", "acd", 6 / 7),
        ("abcd", "xabcd", 8 / 9),
        ("abcd", "abcdxxxx", 8 / 12),
        ("abcd", "dcba", 2 / 8),
        ("abcd", "abab", 4 / 8),
        ("abcd", "xxxx", 0.0),
    ],
)
def test_overlap_in_order(reference, prediction, score):
    assert overlap_in_order(reference, prediction) == pytest.approx(score)


@given(st.lists(st.integers(0, 5), max_size=12), st.lists(st.integers(0, 5), max_size=12))
def test_overlap_is_symmetric_bounded_and_falls_with_rubbish(a, b):
    score = overlap_in_order(a, b)
    assert score == overlap_in_order(b, a)
    assert 0 <= score <= 1 and (score == 1) == (a == b != [])
    assert score == 0 or overlap_in_order(a, [*b, "rubbish"]) < score


def _score(task, answer, prediction):
    return Longform().score(Example(task, "x", 0, (1,), (answer,), 9), prediction)


def test_items_are_found_among_other_marks():
    assert _score("longform_count", "104, 105, 106.", " 104 105\n106 and so on") == 1.0
    assert _score("longform_count", "104, 105, 106.", " 104, 1055, 106") == pytest.approx(4 / 6)
    assert _score("longform_list", "oak\n2. Pond\n3. tiger", " oak, pond,\n\n3) Tiger") == 1.0
    assert _score("longform_list", "oak\n2. pond", "oak\n2. pond\n3. pond\n4. pond") == pytest.approx(4 / 6)


def test_chance_is_what_another_answer_scores(chatml):
    task = Longform(items=30)
    for name in task.names:
        assert 0 <= task.chance[name] < 0.12
    others = Longform("longform_list").examples(chatml, [0], 20)
    mean = sum(task.score(a, b.answers[0]) for a, b in pairwise(others)) / 19
    assert task.chance["longform_list"] == pytest.approx(mean, abs=0.04)


def test_limits(chatml):
    task = Longform("longform_list", items=ITEMS)
    assert task.examples(chatml, [0], 1, max_new_tokens=3)[0].max_new_tokens == 3
    with pytest.raises(
        UsageError, match=r"longform_list with task.items=12 takes prompts of .*lower task.items"
    ):
        task.examples(chatml, [0], 1, max_prompt_tokens=100)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"items": 1}, "task.items=1 must be a whole number from 2 to"),
        ({"items": 10_000}, "task.items=10000"),
        ({"items": None}, "task.items=None"),
        ({"subset": "count"}, "choose from all, longform_count"),
    ],
)
def test_bad_keys(keys, words):
    with pytest.raises(UsageError, match=words):
        Longform(**keys)


def test_shipped_configuration_plans(local_folder):
    overrides = ["model=custom", f"model.path={local_folder}", "task=longform", "per_task=2"]
    plan = make_plan(compose_config("sweep", [*overrides, "task.items=5", "subset=[longform_count]"]))
    assert plan.task == Longform(["longform_count"], 5) and len(plan.examples) == 2
    assert set(plan.charter["chance"]) == {"longform_count"}
    default = make_plan(compose_config("sweep", overrides))
    assert default.task == Longform()
    assert all(120 <= len(example.target_ids) <= 250 for example in default.examples)
