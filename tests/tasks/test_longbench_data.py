import json
import zipfile
from dataclasses import replace

import pytest
from huggingface_hub import constants

from semkv_bench.errors import MissingError, UsageError
from semkv_bench.tasks.longbench_data import HUB_REVISION, Item, fetch_archive, open_source

ROW = {
    "input": "Who?",
    "context": "Ada {x} wrote\u2028and \x85 read.",
    "answers": ["Ada"],
    "length": 4,
    "dataset": "hotpotqa",
    "language": "en",
    "all_classes": None,
    "_id": "1",
}
ITEM = Item("1", "Who?", "Ada {x} wrote\u2028and \x85 read.", ("Ada",), None)


def _lines(*rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "hotpotqa.jsonl").write_bytes(b"\xef\xbb\xbf" + _lines(ROW, {**ROW, "_id": "2"}) + b"\n")
    return tmp_path


@pytest.fixture
def archive(folder):
    file = folder / "data.zip"
    with zipfile.ZipFile(file, "w") as out:
        out.write(folder / "hotpotqa.jsonl", "some/data/hotpotqa.jsonl")
        out.writestr("some/data/hotpotqa_e.jsonl", "not this one")
        out.writestr("__MACOSX/some/data/hotpotqa.jsonl", "nor this")
    return file


@pytest.mark.parametrize("kind", ["folder", "archive"])
def test_items_of_a_folder_and_of_an_archive(request, kind):
    source = open_source(str(request.getfixturevalue(kind)))
    assert source.present(("qasper", "hotpotqa")) == ("hotpotqa",)
    assert source.items("hotpotqa") == [ITEM, replace(ITEM, item_id="2")]


@pytest.mark.parametrize("place", ["data.zip", "data"])
def test_a_folder_with_the_hubs_archive_or_what_was_unpacked_from_it(folder, archive, tmp_path, place):
    held = tmp_path / "fetched"
    held.mkdir()
    if place == "data.zip":
        archive.rename(held / "data.zip")
    else:
        (held / "data").mkdir()
        (folder / "hotpotqa.jsonl").rename(held / "data" / "hotpotqa.jsonl")
    assert open_source(held).items("hotpotqa") == [ITEM, replace(ITEM, item_id="2")]
    # Files beside it are what was meant.
    (held / "qasper.jsonl").write_bytes(_lines(ROW))
    assert open_source(held).present(("qasper", "hotpotqa")) == ("qasper",)


def test_hub_archive_from_the_hubs_cache(archive, monkeypatch, tmp_path):
    cached = tmp_path / "hub" / "datasets--THUDM--LongBench" / "snapshots" / HUB_REVISION / "data.zip"
    cached.parent.mkdir(parents=True)
    archive.rename(cached)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    assert fetch_archive(HUB_REVISION).items("hotpotqa")[0] == ITEM


@pytest.mark.parametrize("offline", [True, False])
def test_hub_archive_that_cannot_be_had(monkeypatch, tmp_path, offline):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    # A port that nothing listens on.
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        MissingError, match=r"hf download THUDM/LongBench data.zip .* task\.path=DIR/data\.zip"
    ):
        fetch_archive(HUB_REVISION)


def test_path_that_is_not_there(tmp_path):
    with pytest.raises(MissingError, match="does not exist"):
        open_source(tmp_path / "absent")


def test_file_that_is_no_archive(folder):
    with pytest.raises(UsageError, match="neither a folder"):
        open_source(folder / "hotpotqa.jsonl").present(("hotpotqa",))


def test_task_twice_in_an_archive(archive):
    with zipfile.ZipFile(archive, "a") as out:
        out.writestr("other/hotpotqa.jsonl", "x")
    with pytest.raises(UsageError, match=r"more than once: some/data/hotpotqa\.jsonl, other/hotpotqa\.jsonl"):
        open_source(archive).items("hotpotqa")


def test_damaged_archive(archive):
    data = bytearray(archive.read_bytes())
    data[60:70] = b"\0" * 10
    archive.write_bytes(data)
    with pytest.raises(UsageError, match=r"cannot read some/data/hotpotqa\.jsonl"):
        open_source(archive).items("hotpotqa")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"3", "not a JSON object"),
        *[
            (_lines({k: v for k, v in ROW.items() if k != key}), f"field {key} ")
            for key in ("_id", "input", "context")
        ],
        (_lines({**ROW, "_id": 3}), "field _id"),
        (_lines({k: v for k, v in ROW.items() if k != "answers"}), "field answers"),
        (_lines({**ROW, "answers": []}), "field answers"),
        (_lines({**ROW, "answers": "Ada"}), "field answers"),
        (_lines({**ROW, "answers": [3]}), "field answers"),
        (_lines({**ROW, "all_classes": "Food"}), "field all_classes"),
        (_lines({**ROW, "dataset": "musique"}), "field dataset is musique"),
        (_lines(ROW), r"_id 1 was already used at .*hotpotqa\.jsonl:1"),
    ],
)
def test_bad_line_is_named(tmp_path, line, words):
    (tmp_path / "hotpotqa.jsonl").write_bytes(_lines(ROW) + b"\n" + line)
    with pytest.raises(UsageError, match=rf"hotpotqa\.jsonl:3: .*{words}") as caught:
        open_source(tmp_path).items("hotpotqa")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("task", "changes", "words"),
    [
        ("trec", {"answers": ["Food"]}, "all_classes must hold"),
        ("lsht", {"answers": ["体育"], "all_classes": ["经济"]}, "all_classes must hold"),
        ("passage_retrieval_en", {"answers": ["3"]}, "paragraph by its number"),
        ("passage_retrieval_zh", {"answers": ["段落"]}, "paragraph by its number"),
    ],
)
def test_fields_that_a_metric_needs(tmp_path, task, changes, words):
    (tmp_path / f"{task}.jsonl").write_bytes(_lines({**ROW, "dataset": task, **changes}))
    with pytest.raises(UsageError, match=words):
        open_source(tmp_path).items(task)


def test_empty_file(tmp_path):
    (tmp_path / "hotpotqa.jsonl").write_bytes(b"\n")
    with pytest.raises(UsageError, match="holds no items"):
        open_source(tmp_path).items("hotpotqa")
