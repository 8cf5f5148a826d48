import itertools
import re

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from semkv_bench.errors import UsageError
from semkv_bench.tasks import Synthetic
from semkv_bench.tasks.haystack import insert_at
from semkv_bench.tasks.synthetic import DEFAULT_SUBTASKS, SUBTASKS

LENGTH = 2500
ALL = tuple(SUBTASKS)
MULTI = {"niah_multivalue": 3, "variable_tracking": 3}


@pytest.fixture(scope="module")
def drawn(chatml):
    return Synthetic(subset="all", length=LENGTH).examples(chatml, [0, 3], per_task=8)


def _text(tokenizer, example):
    return tokenizer.decode(example.input_ids)


def _haystack(tokenizer, example):
    """Between the introduction and the question."""
    return _text(tokenizer, example).split("\n\n")[1]


@pytest.mark.slow
def test_counts_ids_and_order(drawn):
    assert len(drawn) == len(ALL) * 2 * 8
    assert len({(e.task, e.example_id) for e in drawn}) == len(drawn)
    assert drawn[0].example_id == "niah_noise-s0-0000"
    assert drawn[15].example_id == "niah_noise-s3-0007"
    assert drawn[15].seed == 3


def test_no_two_examples_coincide(drawn):
    assert len({e.input_ids for e in drawn}) == len(drawn)
    assert len({e.cluster for e in drawn}) == len(drawn) and all(e.cluster for e in drawn)
    single = [e.answers for e in drawn]
    assert len(set(single)) == len(single)


def test_prompt_is_filled_to_just_under_the_length(chatml, drawn):
    longest_sentence = 140
    for example in drawn:
        assert LENGTH - longest_sentence < len(example.input_ids) <= LENGTH
        assert not example.truncated
        assert re.search(r"[.]\n\n", _text(chatml, example))


def test_every_value_stands_once_and_filler_holds_no_digit(chatml, drawn):
    for example in drawn:
        haystack = _haystack(chatml, example)
        wanted = example.answers[0].split(", ")
        assert len(set(wanted)) == len(wanted) == MULTI.get(example.task, 1)
        if example.task != "variable_tracking":
            for value in wanted:
                assert re.fullmatch(r"[1-9]\d{6}", value)
                assert re.findall(r"\d+", haystack).count(value) == 1
        bare = re.sub(r"(The secret number of|One of the secret numbers of|Variable)[^.]*[.]", "", haystack)
        assert not re.search(r"\d", bare)
        assert "secret" not in bare and "ariable" not in bare
        assert len(bare) > LENGTH / 3


def test_question_and_begun_answer_repeat_the_needle(chatml, drawn):
    for example in drawn:
        if example.task.startswith("niah_") and example.task != "niah_multivalue":
            key = re.search(
                rf"The secret number of the ([a-z ]+) is {example.answers[0]}[.]", _text(chatml, example)
            )
            end = f"\nThe secret number of the {key.group(1)} is"
            assert _text(chatml, example).endswith(end)
            assert _text(chatml, example).count(f"secret number of the {key.group(1)} ") == 3
            assert chatml.decode(example.target_ids) == " " + example.answers[0]


def test_multikey_has_four_keys_with_different_values(chatml, drawn):
    for example in (e for e in drawn if e.task == "niah_multikey"):
        pairs = re.findall(r"The secret number of the ([a-z ]+) is (\d{7})[.]", _haystack(chatml, example))
        assert len(dict(pairs)) == len({value for _, value in pairs}) == 4


def test_multivalue_answer_is_in_reading_order(chatml, drawn):
    for example in (e for e in drawn if e.task == "niah_multivalue"):
        assert re.findall(r"\d{7}", _haystack(chatml, example)) == example.answers[0].split(", ")


def test_variables_follow_from_the_value_asked(chatml, drawn):
    for example in (e for e in drawn if e.task == "variable_tracking"):
        haystack = _haystack(chatml, example)
        links = re.findall(r"Variable ([A-Z]{5}) equals (?:variable )?(\w+)[.]", haystack)
        assert len(links) == 6
        value = re.search(r"variables equal (\d{5})", _text(chatml, example)).group(1)
        reached, last = [], value
        while following := [name for name, source in links if source == last]:
            (last,) = following
            reached.append(last)
        assert ", ".join(reached) == example.answers[0]
        places = [haystack.index(f"Variable {name} ") for name in reached]
        assert places == sorted(places)


