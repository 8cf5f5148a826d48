import difflib
import hashlib
import json
import logging
import re
from pathlib import Path

import pytest
from huggingface_hub import constants

from semkv_bench.errors import MissingError, UsageError
from semkv_bench.files import cache_dir
from semkv_bench.tasks import longbench_prompts as prompts
from semkv_bench.tasks.longbench import GROUPS, TASKS

NAMES = ("hotpotqa", "lcc")
TABLE = {name: f"{name}: {{context}} | {{input}}" for name in NAMES}
DATA = json.dumps(TABLE).encode()


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SEMKV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "longbench" / "dataset2prompt.json"


@pytest.fixture
def published(monkeypatch, tmp_path, cache):
    """A file at the address of the published prompts, with its hash; nothing cached yet."""
    file = tmp_path / "published.json"
    file.write_bytes(DATA)
    monkeypatch.setattr(prompts, "OFFICIAL_URL", file.as_uri())
    monkeypatch.setattr(prompts, "OFFICIAL_SHA256", hashlib.sha256(DATA).hexdigest())
    return file


@pytest.fixture
def nowhere(monkeypatch, tmp_path, cache):
    monkeypatch.setattr(prompts, "OFFICIAL_URL", (tmp_path / "absent.json").as_uri())


@pytest.mark.parametrize("choice", ["auto", "official"])
def test_official_prompts_are_fetched_once(published, cache, choice):
    assert prompts.load_prompts(choice, None, NAMES) == prompts.PromptSet("official", TABLE)
    assert cache.read_bytes() == DATA
    assert list(cache.parent.iterdir()) == [cache]
    published.unlink()
    assert prompts.load_prompts(choice, None, NAMES).source == "official"


def test_a_damaged_cache_is_fetched_again(published, cache):
    cache.parent.mkdir(parents=True)
    cache.write_text("{")
    assert prompts.load_prompts("official", None, NAMES).templates == TABLE
    assert cache.read_bytes() == DATA


def test_a_wrong_file_at_the_address_is_not_used(published, cache):
    published.write_text("{}")
    with pytest.raises(MissingError, match="not the published file"):
        prompts.load_prompts("official", None, NAMES)
    assert not cache.exists()


def test_offline_is_respected(published, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(MissingError, match="HF_HUB_OFFLINE is set"):
        prompts.load_prompts("official", None, NAMES)


def test_a_cache_that_cannot_be_written_is_said_and_no_obstacle(published, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SEMKV_CACHE", str(tmp_path / "file"))
    assert prompts.load_prompts("official", None, NAMES).templates == TABLE
    assert "could not be kept" in caplog.text


def test_official_prompts_that_cannot_be_had(nowhere):
    with pytest.raises(MissingError, match=r"task\.prompts_path=FILE, or use prompts=own"):
        prompts.load_prompts("official", None, NAMES)


def test_auto_falls_back_on_own_with_one_warning(nowhere, caplog):
    assert prompts.load_prompts("auto", None, NAMES) == prompts.PromptSet("own", prompts.OWN)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "not comparable" in caplog.text


def test_own_needs_nothing(nowhere, caplog):
    assert prompts.load_prompts("own", None, NAMES).source == "own"
    assert not caplog.records


@pytest.mark.parametrize("by_folder", [True, False])
def test_local_file_or_its_folder(nowhere, monkeypatch, tmp_path, by_folder, caplog):
    file = tmp_path / "dataset2prompt.json"
    file.write_bytes(DATA)
    path = tmp_path if by_folder else file
    assert prompts.load_prompts("official", path, NAMES) == prompts.PromptSet("custom", TABLE)
    assert "not the published file" in caplog.text
    monkeypatch.setattr(prompts, "OFFICIAL_SHA256", hashlib.sha256(DATA).hexdigest())
    assert prompts.load_prompts("auto", str(path), NAMES).source == "official"


def test_local_file_that_is_not_there(published, tmp_path):
    with pytest.raises(MissingError, match="prompts_path"):
        prompts.load_prompts("auto", tmp_path / "absent", NAMES)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b'{"lcc": "{context}"}', "for hotpotqa"),
        (b'{"hotpotqa": "{context}", "lcc": "no place"}', "for lcc"),
        (b'{"hotpotqa": "{context}", "lcc": 3}', "for lcc"),
    ],
)
def test_local_file_of_the_wrong_form(tmp_path, data, words):
    file = tmp_path / "p.json"
    file.write_bytes(data)
    with pytest.raises(UsageError, match=f"p.json: .*{words}"):
        prompts.load_prompts("auto", file, NAMES)


def test_texts_are_put_in_once_and_as_they_are():
    template = "{context}|{input}|{other}|{"
    assert prompts.fill(template, r"{input} {0} \1 {{x}}", "{context}") == (
        r"{input} {0} \1 {{x}}|{context}|{other}|{"
    )


def test_own_prompts_are_whole():
    assert set(prompts.OWN) == set(TASKS)
    without_input = {"gov_report", "multi_news", "vcsum", "passage_count", "lcc"}
    for name, template in prompts.OWN.items():
        assert template.count("{context}") == 1
        assert template.count("{input}") == (0 if name in without_input else 1)
        chinese = any("\u4e00" <= ch <= "\u9fff" for ch in template)
        assert chinese == (name in GROUPS["zh"])


def test_own_prompts_share_no_sentence_with_the_published_ones(longbench_data):
    official = json.loads((longbench_data / "official" / "dataset2prompt.json").read_text("utf-8"))

    for name, template in prompts.OWN.items():
        words = (
            re.sub(r"\{(context|input)\}", "", template),
            re.sub(r"\{(context|input)\}", "", official[name]),
        )
        shared = difflib.SequenceMatcher(None, *words, autojunk=False).find_longest_match().size
        assert shared < (9 if name in GROUPS["zh"] else 40), name


def test_published_file_has_the_pinned_hash(longbench_data):
    data = (longbench_data / "official" / "dataset2prompt.json").read_bytes()
    assert hashlib.sha256(data).hexdigest() == prompts.OFFICIAL_SHA256


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("SEMKV_CACHE", str(tmp_path / "x"))
    assert cache_dir() == tmp_path / "x"
    monkeypatch.delenv("SEMKV_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "semkv-bench"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == Path(tmp_path) / ".cache" / "semkv-bench"
