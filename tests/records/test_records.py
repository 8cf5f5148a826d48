import json
import multiprocessing
import subprocess
from pathlib import Path

import numpy as np
import pytest
import yaml

from semkv_bench.errors import MissingError, SemkvError, UsageError
from semkv_bench.files import hold_lock
from semkv_bench.records.folder import RunFolder, charter_hash, read_looks, read_run, read_sessions
from semkv_bench.records.normalize import normalize
from semkv_bench.records.prompts import read_prompts

PROTOCOL = {"settings": {"full": {}, "affine-L4": {}}, "examples": {"count": 3}, "model": "m"}


def _unit(example_id: str) -> list[dict]:
    common = {"task": "t", "example_id": example_id, "seed": 0, "turn": 0}
    return [{**common, "setting": name, "score": 1.0, "prediction": "ü 7"} for name in PROTOCOL["settings"]]


def _started(path) -> RunFolder:
    folder = RunFolder.open(path, PROTOCOL, "a: 1\n")
    folder.start()
    return folder


def test_protocol_is_written_before_any_record(tmp_path):
    RunFolder.open(tmp_path / "run", PROTOCOL, "a: 1\n")
    written = yaml.safe_load((tmp_path / "run/protocol.yaml").read_text())
    assert written["hash"] == charter_hash(PROTOCOL) == charter_hash(written)
    assert not list((tmp_path / "run").glob("records-*"))


def test_append_and_read_back(tmp_path):
    folder = _started(tmp_path)
    for name in "ab":
        folder.append(_unit(name))
    assert not folder.complete
    folder.append(_unit("c"))
    assert folder.complete
    frame, protocol = read_run(tmp_path)
    assert len(frame) == 6 and protocol["model"] == "m"
    assert set(frame.prediction) == {"ü 7"}


@pytest.mark.parametrize("cut", range(0, 240, 7))
def test_torn_at_any_byte_the_unit_is_done_again(tmp_path, cut):
    folder = _started(tmp_path)
    folder.append(_unit("a"))
    folder.append(_unit("b"))
    folder.close()
    file = tmp_path / "records-0.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) - 1 - cut])
    resumed = _started(tmp_path)
    for name in "ab":
        if ("t", name, 0) not in resumed.done:
            resumed.append(_unit(name))
    assert file.read_bytes() == whole


def _conversation(example_id: str, turns: int) -> list[dict]:
    return [{**record, "turn": turn, "turns": turns} for turn in range(turns) for record in _unit(example_id)]


@pytest.mark.parametrize("cut", range(0, 900, 31))
def test_a_conversation_is_done_again_unless_all_its_turns_are_there(tmp_path, cut):
    folder = _started(tmp_path)
    for name, turns in (("a", 2), ("b", 3)):
        folder.append(_conversation(name, turns))
    folder.close()
    file = tmp_path / "records-0.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) - 1 - cut])
    resumed = _started(tmp_path)
    assert ("t", "b", 0) not in resumed.done
    assert (("t", "a", 0) in resumed.done) == (cut < len(whole) - len(whole.splitlines()[0]) * 4 - 5)
    for name, turns in (("a", 2), ("b", 3)):
        if ("t", name, 0) not in resumed.done:
            resumed.append(_conversation(name, turns))
    assert file.read_bytes() == whole
    frame, _ = read_run(tmp_path)
    assert len(frame) == 2 * (2 + 3)


def test_several_writers_have_a_file_each(tmp_path):
    first, second = _started(tmp_path), _started(tmp_path)
    first.append(_unit("a"))
    second.append(_unit("b"))
    assert sorted(p.name for p in tmp_path.glob("records-*")) == ["records-0.jsonl", "records-1.jsonl"]
    first.refresh()
    assert {unit[1] for unit in first.done} == {"a", "b"}
    second.append(_unit("a"))
    assert len(read_run(tmp_path)[0]) == 4


def test_writers_take_the_examples_from_different_ends(tmp_path):
    first, second, third = _started(tmp_path), _started(tmp_path), _started(tmp_path)
    pending = list("abcdefgh")
    assert first.share(pending) == pending
    assert second.share(pending) == pending[::-1]
    assert third.share(pending)[0] not in "ah" and sorted(third.share(pending)) == pending


def test_a_living_writer_is_not_repaired(tmp_path):
    folder = _started(tmp_path)
    folder.append(_unit("a"))
    path = tmp_path / "records-0.jsonl"
    with path.open("ab") as other:
        other.write(b'{"task": "t", "exam')
    _started(tmp_path)
    assert path.read_bytes().endswith(b'"exam')