def test_depths_are_true_and_cover_the_haystack(chatml):
    examples = Synthetic(subset="niah_prose", length=LENGTH).examples(chatml, [1], per_task=16)
    for example in examples:
        haystack = _haystack(chatml, example)
        where = haystack.index("The secret number")
        rest = len(haystack) - len(re.search(r"The secret number[^.]*[.]", haystack).group())
        assert example.depths == pytest.approx((where / rest,), abs=0.06)
    quarters = [int(4 * e.depths[0]) for e in examples]
    assert all(3 <= quarters.count(quarter) <= 5 for quarter in range(4))


def test_same_seed_and_index_same_example(chatml, drawn):
    again = Synthetic(subset="all", length=LENGTH).examples(chatml, [3], per_task=2)
    assert again == [e for e in drawn if e.seed == 3 and int(e.example_id[-4:]) < 2]


def test_known_example_does_not_drift(chatml):
    # Recorded when written: a changed draw would silently change every committed baseline.
    (example,) = Synthetic(subset="niah_noise", length=LENGTH).examples(chatml, [0], per_task=1)
    assert example.answers == ("3076782",)
    assert "The secret number of the violet dragon is 3076782." in _text(chatml, example)


def test_default_is_the_two_that_a_small_model_solves(chatml):
    task = Synthetic(length=LENGTH)
    assert task.names == DEFAULT_SUBTASKS == ("niah_noise", "niah_prose")
    assert len(task.examples(chatml, [0])) == 40
    assert task.chance == {"niah_noise": 0.0, "niah_prose": 0.0}
    assert task.prompt_source == "generated"


def test_limits(chatml):
    task = Synthetic(subset="niah_noise", length=LENGTH)
    (short,) = task.examples(chatml, [0], 1, max_prompt_tokens=900, max_new_tokens=3)
    assert len(short.input_ids) <= 900 and not short.truncated
    assert short.answers[0] in _text(chatml, short)
    assert short.max_new_tokens == 3
    (own,) = task.examples(chatml, [0], 1)
    # A space, seven digits, and eight to spare.
    assert own.max_new_tokens == 16


@pytest.mark.parametrize(
    ("answer", "prediction", "score"),
    [
        ("1234567", " 1234567.", 1.0),
        ("1234567", "1234567", 1.0),
        ("1234567", "答案是1234567。", 1.0),
        ("1234567", " 11234567", 0.0),
        ("1234567", " 12345678", 0.0),
        ("1234567", " 123456", 0.0),
        ("1234567", "", 0.0),
        # Set apart as one country or another does it, in another width or script: the same number.
        ("7738705", "7,738,705", 1.0),
        ("7738705", "It is 7 738 705.", 1.0),
        ("7738705", "7.738.705", 1.0),
        ("7738705", "7'738'705", 1.0),
        ("7738705", "7\u2019738\u2019705", 1.0),
        ("7738705", "7\u202f738\u202f705 or so", 1.0),
        ("7738705", "77,38,705", 1.0),
        ("7738705", "7_738_705", 1.0),
        ("7738705", "\uff17\uff17\uff13\uff18\uff17\uff10\uff15", 1.0),
        ("7738705", "\uff17\uff0c\uff17\uff13\uff18\uff0c\uff17\uff10\uff15", 1.0),
        ("7738705", "\u0667\u0667\u0663\u0668\u0667\u0660\u0665", 1.0),
        ("7738705", "7,738,706", 0.0),
        ("7738705", "17,738,705", 0.0),
        ("7738705", "7,738,7051", 0.0),
        ("7738705", "7, 738, 705", 0.0),
        ("7738705", "7738 705 1", 0.0),
        ("1234567", "7654321 or 1234567", 1.0),
        ("1111111, 2222222, 3333333", " 2222222, 1111111 and 4444444", 2 / 3),
        ("1111111, 2222222, 3333333", "1111111 1111111 1111111", 1 / 3),
        ("ABCDE, FGHIJ", "ABCDE, variable FGHIJ", 1.0),
        ("ABCDE, FGHIJ", "ABCDEFGHIJ", 0.0),
        ("ABCDE, FGHIJ", "abcde FGHIJ", 0.5),
    ],
)
def test_score(drawn, answer, prediction, score):
    example = type(drawn[0])("niah_noise", "x", 0, (1,), (answer,), 16)
    assert Synthetic().score(example, prediction) == pytest.approx(score)


def test_reference_scores_one(drawn):
    task = Synthetic()
    assert {task.score(e, f" {e.answers[0]}.") for e in drawn} == {1.0}
    assert {task.score(a, b.answers[0]) for a, b in itertools.pairwise(drawn)} == {0.0}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"subset": "niah"}, "choose from all, niah_noise"),
        ({"subset": []}, "empty"),
        ({"length": 0}, "task.length=0"),
        ({"length": "long"}, "task.length=long"),
    ],
)
def test_bad_keys(keys, words):
    with pytest.raises(UsageError, match=words):
        Synthetic(**keys)


