import json
import re

import pytest

from semkv_bench.config.compose import compose_config
from semkv_bench.errors import MissingError, UsageError
from semkv_bench.plan.plan import make_plan
from semkv_bench.tasks import LongBench, LongBenchMultiturn
from semkv_bench.tasks.longbench import TASKS
from semkv_bench.tasks.longbench_data import Item
from semkv_bench.tasks.longbench_multiturn import conversations
from semkv_bench.tasks.longbench_prompts import FOLLOW_UPS, OWN

# Questions per document, in the order of the file: document of question i.
DOCUMENTS = "abacaabbbd"


def _row(name, i, document):
    return {
        "_id": f"{name}-{i}",
        "input": f"Q{i}?",
        "context": f"Document {document} of {name}: {{input}}. " + f"Sentence about {document}. " * 20,
        "answers": [f"Paragraph {i}" if "retrieval" in name else f"answer {i}", f"Paragraph {i}"],
        "all_classes": None,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("longbench")
    for name in ("qasper", "passage_retrieval_en", "trec"):
        rows = [json.dumps(_row(name, i, document)) for i, document in enumerate(DOCUMENTS)]
        (folder / f"{name}.jsonl").write_text("\n".join(rows))
    return folder


def _task(folder, subset="qasper", turns=3, **keys):
    return LongBenchMultiturn(subset=subset, path=str(folder), prompts="own", turns=turns, **keys)


def _items(contexts):
    return [Item(str(i), f"Q{i}", context, ("A",), None) for i, context in enumerate(contexts)]


@pytest.mark.parametrize(
    ("contexts", "turns", "grouped"),
    [
        ("abacaabbbd", 3, ["024", "555", "167", "888", "333", "999"]),
        ("abab", 2, ["02", "13"]),
        ("aaaaa", 4, ["0123", "4444"]),
        ("aa", 5, ["01010"]),
        ("abc", 1, ["0", "1", "2"]),
        ("aba", 1, ["0", "2", "1"]),
    ],
)
def test_conversations(contexts, turns, grouped):
    found = conversations(_items(contexts), turns)
    assert ["".join(item.item_id for item in asked) for asked in found] == grouped
    assert all(len({item.context for item in asked}) == 1 for asked in found)


def test_first_turn_is_the_single_item_of_longbench(folder, chatml):
    single = {e.example_id: e for e in LongBench("qasper", "own", str(folder)).examples(chatml, [0])}
    for example in _task(folder).examples(chatml, [0]):
        alone = single[example.example_id]
        assert example.input_ids == alone.input_ids and example.answers == alone.answers
        assert example.target_ids == alone.target_ids
        assert example.max_new_tokens == alone.max_new_tokens == 128


def test_later_turns_ask_the_items_of_the_same_document(folder, chatml):
    examples = _task(folder).examples(chatml, [0])
    assert [e.example_id for e in examples] == [f"qasper-{i}" for i in (0, 5, 1, 8, 3, 9)]
    first = examples[0]
    assert [first.at(turn).answers[0] for turn in range(3)] == ["answer 0", "answer 2", "answer 4"]
    assert chatml.decode(first.follow_ups[0].input_ids) == (
        "<|im_end|>\n<|im_start|>user\nQuestion: Q2?\nShort answer:<|im_end|>\n<|im_start|>assistant\n"
    )
    assert chatml.decode(first.follow_ups[1].target_ids) == "answer 4"
    again = examples[1]
    assert [again.at(turn).answers[0] for turn in range(3)] == ["answer 5"] * 3


def test_every_turn_is_scored_by_the_tasks_metric_and_its_own_references(folder, chatml):
    task = _task(folder, subset=["qasper", "passage_retrieval_en"])
    qasper, *_ = task.examples(chatml, [0])
    assert task.score(qasper.at(1), "answer 2") == 1.0
    assert task.score(qasper.at(1), "answer 0") == 0.5
    assert task.score(qasper.at(1), "Paragraph 2") == 1.0
    retrieval = next(e for e in task.examples(chatml, [0]) if e.task == "passage_retrieval_en")
    assert task.score(retrieval.at(2), "Paragraph 4, not 5") == 0.5


def test_limits_hold_for_the_first_prompt_and_every_answer(folder, chatml):
    example, *_ = _task(folder).examples(chatml, [0], 1, max_prompt_tokens=300, max_new_tokens=7)
    assert example.truncated and 298 <= len(example.input_ids) <= 300
    assert {example.at(turn).max_new_tokens for turn in range(3)} == {7}


def test_sampling(folder, chatml):
    def ids(seeds, n):
        return [(e.seed, e.example_id) for e in _task(folder).examples(chatml, seeds, n)]

    assert ids([0, 1], 3) == ids([0, 1], 3)
    assert set(ids([0, 1], 3)) < set(ids([0, 1], 4))
    assert len(set(ids([0, 1], 3))) == 6
    assert ids([0], None) == ids([0], 99) and len(ids([0], None)) == 6


def test_only_tasks_that_ask_a_question_about_a_text():
    assert set(FOLLOW_UPS) < set(TASKS)
    assert all(TASKS[name].chat and not TASKS[name].first_line for name in FOLLOW_UPS)
    for name, wording in FOLLOW_UPS.items():
        assert wording.count("{input}") == 1 and "{context}" not in wording
        assert OWN[name].endswith(wording.rpartition("\n\n")[2])
    assert LongBenchMultiturn().names == tuple(FOLLOW_UPS)
    with pytest.raises(UsageError, match="subset=trec is not known; choose from all, en, zh, narrativeqa"):
        LongBenchMultiturn("trec")


@pytest.mark.parametrize(("turns", "words"), [(0, "task.turns=0"), ("many", "task.turns=many")])
def test_bad_turns(turns, words):
    with pytest.raises(UsageError, match=words):
        LongBenchMultiturn(turns=turns)


def test_missing_file_is_named(folder):
    with pytest.raises(MissingError, match=r"lacks musique\.jsonl"):
        _ = _task(folder, "musique").names


def test_whose_wording(folder, longbench_data):
    official = {"path": str(folder), "prompts_path": str(longbench_data / "official")}
    assert LongBenchMultiturn("qasper", **official).prompt_source == "official, later turns own"
    assert LongBenchMultiturn("qasper", **official, turns=1).prompt_source == "official"
    assert _task(folder).prompt_source == "own"


def test_shipped_configuration_plans(folder, local_folder):
    overrides = ["model=custom", f"model.path={local_folder}", "task=longbench_multiturn", "prompts=own"]
    overrides.append("protocol=multiturn")
    plan = make_plan(
        compose_config(
            "sweep", [*overrides, f"task.path={folder}", "task.turns=4", "subset=en", "max_prompt_tokens=400"]
        )
    )
    assert {example.turns for example in plan.examples} == {4}
    assert plan.charter["tasks"] == ["passage_retrieval_en", "qasper"]
    config = compose_config("sweep", overrides).task
    assert (config.turns, config.path) == (2, None)


@pytest.mark.slow
def test_real_items(longbench_data, bos_twice):
    names = ["qasper", "multifieldqa_zh", "qmsum"]
    keys = {"path": str(longbench_data), "prompts_path": str(longbench_data / "official")}
    task = LongBenchMultiturn(names, **keys, turns=3)
    examples = task.examples(bos_twice, [0], 3, max_prompt_tokens=1500)
    alone = {e.example_id: e for e in LongBench(names, **keys).examples(bos_twice, [0], 3, 1500)}
    assert {e.task for e in examples} == set(names) and len(examples) == 9
    for example in examples:
        assert example.example_id not in alone or example.input_ids == alone[example.example_id].input_ids
        for later in example.follow_ups:
            text = bos_twice.decode(later.input_ids)
            assert re.fullmatch(r"</s><user>.*</user><reply>", text, flags=re.S)
            assert bos_twice.bos_token_id not in later.input_ids
        for turn in range(3):
            assert task.score(example.at(turn), example.at(turn).answers[0]) == pytest.approx(1.0)