def test_another_protocol_is_refused(tmp_path):
    _started(tmp_path).close()
    with pytest.raises(UsageError, match=r"another protocol \(different: model: m there, n here\)"):
        RunFolder.open(tmp_path, {**PROTOCOL, "model": "n"}, "")


def _open_at_once(path, model: str, together, told) -> None:
    together.wait()
    try:
        told.put(
            (model, RunFolder.open(path, {**PROTOCOL, "model": model}, f"model: {model}\n").charter["model"])
        )
    except UsageError as error:
        told.put((model, str(error)))


@pytest.mark.slow
def test_of_two_protocols_that_open_a_folder_at_once_one_is_refused(tmp_path):
    context = multiprocessing.get_context("fork")
    together, told = context.Barrier(3), context.SimpleQueue()
    for number in range(20):
        path = tmp_path / str(number)
        # Two of three are alike: both of them may go on.
        openers = [context.Process(target=_open_at_once, args=(path, m, together, told)) for m in "mnn"]
        for opener in openers:
            opener.start()
        found = [told.get() for _ in openers]
        for opener in openers:
            opener.join()
        owner = yaml.safe_load((path / "protocol.yaml").read_text())["model"]
        assert (path / "config.yaml").read_text() == f"model: {owner}\n"
        for model, outcome in found:
            assert outcome == owner if model == owner else "another protocol (different: model: " in outcome
        assert {p.name for p in path.iterdir()} - {".shared.lock"} == {"config.yaml", "protocol.yaml"}


def test_a_kill_between_configuration_and_protocol_is_no_other_run(tmp_path):
    (tmp_path / "config.yaml").write_text("a: 0\n")
    (tmp_path / ".shared.lock").touch()
    RunFolder.open(tmp_path, PROTOCOL, "a: 1\n")
    assert (tmp_path / "config.yaml").read_text() == "a: 1\n"


def test_a_changed_protocol_is_noticed(tmp_path):
    folder = _started(tmp_path)
    folder.append(_unit("a"))
    path = tmp_path / "protocol.yaml"
    path.write_text(path.read_text().replace("model: m", "model: n"))
    with pytest.raises(UsageError, match="hash does not match"):
        read_run(tmp_path)
    with pytest.raises(UsageError, match="was changed"):
        RunFolder.open(tmp_path, PROTOCOL, "")


def test_a_folder_of_something_else_is_not_touched(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UsageError, match="not a run folder"):
        RunFolder.open(tmp_path, PROTOCOL, "")
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_where_nothing_can_be_written_nothing_is_said_to_be_safe():
    with pytest.raises(SemkvError, match="nothing is recorded yet; another folder is chosen by out=DIR"):
        RunFolder.open(Path("/proc/nowhere"), PROTOCOL, "")


class _Full:
    """A file on a disk that takes so many more bytes."""

    def __init__(self, file, room: int) -> None:
        self._file, self._room = file, room

    def write(self, data) -> int:
        if not self._room:
            raise OSError(28, "No space left on device")
        written = self._file.write(data[: self._room])
        self._room -= written
        return written

    def __getattr__(self, name):
        return getattr(self._file, name)


PROMPTS = [{"task": "t", "example_id": "b", "prompt_hash": "p", "seed": 0, "turn": 0, "prompt": "ü" * 30}]


@pytest.mark.parametrize("file", ["records", "prompts"])
@pytest.mark.parametrize("room", [0, 1, 50, 90])
def test_full_disk_keeps_what_was_there_and_the_same_command_goes_on(tmp_path, room, file):
    folder = _started(tmp_path)
    folder.append(_unit("a"))
    before = (tmp_path / "records-0.jsonl").read_bytes()
    append_file = folder._writer.records if file == "records" else folder._writer.prompts._file
    append_file.file = _Full(append_file.file, room)
    with pytest.raises(SemkvError, match="No space left on device; what is recorded is safe"):
        folder.append(_unit("b"), PROMPTS)
    assert (tmp_path / "records-0.jsonl").read_bytes() == before
    folder.close()
    assert (tmp_path / "records-0.jsonl").read_bytes() == before
    again = _started(tmp_path)
    assert again.done == {("t", "a", 0)}
    again.append(_unit("b"), PROMPTS)
    assert len(read_run(tmp_path)[0]) == 4
    assert [line["example_id"] for line in read_prompts(tmp_path).values()] == ["b"]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KiB, where one may be mounted."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", place], capture_output=True)
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    yield place
    subprocess.run(["umount", place], check=True)