def test_too_short_for_the_needles(chatml):
    with pytest.raises(UsageError, match="too short for niah_multikey, which takes"):
        Synthetic(subset="niah_multikey", length=300).examples(chatml, [0], 1)


def test_insert_at():
    filler = ["a", "b", "c", "d"]
    assert insert_at(filler, ["X"], [0.0]) == ["X", "a", "b", "c", "d"]
    assert insert_at(filler, ["X"], [1.0]) == ["a", "b", "c", "d", "X"]
    assert insert_at(filler, ["X", "Y"], [0.5, 0.52]) == ["a", "b", "X", "Y", "c", "d"]
    assert insert_at([], ["X", "Y"], [0.1, 0.9]) == ["X", "Y"]


def test_shipped_configuration(pytestconfig):
    config = OmegaConf.load(pytestconfig.rootpath / "conf/task/synthetic.yaml")
    root = OmegaConf.create({"subset": ["niah_prose", "niah_noise"], "task": config})
    assert instantiate(root.task).names == ("niah_noise", "niah_prose")
    root.subset = None
    assert instantiate(root.task) == Synthetic()


def test_several_lengths_are_examples_of_their_own(chatml):
    both = Synthetic(subset="niah_noise", length=[500, 800]).examples(chatml, [0], 2)
    assert [example.length for example in both] == [500, 500, 800, 800]
    assert all(example.length - 60 < len(example.input_ids) <= example.length for example in both)
    assert len({example.example_id for example in both}) == len({example.cluster for example in both}) == 4
    assert len({example.answers for example in both}) == 4
    alone = Synthetic(subset="niah_noise", length=800).examples(chatml, [0], 2)
    assert [example.length for example in alone] == [None, None]
    assert Synthetic(subset="niah_noise", length=[800]).examples(chatml, [0], 2) == alone


@pytest.mark.parametrize("length", [[], [800, 800], [0, 800], ["800"], 1.5, True])
def test_lengths_that_are_none_are_refused(length):
    with pytest.raises(UsageError, match=r"task\.length="):
        Synthetic(length=length)


def test_a_cap_must_not_make_two_lengths_one(chatml):
    with pytest.raises(UsageError, match="max_prompt_tokens=450"):
        Synthetic(length=[800, 600]).examples(chatml, [0], 1, max_prompt_tokens=450)
    drawn = Synthetic("niah_noise", length=[500, 900]).examples(chatml, [0], 1, max_prompt_tokens=700)
    assert [e.length for e in drawn] == [500, 700] and all(len(e.input_ids) <= e.length for e in drawn)


def test_several_questions_of_a_haystack_begin_alike_and_are_one_cluster(chatml):
    task = Synthetic(subset=["niah_noise", "niah_multikey"], length=LENGTH, questions=4)
    drawn = task.examples(chatml, [0, 3], per_task=10)
    assert len(drawn) == 2 * 2 * 10 and len({(e.task, e.example_id) for e in drawn}) == len(drawn)
    assert [e.example_id for e in drawn[3:5]] == ["niah_noise-s0-0000-q3", "niah_noise-s0-0001-q0"]
    clusters = list(dict.fromkeys((e.task, e.cluster) for e in drawn))
    assert len(clusters) == 2 * 2 * 3  # four, four and two of ten
    for task_name, cluster in clusters:
        group = [e for e in drawn if (e.task, e.cluster) == (task_name, cluster)]
        assert len({e.answers for e in group}) == len({e.question for e in group}) == len(group)
        texts = [_haystack(chatml, e) for e in group]
        assert len(set(texts)) == 1
        assert all(f" is {e.answers[0]}." in texts[0] for e in group)
        assert all(LENGTH - 150 < len(e.input_ids) <= LENGTH for e in group)
        alike = zip(*(e.input_ids for e in group), strict=False)
        first = next(i for i, ids in enumerate(alike) if len(set(ids)) > 1)
        assert first > LENGTH - 300  # the question stands at the end


def test_one_question_is_what_it_was_without_the_option(chatml):
    one, plain = (Synthetic(subset="all", length=LENGTH, **more) for more in ({"questions": 1}, {}))
    assert one.examples(chatml, [0], 2) == plain.examples(chatml, [0], 2)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"questions": 0}, "task.questions=0 must be a whole number from 1 to 10"),
        ({"questions": 11}, "from 1 to 10"),
        ({"questions": 2, "subset": "all"}, "niah_multivalue has one question a haystack"),
    ],
)
def test_questions_that_cannot_be_asked(given, told):
    with pytest.raises(UsageError, match=told):
        Synthetic(**given)
