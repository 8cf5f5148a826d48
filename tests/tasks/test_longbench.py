import json
from itertools import pairwise

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from semkv_bench.errors import MissingError, UsageError
from semkv_bench.tasks import LongBench
from semkv_bench.tasks.longbench import GROUPS, TASKS

PLAIN = {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}
LIMITS = {
    32: {"hotpotqa", "2wikimqa", "musique", "triviaqa", "passage_count"}
    | {"passage_retrieval_en", "passage_retrieval_zh"},
    64: {"multifieldqa_en", "multifieldqa_zh", "trec", "lsht", "lcc", "repobench-p"},
    128: {"narrativeqa", "qasper", "dureader", "samsum"},
    512: {"gov_report", "qmsum", "multi_news", "vcsum"},
}  # fmt: skip


def _row(name, i):
    return {
        "input": f"Q{i}?",
        "context": f"Item {i} of {name}. {{input}} {{0}}",
        "answers": [f"answer {i}", "other"],
        "length": 5,
        "dataset": name,
        "language": "en",
        "all_classes": ["other", *[f"answer {k}" for k in range(10)]] if name in ("trec", "lsht") else None,
        "_id": f"{name}-{i}",
    }


@pytest.fixture
def folder(tmp_path):
    for name in ("hotpotqa", "trec", "samsum", "lcc"):
        rows = [json.dumps(_row(name, i)) for i in range(10)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    return tmp_path


def test_groups():
    assert len(TASKS) == len(GROUPS["all"]) == 21
    assert (len(GROUPS["en"]), len(GROUPS["zh"]), len(GROUPS["code"])) == (14, 5, 2)
    assert {name for name, task in TASKS.items() if not task.chat} == PLAIN
    assert {name for name, task in TASKS.items() if task.first_line} == {"trec", "triviaqa", "samsum", "lsht"}


def test_limits_are_the_benchmarks():
    assert {n: set(names) for n, names in LIMITS.items()} == {
        n: {name for name, task in TASKS.items() if task.max_new_tokens == n} for n in LIMITS
    }


def test_examples(folder, chatml):
    task = LongBench(subset=["hotpotqa", "samsum"], path=str(folder), prompts="own")
    examples = task.examples(chatml, [0])
    assert [e.example_id for e in examples] == [f"{n}-{i}" for n in ("hotpotqa", "samsum") for i in range(10)]
    first, dialogue = examples[0], examples[10]
    text = chatml.decode(first.input_ids)
    assert text.startswith("<|im_start|>user\n") and text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert "Item 0 of hotpotqa. {input} {0}\n" in text and "Question: Q0?" in text
    assert (first.answers, first.max_new_tokens, first.all_classes) == (("answer 0", "other"), 32, None)
    assert (first.stop_token_ids, first.min_new_tokens, first.truncated) == ((), 0, False)
    assert chatml.decode(first.target_ids) == "answer 0"
    assert "<|im_start|>" not in chatml.decode(dialogue.input_ids)
    assert chatml.decode(dialogue.stop_token_ids) == "\n"
    assert (dialogue.min_new_tokens, dialogue.max_new_tokens) == (1, 128)
    assert chatml.decode(dialogue.target_ids) == " answer 0"


def test_questions_of_one_document_share_a_cluster(tmp_path, chatml):
    rows = [_row("hotpotqa", i) | {"context": f"Document {i // 5}."} for i in range(10)]
    (tmp_path / "hotpotqa.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = LongBench(subset=["hotpotqa"], path=str(tmp_path), prompts="own")
    clusters = [example.cluster for example in task.examples(chatml, [0])]
    assert len(set(clusters[:5])) == len(set(clusters[5:])) == 1 and clusters[0] != clusters[5]


def test_limits_given(folder, chatml):
    task = LongBench(subset="hotpotqa", path=str(folder), prompts="own")
    example = task.examples(chatml, [0], 1, max_prompt_tokens=150, max_new_tokens=7)[0]
    assert example.truncated and 148 <= len(example.input_ids) <= 150
    assert example.max_new_tokens == 7


def test_sampling(folder, chatml):
    task = LongBench(subset=["trec", "hotpotqa"], path=str(folder), prompts="own")

    def ids(seeds, n):
        return [(e.task, e.seed, e.example_id) for e in task.examples(chatml, seeds, n)]

    four = ids([0, 1], 4)
    assert len(four) == len(set(four)) == 16
    assert four == ids([0, 1], 4)
    assert set(four) < set(ids([0, 1], 6))
    assert {i for n, s, i in four if (n, s) == ("trec", 0)} != {
        i for n, s, i in four if (n, s) == ("trec", 1)
    }
    for (name, seed, item), (next_name, next_seed, next_item) in pairwise(four):
        assert (name, seed) != (next_name, next_seed) or item < next_item
    assert ids([0], None) == ids([0], 10) == ids([0], 99)
    assert len(ids([0], None)) == 20


def test_names_come_in_the_benchmarks_order():
    assert LongBench(subset=["code", "qasper", "narrativeqa"]).names == (
        "narrativeqa",
        "qasper",
        "lcc",
        "repobench-p",
    )
    assert LongBench().names == LongBench(subset="all").names == tuple(TASKS)


def test_a_group_uses_what_is_there_and_says_what_is_not(folder, caplog):
    task = LongBench(subset=["en", "lcc"], path=str(folder), prompts="own")
    assert task.names == ("hotpotqa", "trec", "samsum", "lcc")
    assert (task.names, len(caplog.records)) == (task.names, 1)
    missing = caplog.records[0].args[1].split(", ")
    assert len(missing) == 11 and "qasper" in missing and "hotpotqa" not in missing
    assert set(task.chance) == set(task.names)


@pytest.mark.parametrize("subset", ["qasper", ["hotpotqa", "qasper"], ["all", "qasper"], "zh"])
def test_what_is_asked_for_must_be_there(folder, subset):
    lacking = "qasper" if subset != "zh" else "multifieldqa_zh"
    with pytest.raises(MissingError, match=rf"lacks {lacking}\.jsonl"):
        _ = LongBench(subset=subset, path=str(folder)).names


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"subset": "hotpot"}, "subset=hotpot is not known; choose from all, en, zh, code, narrativeqa"),
        ({"subset": ["hotpotqa", "x"]}, "subset=x"),
        ({"subset": []}, "empty"),
        ({"prompts": "mine"}, "prompts=mine is not known; choose from auto, official, own"),
    ],
)
def test_bad_keys_at_construction(keys, words):
    with pytest.raises(UsageError, match=words):
        LongBench(**keys)


