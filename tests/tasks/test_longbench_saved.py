import pytest
from datasets import Dataset, DatasetDict

from semkv_bench.errors import UsageError
from semkv_bench.tasks.longbench_data import Folder, SavedDataset, open_source

ROWS = [
    {
        "_id": f"{task}-{i}",
        "input": "q",
        "context": "c {x}",
        "answers": ["a"],
        "dataset": task,
        "all_classes": None,
    }
    for task in ("hotpotqa", "qasper")
    for i in range(2)
]


def test_one_split_a_task(tmp_path):
    splits = {
        task: Dataset.from_list([r for r in ROWS if r["dataset"] == task]) for task in ("hotpotqa", "qasper")
    }
    DatasetDict(splits).save_to_disk(tmp_path)
    source = open_source(tmp_path)
    assert source.present(("trec", "qasper", "hotpotqa")) == ("qasper", "hotpotqa")
    assert [item.item_id for item in source.items("qasper")] == ["qasper-0", "qasper-1"]


def test_rows_of_several_tasks(tmp_path):
    Dataset.from_list(ROWS).save_to_disk(tmp_path)
    source = open_source(tmp_path)
    assert isinstance(source, SavedDataset)
    assert [item.context for item in source.items("hotpotqa")] == ["c {x}", "c {x}"]


def test_bad_rows_are_named(tmp_path):
    Dataset.from_list([*ROWS, {**ROWS[0], "answers": []}]).save_to_disk(tmp_path / "empty")
    with pytest.raises(UsageError, match="hotpotqa, row 3: field answers"):
        open_source(tmp_path / "empty").items("hotpotqa")
    Dataset.from_list([*ROWS, ROWS[1]]).save_to_disk(tmp_path / "twice")
    with pytest.raises(UsageError, match="_id hotpotqa-1 was already used"):
        open_source(tmp_path / "twice").items("hotpotqa")
    Dataset.from_list([{"text": "x"}]).save_to_disk(tmp_path / "other")
    with pytest.raises(UsageError, match="no column named dataset"):
        open_source(tmp_path / "other").present(("qasper",))


def test_a_folder_of_files_stays_one(tmp_path):
    assert isinstance(open_source(tmp_path), Folder)
