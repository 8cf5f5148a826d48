"""Prompts as people mistype them: what changes, what never does, and what a task makes of it."""

import json
import re
from dataclasses import replace

import pytest

from semkv_bench.errors import UsageError
from semkv_bench.tasks import Example, Jsonl, Ruler, Synthetic
from semkv_bench.tasks.perturb import KINDS, check_changed, perturbed

TEXT = (
    "The grass is green, the sky is blue. The sun is yellow; here we go! There and back again, with everyone.\n\n"
    "A secret number of the lantern is 7738705, at 3.14 or x_1 and user@example.org. What is the secret number? "
) * 8


def _words(text):
    return re.findall(r"\S+", text)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_key_gives_the_same_text_and_another_key_another(kind):
    one = perturbed(TEXT, kind, "a/1")
    assert one == perturbed(TEXT, kind, "a/1") != TEXT
    assert len({one, perturbed(TEXT, kind, "a/2"), perturbed(TEXT, kind, "b/1")}) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_names_and_references_stay_as_they_are(kind):
    changed = perturbed(TEXT, kind, "k", ["Secret Number", "sky"])
    for kept in ("7738705", "3.14", "x_1", "user@example.org", "secret number", " sky "):
        assert changed.count(kept) == TEXT.count(kept), kept
    assert changed.count("\n\n") == TEXT.count("\n\n")


def test_each_kind_changes_what_it_says():
    typo, case, marks = (perturbed(TEXT, kind, "k") for kind in ("typo", "case", "punctuation"))
    assert case.lower() == TEXT.lower() and len(_words(case)) == len(_words(TEXT))
    changed = sum(a != b for a, b in zip(_words(case), _words(TEXT), strict=True))
    assert 0.1 < changed / len(_words(TEXT)) < 0.3
    slips = [(a, b) for a, b in zip(_words(TEXT), _words(typo), strict=True) if a != b]
    assert 3 <= len(slips) <= 0.15 * len(_words(TEXT))
    assert all(
        a[0] == b[0] and abs(len(a) - len(b)) <= 1 and len(re.sub(r"\W", "", a)) >= 4 for a, b in slips
    )
    letters = re.compile(r"[^\w\s@.]|(?<=\w)\.(?=\s)")
    assert letters.sub("", re.sub(r"(?<=[a-z])[.,!?;]+(?=\s)", "", marks)) == letters.sub(
        "", re.sub(r"(?<=[a-z])[.,!?;]+(?=\s)", "", TEXT)
    )


def test_a_short_text_changes_at_least_once_and_one_without_words_never():
    assert perturbed("Hello there", "typo", "k") != "Hello there"
    assert perturbed("12 34", "typo", "k") == "12 34"
    assert perturbed("一二三四 五六", "case", "k") == "一二三四 五六"


@pytest.mark.parametrize(
    "task",
    [
        Synthetic(subset="all", length=900, perturb="all"),
        Ruler(subset=["niah_single_1", "vt"], length=3000, perturb=["typo", "case"]),
    ],
)
def test_every_prompt_has_its_variants_in_its_own_cluster(task, chatml):
    drawn = task.examples(chatml, [0], per_task=1)
    plain = {e.example_id: e for e in drawn if e.perturb is None}
    variants = [e for e in drawn if e.perturb]
    assert len(variants) >= 2 * len(plain) * 0.8 and len(plain) == len(task.names)
    for one in variants:
        base = plain[one.example_id.rpartition("~")[0]]
        assert one.example_id.endswith(f"~{one.perturb}")
        assert (one.cluster, one.answers, one.task, one.seed) == (
            base.cluster,
            base.answers,
            base.task,
            base.seed,
        )
        assert one.input_ids != base.input_ids
        text = chatml.decode(one.input_ids)
        assert all(value in text for value in one.answers[0].split(", "))
    # The plain ones are those of a task without changes.
    without = type(task)(**{**vars_of(task), "perturb": None}).examples(chatml, [0], per_task=1)
    assert [e.input_ids for e in without] == [e.input_ids for e in plain.values()]


def vars_of(task):
    from dataclasses import fields

    return {field.name: getattr(task, field.name) for field in fields(task)}


def test_prompts_of_one_s_own_keep_their_answers_and_choices(tmp_path, chatml):
    path = tmp_path / "mine.jsonl"
    rows = [
        {"prompt": "Which colour has the old lamp, red or green? It shines in the harbour.", "answer": "red", "id": 1},
        {"prompt": "Choose: Paris or London. The capital of France is which?", "answer": "Paris",
         "choices": ["Paris", "London"], "id": 2, "cluster": "towns"},
    ]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, rows)))
    drawn = Jsonl(str(path), perturb=["typo", "case"]).examples(chatml, [0])
    assert [e.perturb for e in drawn] == [None, "typo", "case"] * 2
    assert [e.cluster for e in drawn] == ["", "1", "1", "towns", "towns", "towns"]
    texts = [chatml.decode(e.input_ids) for e in drawn]
    assert all("red" in text for text in texts[:3])
    assert all("Paris" in text and "London" in text for text in texts[3:])


@pytest.mark.parametrize("ids", [("7", "7~typo"), ("7~typo", "7")])
def test_an_id_that_a_changed_prompt_gets_is_one_line(tmp_path, chatml, ids):
    path = tmp_path / "mine.jsonl"
    rows = [{"prompt": f"Which colour has lamp {i}?", "answer": "red", "id": i} for i in ids]
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(UsageError, match=r"mine: the id 7~typo is a prompt's own, .* not end in ~typo"):
        Jsonl(str(path), perturb=["typo", "case"]).examples(chatml, [0])
    drawn = Jsonl(str(path), perturb="case").examples(chatml, [0])
    assert {e.example_id for e in drawn} == {"7", "7~case", "7~typo", "7~typo~case"}


def test_what_cannot_be_changed_is_said(tmp_path, chatml):
    with pytest.raises(UsageError, match=r"task.perturb.*typos"):
        Synthetic(perturb="typos")
    path = tmp_path / "sums.jsonl"
    path.write_text(json.dumps({"prompt": "12 + 30 =", "answer": "42"}))
    with pytest.raises(UsageError, match="changes none of the prompts"):
        Jsonl(str(path), perturb="typo").examples(chatml, [0])


def test_a_cap_on_prompts_holds_for_mistyped_ones():
    plain = Example("t", "a", 0, tuple(range(300)), ("x",), 4)
    changed = replace(plain, example_id="a~typo", input_ids=tuple(range(320)), perturb="typo")
    check_changed([plain, changed], ["typo"], 320)
    with pytest.raises(
        UsageError, match="typo makes a prompt of 320 tokens, more than max_prompt_tokens=319"
    ):
        check_changed([plain, changed], ["typo"], 319)
