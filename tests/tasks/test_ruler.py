"""RULER's thirteen tasks: what is hidden can be found by reading, fills the length, and is scored as RULER does."""

import json
import re
from collections import Counter

import pytest

from semkv_bench.errors import MissingError, UsageError
from semkv_bench.models.embedded import EmbeddedModel
from semkv_bench.tasks.ruler import GENERATED, RULER_TASKS, Ruler

LENGTH = 700
# Of tasks that a short prompt has no room for.
LONGER = {"cwe": 2600}


@pytest.fixture(scope="module")
def tokenizer():
    return EmbeddedModel().tokenizer()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("questions")
    paragraphs = [
        {
            "context": f"The town of Aru{i} lies on the river Bel{i}. " + "It is old. " * 30,
            "qas": [
                {
                    "question": f"On which river lies Aru{i}?",
                    "answers": [{"text": f"Bel{i}"}, {"text": f"the Bel{i}"}],
                },
                {"question": f"Who founded Aru{i}?", "answers": []},
                {"question": f"Which town lies on the Bel{i}?", "answers": [{"text": f"Aru{i}"}]},
            ],
        }
        for i in range(12)
    ]
    (folder / "squad.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    hotpot = [
        {
            "question": f"Where was the writer of Tale{i} born?",
            "answer": f"City{i}",
            "context": [
                [f"Tale{i}", [f"Tale{i} is by Writer{i}."]],
                [f"Writer{i}", [f"Writer{i} was born in City{i}."]],
            ],
        }
        for i in range(20)
    ]
    (folder / "hotpot.json").write_text(json.dumps(hotpot))
    return {"squad": str(folder / "squad.json"), "hotpotqa": str(folder / "hotpot.json")}


def _examples(tokenizer, name, files=None, n=2, **options):
    task = Ruler(subset=name, length=LONGER.get(name, LENGTH), **(files or {}), **options)
    return task, task.examples(tokenizer, [0], n)


@pytest.mark.parametrize("name", RULER_TASKS)
def test_prompts_fill_their_length_and_hold_their_answers(tokenizer, files, name):
    task, examples = _examples(tokenizer, name, files)
    for example in examples:
        text = tokenizer.decode(example.input_ids)
        whole = LONGER.get(name, LENGTH)
        # Questions end where the documents do.
        assert len(example.input_ids) <= whole
        assert len(example.input_ids) > whole - 160 or name.startswith("qa_")
        assert task.score(example, text) == 1.0
        assert task.score(example, "") == 0.0
        assert example.target_ids and example.question in text


@pytest.mark.parametrize("name", RULER_TASKS)
def test_the_same_seed_and_index_are_the_same_example(tokenizer, files, name):
    _, first = _examples(tokenizer, name, files, n=1)
    _, again = _examples(tokenizer, name, files, n=2)
    assert first[0] == again[0] and first[0].input_ids != again[1].input_ids


@pytest.mark.parametrize(
    ("name", "keys", "values"),
    [
        ("niah_multikey_1", 4, 1),
        ("niah_multivalue", 1, 4),
        ("niah_multiquery", 4, 1),
        ("niah_single_3", 1, 1),
    ],
)
def test_numbers_of_needles_are_rulers(tokenizer, name, keys, values):
    _, (example, *_) = _examples(tokenizer, name)
    needles = re.findall(r"One of the special \w+s of (\S+) is (\S+)\.", tokenizer.decode(example.input_ids))
    by_key = Counter(key for key, _ in needles)
    assert len(by_key) == keys and set(by_key.values()) == {values}
    assert len(example.depths) == len(example.answers[0].split(", "))


@pytest.mark.parametrize("name", ["niah_multikey_2", "niah_multikey_3"])
def test_a_haystack_of_needles_is_nothing_else(tokenizer, name):
    _, (example, *_) = _examples(tokenizer, name)
    needles = re.findall(r"One of the special \w+s of (\S+) is (\S+)\.", tokenizer.decode(example.input_ids))
    assert len(needles) > 6 and len({key for key, _ in needles}) == len(needles)
    assert example.answers[0] in dict(needles).values()


