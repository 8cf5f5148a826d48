"""The generation and multiturn protocols from the command line, on a small random model."""

import pytest
from thinned import thinned

from semkv_bench.cli import main
from semkv_bench.records.folder import read_run

pytestmark = pytest.mark.usefixtures("without_figures")


def _sweep(folder, out, *more):
    common = ["per_task=1", "grid.levels=[4,2]", "engine.noise_examples=1", f"model.path={folder}"]
    return main(["sweep", "model=custom", f"out={out}", *common, *more])


@pytest.mark.parametrize("history", thinned(["own", "reference"], "own"))
def test_a_multiturn_run_records_every_turn_and_is_continued(tmp_path, local_folder, history):
    asked = (
        "protocol=multiturn",
        f"protocol.history={history}",
        "protocol.block=4",
        "task=synthetic_multiturn",
        "subset=multiturn_noise",
        "task.length=300",
        "max_new_tokens=6",
    )
    assert _sweep(local_folder, tmp_path / "run", *asked) == 0
    frame, protocol = read_run(tmp_path / "run")
    turns = int(frame.turns.iloc[0])
    assert turns > 1 and len(frame) == 3 * turns * protocol["examples"]["count"]
    assert set(frame.protocol) == {"multiturn" if history == "own" else "multiturn-reference"}
    assert set(frame.history) == {history} and set(frame.block) == {4}
    coded = frame[frame.setting != "full"]
    assert (coded.quantized_reads > 0).all() and coded.coded_share.between(0.9, 1).all()
    full = frame[frame.setting == "full"].sort_values("turn")
    assert (full.coded_share == 0).all() and full.alone_same_tokens.notna().all()
    assert full.prompt_tokens.is_monotonic_increasing

    file = tmp_path / "run/records-0.jsonl"
    whole = file.read_text()
    file.write_text(whole[: len(whole) // 2])
    assert _sweep(local_folder, tmp_path / "run", *asked) == 0
    assert file.read_text() == whole


def test_short_answers_of_generated_parts_are_counted_and_said(tmp_path, local_folder, caplog):
    asked = ("protocol=generation", "protocol.parts=generated", "task.length=300", "subset=niah_noise")
    assert _sweep(local_folder, tmp_path / "no", *asked, "max_new_tokens=4") == 2
    assert _sweep(local_folder, tmp_path / "run", *asked, "protocol.block=4", "max_new_tokens=9") == 0
    frame, _ = read_run(tmp_path / "run")
    assert set(frame.protocol) == {"generation-generated"}
    coded = frame[frame.setting != "full"]
    read = coded.quantized_reads > 0
    assert ((coded.new_tokens >= 5) == read).all()
    assert ((coded.coded_share > 0) == read).all() and (coded.coded_share < 0.1).all()
