"""A user's own prompts, and the stock scorers."""

import json

import pytest

from semkv_bench.errors import MissingError, UsageError
from semkv_bench.tasks import Jsonl
from semkv_bench.tasks.scorers import SCORERS, chosen_first, last_number


def _file(tmp_path, *rows, name="own.jsonl"):
    path = tmp_path / name
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def test_examples_are_drawn_by_seed_and_a_larger_sample_holds_the_smaller(tmp_path, chatml):
    rows = [{"prompt": f"Say {i}.", "answers": [str(i)], "cluster": i // 2} for i in range(8)]
    task = Jsonl(_file(tmp_path, *rows))
    small, large = (task.examples(chatml, [3], per_task=n) for n in (2, 5))
    assert [e.example_id for e in small] == [e.example_id for e in large][:2]
    assert task.names == ("own",) and task.chance == {"own": 0.0}
    whole = task.examples(chatml, [0])
    assert [e.cluster for e in whole] == ["0", "0", "1", "1", "2", "2", "3", "3"]
    assert all(e.target_ids and e.max_new_tokens == len(e.target_ids) + 16 for e in whole)


def test_choices_have_a_chance_and_the_first_named_counts(tmp_path, chatml):
    path = _file(
        tmp_path, {"prompt": "A or B?", "answer": "B", "choices": ["A", "B"], "task": "mc", "chat": False}
    )
    task = Jsonl(path)
    (example,) = task.examples(chatml, [0], max_new_tokens=3)
    assert task.chance == {"mc": 0.5} and example.max_new_tokens == 3
    assert [task.score(example, text) for text in ("B, not A", "A. B", "neither", "")] == [1, 0, 0, 0]


@pytest.mark.parametrize(
    ("scorer", "prediction", "reference", "score"),
    [
        ("exact", " paris. ", "Paris", 1),
        ("exact", "Paris it is", "Paris", 0),
        ("contains", "it is PARIS!", "Paris", 1),
        ("contains", "Parisian", "Paris", 0),
        ("contains", "1234", "123", 0),
        ("f1", "the red house", "red house", 1),
        ("rouge_l", ".", "red", 0),
        ("numeric", "So 3 and then 7,738,705.", "7738705", 1),
        ("numeric", "７７３８７０５", "7738705", 1),
        ("numeric", "1 234", "1234", 1),
        ("numeric", "-0.5", "-1/2 is -0.5", 1),
        ("numeric", "none", "4", 0),
        ("regex", "id: ab12", r"id: [a-z]{2}\d+", 1),
    ],
)
def test_stock_scorers_by_hand(scorer, prediction, reference, score):
    assert SCORERS[scorer](prediction, reference, ()) == pytest.approx(score)


def test_parts_of_scorers():
    assert chosen_first("the red one, not red wine", ["red", "red one"]) == "red one"
    assert chosen_first("nothing", ["a"]) is None
    assert last_number("1,5") == 5 and last_number("12,345.5e1") == 123455


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{", "line 1: broken JSON"),
        ("[1]", "expected a JSON object"),
        ({"answers": ["a"]}, "prompt must be a text"),
        ({"prompt": "q"}, "answers must be a text or a list"),
        ({"prompt": "q", "answers": []}, "answers must be"),
        ({"prompt": "q", "answers": [" "]}, "holds an empty text"),
        ({"prompt": "q", "answers": "a", "chioces": []}, "unknown field chioces"),
        ({"prompt": "q", "answers": "c", "choices": ["a", "b"]}, "none of its choices"),
        ({"prompt": "q", "answers": "a", "max_new_tokens": 0}, "at least 1"),
        ({"prompt": "q", "answers": "a", "chat": "no"}, "true or false"),
    ],
)
def test_wrong_lines_are_named(tmp_path, row, words):
    with pytest.raises(UsageError, match=words):
        _ = Jsonl(_file(tmp_path, row)).items


def test_wrong_files_and_references_are_named(tmp_path):
    row = {"prompt": "q", "answers": "a", "id": 1}
    with pytest.raises(UsageError, match="has the id 1 of prompt 1"):
        _ = Jsonl(_file(tmp_path, row, row)).items
    with pytest.raises(UsageError, match="holds no prompt"):
        _ = Jsonl(_file(tmp_path, "")).items
    with pytest.raises(MissingError, match="cannot be read"):
        _ = Jsonl(str(tmp_path / "none")).items
    with pytest.raises(UsageError, match="holds no number"):
        _ = Jsonl(_file(tmp_path, row), scorer="numeric").items
    with pytest.raises(UsageError, match="no regular expression"):
        _ = Jsonl(_file(tmp_path, {"prompt": "q", "answers": "("}), scorer="regex").items
    with pytest.raises(UsageError, match=r"task\.scorer=magic is not known"):
        Jsonl("x", scorer="magic")