def test_the_chain_leads_to_the_value(tokenizer):
    _, (example, *_) = _examples(tokenizer, "vt")
    assigned = dict(re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", tokenizer.decode(example.input_ids)))
    value = re.search(r"hold the value (\d+)", example.question)[1]

    def ends(name):
        return ends(assigned[name]) if name in assigned else name

    assert {name for name in assigned if ends(name) == value} == set(example.answers[0].split(", "))
    assert len(assigned) == 5


def test_common_words_are_the_most_common(tokenizer):
    _, (example, *_) = _examples(tokenizer, "cwe")
    counts = Counter(re.findall(r"\d+\. ([a-z]+)", tokenizer.decode(example.input_ids)))
    assert {word for word, _ in counts.most_common(10)} == set(example.answers[0].split(", "))
    assert sorted(counts.values())[-10:] == [30] * 10 and set(sorted(counts.values())[:-10]) == {3}


def test_frequent_words_follow_the_dots(tokenizer):
    _, (example, *_) = _examples(tokenizer, "fwe")
    text = tokenizer.decode(example.input_ids).split("no word.")[1].split("What are")[0]
    counts = Counter(text.split())
    (dots, most), *ranked = counts.most_common(5)
    assert dots == "..." and [word for word, _ in ranked[:3]] == example.answers[0].split(", ")
    assert most > ranked[0][1] and ranked[2][1] > ranked[3][1]


def test_questions_over_one_paragraph_are_one_cluster(tokenizer, files):
    _, examples = _examples(tokenizer, "qa_1", files, n=30)
    by_paragraph = {re.search(r"(?:Aru|Bel)(\d+)", example.question)[1]: set() for example in examples}
    for example in examples:
        by_paragraph[re.search(r"(?:Aru|Bel)(\d+)", example.question)[1]].add(example.cluster)
    assert all(len(clusters) == 1 for clusters in by_paragraph.values())
    assert len({example.cluster for example in examples}) == len(by_paragraph)


def test_scores_are_rulers(tokenizer, files):
    task, (example, *_) = _examples(tokenizer, "niah_multivalue")
    first, second, *_ = example.answers[0].split(", ")
    assert task.score(example, f"They are {first} and {second}.") == 0.5
    task, (example, *_) = _examples(tokenizer, "qa_1", files)
    assert task.score(example, example.answers[-1].upper()) == 1.0


def test_the_default_needs_no_data(tokenizer):
    assert Ruler().names == GENERATED and len(RULER_TASKS) == 13 and Ruler(subset="all").names == RULER_TASKS


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"subset": "niah_single_9"}, UsageError, "niah_single_9"),
        ({"length": 0}, UsageError, "task.length"),
        ({"subset": "cwe", "length": 500}, UsageError, "too short for cwe"),
        ({"subset": "qa_1", "squad": "nope.json"}, MissingError, "task.squad=nope.json"),
    ],
)
def test_bad_input_is_one_line(tokenizer, options, kind, said):
    with pytest.raises(kind, match=said) as raised:
        Ruler(**options).examples(tokenizer, [0], 1)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "content", ["[]", "{}", '{"data": [{"paragraphs": [{"qas": 1}]}]}', "not json", '{"data": []}']
)
@pytest.mark.parametrize("kind", ["squad", "hotpotqa"])
def test_a_file_of_another_form_is_refused(tokenizer, tmp_path, kind, content):
    path = tmp_path / "file.json"
    path.write_text(content)
    task = Ruler(subset="qa_1" if kind == "squad" else "qa_2", **{kind: str(path)})
    with pytest.raises(UsageError, match=f"task.{kind}"):
        task.examples(tokenizer, [0], 1)
