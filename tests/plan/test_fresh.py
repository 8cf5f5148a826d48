"""Examples that a choice is confirmed on share nothing with those that it was made by."""

import json

import pytest

from semkv_bench.config.compose import compose_config
from semkv_bench.errors import UsageError
from semkv_bench.plan.plan import fresh, make_plan
from semkv_bench.tasks import Example


def _example(name, task="qa", ids=None, seed=0, **more):
    ids = tuple(f"{task}{name}".encode()) if ids is None else ids
    return Example(
        task=task, example_id=name, seed=seed, input_ids=ids, answers=("a",), max_new_tokens=1, **more
    )


USED = (_example("a", cluster="one"), _example("b"), _example("c", ids=(1, 2)))


@pytest.mark.parametrize(
    ("example", "left"),
    [
        (_example("new"), True),
        (_example("new", cluster="two"), True),
        (_example("new", cluster="one"), False),  # another question about a document of the calibration
        (_example("new", task="other", cluster="one"), False),
        (_example("b", seed=1, ids=(9,)), False),
        (_example("b", task="other"), True),
        (_example("new", task="other", ids=(1, 2)), False),
        (_example("b~typo", ids=(9,), cluster="b", perturb="typo"), False),
        (_example("b~typo", task="other", cluster="b", perturb="typo"), True),
        (_example("b", task="other", cluster="b"), True),
    ],
)
def test_what_shares_name_prompt_or_document_is_left_out(example, left):
    far = _example("far")
    assert fresh([example, far], USED) == ([example, far] if left else [far])
    assert fresh([example], ()) == [example]


def test_own_names_of_the_used_join_nothing_of_other_tasks():
    used = [_example("b", cluster="b"), _example("b~typo", cluster="b", perturb="typo")]
    other = _example("b", task="other", cluster="b")
    assert fresh([other], used) == [other]


def test_a_plan_leaves_out_other_questions_about_a_used_document(local_folder, tmp_path):
    path = tmp_path / "mine.jsonl"
    rows = [
        {"prompt": f"{word} of {place}", "answer": "a", "cluster": place} for place in "xyz" for word in "pq"
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    given = [
        "model=custom",
        f"model.path={local_folder}",
        "task=jsonl",
        f"task.path={path}",
        "quantizer=affine",
    ]
    first = make_plan(compose_config("sweep", [*given, "per_task=1", "seeds=[1000]"]))
    second = make_plan(compose_config("sweep", [*given, "seeds=[0]"]), used=first.examples)
    (document,) = (example.cluster for example in first.examples)
    assert [e.cluster for e in second.examples] == [
        place for place in "xyz" for _ in "pq" if place != document
    ]


def test_nothing_fresh_is_one_line():
    with pytest.raises(UsageError, match=r"none of the 1 examples is fresh: .*calibration_per_task"):
        fresh([_example("z", cluster="one")], USED)
    assert fresh([], USED) == []