def test_score_takes_the_first_line_and_the_best_reference(folder, chatml):
    task = LongBench(path=str(folder), prompts="own")
    by_name = {e.task: e for e in task.examples(chatml, [0], 1)}
    assert task.score(by_name["hotpotqa"], "other") == 1.0
    assert task.score(by_name["hotpotqa"], "\nother\nQuestion: more") == 0.5
    assert task.score(by_name["samsum"], "\n\nother\nDialogue: more") == pytest.approx(1.0)
    assert task.score(by_name["trec"], "other\nType: answer 5") == 1.0
    assert task.score(by_name["trec"], "Type\nother") == 0.0
    assert task.score(by_name["samsum"], ".") == 0.0


def test_prompt_source(folder, longbench_data):
    assert LongBench(subset="lcc", path=str(folder), prompts="own").prompt_source == "own"
    official = LongBench(subset="lcc", path=str(folder), prompts_path=str(longbench_data / "official"))
    assert official.prompt_source == "official"


def test_shipped_configuration(pytestconfig, folder):
    config = OmegaConf.load(pytestconfig.rootpath / "conf/task/longbench.yaml")
    root = OmegaConf.create({"subset": ["code", "trec"], "prompts": "own", "task": config})
    root.task.path = str(folder)
    assert instantiate(root.task).names == ("trec", "lcc")
    root.task.path = root.subset = None
    root.prompts = "auto"
    assert instantiate(root.task) == LongBench()


@pytest.mark.slow
@pytest.mark.parametrize("prompts", ["official", "own"])
def test_all_real_items_encode(longbench_data, bos_twice, prompts):
    task = LongBench(path=str(longbench_data), prompts=prompts, prompts_path=str(longbench_data / "official"))
    examples = task.examples(bos_twice, [0], max_prompt_tokens=1500)
    assert len(examples) == len({(e.task, e.example_id) for e in examples}) == 163
    assert {e.task for e in examples} == set(TASKS)
    assert task.prompt_source == prompts
    user = bos_twice.convert_tokens_to_ids("<user>")
    for example in examples:
        assert 1200 < len(example.input_ids) <= 1500 or not example.truncated
        assert (
            example.input_ids.count(bos_twice.bos_token_id)
            == example.input_ids.index(bos_twice.bos_token_id) + 1
        )
        assert (user in example.input_ids) == (example.task not in PLAIN)
    assert sum(e.truncated for e in examples) > 150
