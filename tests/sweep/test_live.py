"""What a running sweep says of itself: sums that fit the records, in place or line by line."""

import io
import random

import pytest
from rich.console import Console

from semkv_bench import console
from semkv_bench.cli import main
from semkv_bench.console import LastingConsole, Progressing, track
from semkv_bench.records.folder import RunFolder
from semkv_bench.sweep.live import Standing, live

NAMES = ("full", "affine[g32]-L8", "affine-L4", "affine-L2")


def _unit(index, scores, turn=0):
    common = {"task": "t", "example_id": f"e{index}", "seed": 0, "turn": turn, "turns": 1}
    return [{**common, "setting": name, "score": score} for name, score in zip(NAMES, scores, strict=True)]


def _fed(units, margin=0.1):
    standing = Standing(NAMES, margin, 0.05)
    for unit in units:
        standing.add(unit)
    return standing


def test_sums_are_those_of_the_records():
    rng = random.Random(0)
    scores = [[1.0, rng.random(), rng.random(), 0.0] for _ in range(50)]
    standing = _fed(_unit(i, row) for i, row in enumerate(scores))
    mean, half = standing.difference("affine-L4")
    differences = [row[2] - row[0] for row in scores]
    assert mean == pytest.approx(sum(differences) / 50)
    guarded = [*differences, -1, 1]
    centre = sum(guarded) / 52
    spread = (sum((d - centre) ** 2 for d in guarded) / 52) ** 0.5
    assert half == pytest.approx(1.6448536 * spread / 52**0.5)


def test_a_setting_is_open_until_its_interval_leaves_the_margin():
    alike = [_unit(i, (1, 1, 1 - i % 2, 0)) for i in range(60)]
    assert _fed(alike[:1]).open == list(NAMES[1:])
    standing = _fed(alike)
    assert {name: standing.word(name) for name in NAMES[1:]} == {
        "affine[g32]-L8": "within the margin",
        "affine-L4": "below the margin",
        "affine-L2": "below the margin",
    }
    assert _fed(alike, margin=0.45).open == ["affine-L4"]


def test_what_was_added_without_its_reference_is_scored_and_not_compared():
    standing = _fed([[record for record in _unit(0, (1, 1, 0, 0)) if record["setting"] == "affine-L4"]])
    assert standing.difference("affine-L4") is None and standing.line() == ""


def _shown(items, terminal, standing, height=20):
    file = io.StringIO()
    console = LastingConsole(file=file, force_terminal=terminal, width=90, height=height)
    list(track(items, 3, "examples", console, Progressing(standing.line, standing.table)))
    return file.getvalue()


def test_without_a_terminal_it_is_one_line():
    standing = _fed(_unit(i, (1, 1, 0, 0)) for i in range(3))
    told = _shown(range(3), False, standing).strip().splitlines()
    assert len(told) == 1 and told[0].startswith("examples: 3 of 3")
    assert "so far full 1.000, affine[g32]-L8 1.000" in told[0] and "3 of 3 settings open" in told[0]


def test_in_a_terminal_it_is_a_table_in_place_that_fits():
    standing = _fed(_unit(i, (1, 1, 0, 0)) for i in range(40))
    told = _shown(range(3), True, standing)
    assert "affine[g32]-L8" in told and "within the margin" in told and "examples" in told
    table = Console(file=io.StringIO(), width=90)
    table.print(standing.table(2))
    lines = table.file.getvalue().strip().splitlines()
    assert len(lines) == 4 and "2 not shown" in lines[-1]


CHARTER = {
    "settings": {name: {} for name in NAMES},
    "examples": {"count": 3},
    "stats": {"margin": 0.1, "alpha": 0.05},
}


def test_a_run_that_goes_on_is_told_from_its_beginning_and_each_example_once(tmp_path):
    folder = RunFolder.open(tmp_path / "r", CHARTER, "")
    folder.start()
    folder.append(_unit(0, (1, 1, 0, 0)))
    folder.close()
    again = RunFolder.open(tmp_path / "r", CHARTER, "")
    assert again.recorded == 1
    beside = live(again)
    again.start()
    again.append(_unit(1, (0, 1, 0, 0)))
    again.refresh()
    assert again.recorded == 2
    again.close()
    assert "full 0.500, affine[g32]-L8 1.000" in beside.line()


def test_an_example_counts_when_it_is_written_however_many_are_read_together(
    local_folder, tmp_path, monkeypatch
):
    counted = []

    def counting(items, total, **_):
        for item in items:
            yield item
            counted.append(sum(len(file.read_text().splitlines()) for file in tmp_path.glob("run/records-*")))

    monkeypatch.setattr(console, "track", counting)
    given = ["subset=[niah_noise]", "per_task=5", "task.length=300", "grid.levels=[3]", "max_new_tokens=2"]
    command = ["sweep", "model=custom", f"model.path={local_folder}", f"out={tmp_path / 'run'}", *given]
    assert main([*command, "engine.noise_examples=0", "engine.prompts=3"]) == 0
    assert counted == [2, 4, 6, 8, 10]