@pytest.mark.parametrize("words", [100, 1000, 5000])
def test_a_run_on_a_full_disk_goes_on_when_there_is_room(small_disk, words):
    run, ballast = small_disk / "run", small_disk / "ballast"
    ballast.write_bytes(bytes(30_000))
    planned = [f"{number:03d}" for number in range(35_000 // (words + 450))]
    charter = PROTOCOL | {"examples": {"count": len(planned)}}

    def go_on() -> int:
        folder = RunFolder.open(run, charter, "")
        folder.start()
        try:
            for name in planned:
                if ("t", name, 0) not in folder.done:
                    prompt = PROMPTS[0] | {"example_id": name}
                    folder.append([{**r, "prediction": "x" * (words // 2)} for r in _unit(name)], [prompt])
        finally:
            folder.close()
        return len(folder.done)

    for _ in range(3):
        with pytest.raises(SemkvError, match=r"No space left on device; what is recorded is safe"):
            go_on()
    ballast.unlink()
    assert go_on() == len(planned)
    assert sorted(set(read_run(run)[0].example_id)) == planned
    assert len(read_prompts(run)) == len(planned)


def test_nothing_recorded_yet(tmp_path):
    with pytest.raises(MissingError, match="nowhere does not exist"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(MissingError, match="not a run folder"):
        read_run(tmp_path)
    _started(tmp_path)
    with pytest.raises(MissingError, match="no finished example"):
        read_run(tmp_path)


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    folder = _started(tmp_path)
    folder.append(_unit("a"))
    folder.close()
    path = tmp_path / "records-0.jsonl"
    path.write_bytes(b"garbage\n" + path.read_bytes())
    with pytest.raises(UsageError, match=r"records-0.jsonl, line 1"):
        read_run(tmp_path)


def _rewritten(folder, change) -> None:
    """Change the lines of a run's one file, each a record."""
    path = folder / "records-0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(record) + "\n" for record in change(lines)))


def test_a_setting_that_the_run_does_not_have_is_named(tmp_path):
    folder = _started(tmp_path)
    for name in "ab":
        folder.append(_unit(name))
    folder.close()
    _rewritten(tmp_path, lambda lines: [*lines[:3], lines[3] | {"setting": "affine-L99"}])
    for reads in (read_run, _started):
        with pytest.raises(
            UsageError, match=r"records-0\.jsonl, line 4: the run has no setting affine-L99; remove"
        ):
            reads(tmp_path)


@pytest.mark.parametrize("field", [{"setting": "full"}, {"turn": 1}, {"turns": 2}])
def test_a_unit_that_lacks_a_setting_or_turn_is_not_complete(tmp_path, field):
    folder = _started(tmp_path)
    for name in "ab":
        folder.append(_unit(name))
    folder.close()
    _rewritten(tmp_path, lambda lines: [lines[0] | field, lines[1] | field, *lines[2:]])
    assert read_run(tmp_path)[0]["example_id"].unique().tolist() == ["b"]
    assert _started(tmp_path).done == {("t", "b", 0)}


@pytest.mark.parametrize(
    "field", [{"setting": []}, {"turn": "x"}, {"turns": [1]}, {"seed": None}, {"example_id": {}}]
)
def test_a_line_that_names_no_record_is_one_line(tmp_path, field):
    folder = _started(tmp_path)
    folder.append(_unit("a"))
    folder.close()
    _rewritten(tmp_path, lambda lines: [lines[0], lines[1] | field])
    with pytest.raises(UsageError, match=r"records-0\.jsonl, line 2: not a record \("):
        read_run(tmp_path)


def test_records_say_where_they_stand(tmp_path):
    first, second = _started(tmp_path), _started(tmp_path)
    first.append(_unit("a"))
    second.append(_unit("b"))
    frame, _ = read_run(tmp_path)
    assert frame["record_line"].tolist() == [1, 2, 1, 2]
    assert set(frame["record_file"]) == {str(tmp_path / f"records-{k}.jsonl") for k in (0, 1)}
    broken = frame.assign(code_bits=4.0, score=[1.0, 0.5, 1.0, 7.0])
    with pytest.raises(UsageError) as caught:
        normalize(broken)
    assert str(caught.value) == (
        f"{tmp_path}/records-1.jsonl, line 2: score 7 (setting affine-L4) is outside 0..1; remove the lines of its "
        "example and run the sweep again"
    )
    with pytest.raises(
        UsageError, match=r"records-0\.jsonl, line 1: score is missing or NaN; remove the lines of its"
    ):
        normalize(broken.assign(score=np.nan))
    with pytest.raises(UsageError) as caught:
        normalize(broken.assign(score=1.0, code_bits=[16, 99, 16, 99]))
    assert str(caught.value).startswith(f"{tmp_path}: setting affine-L4 has code_bits 99")


def test_environment_of_every_session_is_kept(tmp_path):
    folder = _started(tmp_path)
    folder.write_environment({"torch": "a"})
    folder.write_environment({"torch": "b"})
    assert [s["torch"] for s in json.loads((tmp_path / "environment.json").read_text())["sessions"]] == [
        "a",
        "b",
    ]


def test_the_lock_ends_with_the_writer(tmp_path):
    folder = _started(tmp_path)
    assert hold_lock(tmp_path / ".records-0.lock", wait=False) is None
    folder.close()
    hold_lock(tmp_path / ".records-0.lock", wait=False).release()


def _other_run(path, **changes) -> bytes:
    """The records file of a run that differs."""
    folder = RunFolder.open(path, {**PROTOCOL, **changes}, "")
    folder.start()
    folder.append(_unit("c"))
    folder.close()
    return (path / "records-0.jsonl").read_bytes()


@pytest.mark.parametrize(
    "changes", [{"seeds": [1]}, {"examples": {"count": 3, "sha256": "x"}}, {"weights": "x"}]
)
def test_records_of_another_run_are_refused_wherever_they_are_put(tmp_path, changes):
    folder = _started(tmp_path / "run")
    folder.append(_unit("a"))
    folder.close()
    other = _other_run(tmp_path / "other", **changes)
    own = (tmp_path / "run/records-0.jsonl").read_bytes()
    for name, content, line in (("records-0.jsonl", own + other, 3), ("records-7.jsonl", other, 1)):
        (tmp_path / "run" / name).write_bytes(content)
        told = rf"{name}, line {line}: example c of task t was recorded by a run of another protocol \(\w{{16}}, this"
        for reads in (lambda: read_run(tmp_path / "run"), lambda: _started(tmp_path / "run")):
            with pytest.raises(UsageError, match=told):
                reads()
        (tmp_path / "run/records-0.jsonl").write_bytes(own)


def test_records_are_compared_with_the_plan(tmp_path):
    plan = {("t", "a", 0): "p"}
    folder = RunFolder.open(tmp_path, PROTOCOL, "", plan)
    folder.start()
    folder.append([record | {"prompt_hash": "p"} for record in _unit("a")])
    folder.append([record | {"prompt_hash": "p", "seed": 3} for record in _unit("a")])
    with pytest.raises(UsageError, match=r"line 3: example a of task t and seed 3 is not planned; take"):
        folder.refresh()
    folder.close()
    folder = RunFolder.open(tmp_path, PROTOCOL, "", {("t", "a", 0): "q"})
    with pytest.raises(
        UsageError, match=r"line 1: example a of task t answered another prompt than the planned"
    ):
        folder.start()


def test_a_report_knows_seeds_tasks_and_the_number_of_examples(tmp_path):
    charter = PROTOCOL | {"tasks": ["t"], "seeds": [0], "examples": {"count": 1}}
    folder = RunFolder.open(tmp_path, charter, "")
    folder.start()
    folder.append(_unit("a"))
    folder.append(_unit("b"))
    with pytest.raises(UsageError, match="holds records of 2 examples where 1 were planned"):
        read_run(tmp_path)
    for field, told in (({"seed": 4}, "the run has no seed 4"), ({"task": "u"}, "the run has no task u")):
        _rewritten(
            tmp_path, lambda lines, field=field: [*lines[:2], *(record | field for record in lines[:2])]
        )
        with pytest.raises(UsageError, match=f"line 3: {told}"):
            read_run(tmp_path)


def test_damaged_neighbours_are_both_done_again_at_once(tmp_path):
    for damaged in ("ab", "bc", "abc"):
        path = tmp_path / damaged
        folder = _started(path)
        for name in "abc":
            folder.append(_unit(name))
        folder.close()
        _rewritten(
            path,
            lambda lines, damaged=damaged: [
                record for i, record in enumerate(lines) if i % 2 or record["example_id"] not in damaged
            ],
        )
        folder = _started(path)
        for name in "abc":
            if ("t", name, 0) not in folder.done:
                folder.append(_unit(name))
        folder.close()
        assert len(_started(path).done) == 3
        assert len(read_run(path)[0]) == 6


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"task": "t", "seed": ' + "9" * 5000 + "}", "more digits"),
        ('{"task": "t"', "delimiter"),
        ("\\xff", "Expecting value"),
        ("[1]", "list"),
    ],
)
def test_whatever_is_no_record_is_one_line(tmp_path, line, told):
    folder = _started(tmp_path)
    folder.append(_unit("a"))
    folder.close()
    with (tmp_path / "records-0.jsonl").open("a") as file:
        file.write(line + "\n")
    for reads in (read_run, _started):
        with pytest.raises(UsageError, match=rf"records-0\.jsonl, line 3: not a record \(.*{told}") as caught:
            reads(tmp_path)
        assert len(str(caught.value).replace(str(tmp_path), "")) < 250


@pytest.mark.parametrize("text", ["[" * 100_000, "{a: " * 5000, "hash: " + "9" * 5000, "- 1", "a: b: c"])
def test_a_charter_that_is_none_is_one_line(tmp_path, text):
    _started(tmp_path).close()
    (tmp_path / "protocol.yaml").write_text(text)
    for reads in (read_run, _started):
        with pytest.raises(UsageError, match=r"protocol\.yaml (is damaged|was changed)") as caught:
            reads(tmp_path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["looks.json", "environment.json"])
def test_deeply_nested_notes_count_as_lost(tmp_path, name):
    _started(tmp_path).close()
    (tmp_path / name).write_text('{"looks": ' + "[" * 100_000)
    assert read_looks(tmp_path) == read_sessions(tmp_path) == []


def test_what_was_read_is_not_read_again(tmp_path, monkeypatch):
    first, second = _started(tmp_path), _started(tmp_path)
    parsed = []
    monkeypatch.setattr(
        "semkv_bench.records.lines.parse_json", lambda line: parsed.append(1) or json.loads(line)
    )
    for number in range(30):
        second.append(_unit(str(number)))
        first.refresh()
    assert len(first.done) == 30 and len(parsed) == 60
    # What is not whole yet is looked at again until it is.
    whole = (tmp_path / "records-1.jsonl").read_bytes()
    for end in (len(whole) - 100, len(whole)):
        (tmp_path / "records-1.jsonl").write_bytes(
            (whole + whole.replace(b'"29"', b'"x9"'))[: len(whole) + end]
        )
        first.refresh()
    assert len(first.done) == 31 and ("t", "x9", 0) in first.done


def test_what_a_repair_cuts_from_another_file_is_read_anew(tmp_path):
    first, second = _started(tmp_path), _started(tmp_path)
    second.append(_unit("a"))
    path = tmp_path / "records-1.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines(keepends=True)[0].replace(b'"a"', b'"b"'))
    first.refresh()
    second.close()
    third = _started(tmp_path)
    assert path.read_bytes() == whole
    third.append(_unit("c"))
    first.refresh()
    assert first.done == {("t", "a", 0), ("t", "c", 0)}


def test_prompts_are_written_once_by_whoever_asks_first(tmp_path):
    first = _started(tmp_path)
    first.append(_unit("b"), PROMPTS)
    second = _started(tmp_path)
    second.append(_unit("b"), [PROMPTS[0] | {"seed": 1}, PROMPTS[0] | {"turn": 1}])
    for folder in (first, second):
        folder.close()
    with (tmp_path / "prompts-1.jsonl").open("a") as file:
        file.write('{"task": "t')
    assert set(read_prompts(tmp_path)) == {("t", "b", "p", 0), ("t", "b", "p", 1)}
    assert read_prompts(tmp_path)["t", "b", "p", 0] == PROMPTS[0]
    first, second = _started(tmp_path), _started(tmp_path)
    second.append(_unit("c"), [PROMPTS[0] | {"example_id": "c"}])
    assert len(read_prompts(tmp_path)) == 3
    (tmp_path / "prompts-0.jsonl").write_text("[1]\n")
    with pytest.raises(UsageError, match=r"prompts-0\.jsonl, line 1: not a prompt \("):
        _started(tmp_path)
