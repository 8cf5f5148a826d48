import contextlib
import json
import os
import shutil
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Event, Thread

import pandas as pd
import psutil
import pytest
import torch

from semkv_bench.cli import main
from semkv_bench.config.compose import check_sweeps
from semkv_bench.errors import UsageError
from semkv_bench.records.folder import read_run
from semkv_bench.sweep import launchers, multirun

pytestmark = pytest.mark.usefixtures("without_figures")

QUICK = ["per_task=3", "task.length=300", "max_new_tokens=2", "grid.levels=[4,2]", "subset=[niah_noise]"]


@pytest.fixture
def sweep(local_folder, tmp_path, monkeypatch):
    """The command of a small sweep, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return ["sweep", "model=custom", f"model.path={local_folder}", *QUICK]


def test_shards_share_the_default_folder_and_complete_it(sweep, tmp_path, capsys):
    assert main([*sweep, "shard=1/2"]) == 0
    assert "1 of the run's 3 examples are left to other shards" in capsys.readouterr().out
    assert main([*sweep, "shard=1/2"]) == 0
    assert "nothing left to run" in capsys.readouterr().out
    assert main([*sweep, "shard=2/2"]) == 0
    assert "left to other shards" not in capsys.readouterr().out
    (run,) = (tmp_path / "results/runs").iterdir()
    frame, protocol = read_run(run)
    assert len(frame) == 3 * 3 and not frame.duplicated(["task", "example_id", "seed", "setting"]).any()
    assert "shard" not in protocol and "shard" not in (run / "config.yaml").read_text()


def test_a_shard_skips_what_a_whole_sweep_has_done(sweep, tmp_path, capsys):
    assert main([*sweep, "out=run"]) == 0
    assert main([*sweep, "out=run", "shard=2/3"]) == 0
    assert "nothing left to run" in capsys.readouterr().out
    assert len(read_run(tmp_path / "run")[0]) == 3 * 3


@pytest.mark.slow
@pytest.mark.parametrize("quantizer", ["affine", "turboquant_channel_split"])
def test_a_row_is_coded_alike_in_whichever_shard_it_runs(sweep, tmp_path, quantizer):
    """Channels and coders are chosen anew for each example, so one must not hang on which examples ran before it."""
    coded = [f"quantizer={quantizer}", "protocol=generation", "protocol.parts=both", "protocol.block=4"]
    command = [*sweep, *coded, "max_new_tokens=9", "engine.noise_examples=0"]
    assert main([*command, "out=whole"]) == 0
    for share in ("3/3", "1/3", "2/3"):
        assert main([*command, "out=parts", f"shard={share}"]) == 0
    told = ["prediction", "score", "kl", "new_tokens", "quantized_reads", "coded_share", "cache_bits"]
    whole, parts = (
        read_run(tmp_path / run)[0].set_index(["example_id", "seed", "setting"]).sort_index()[told]
        for run in ("whole", "parts")
    )
    assert len(whole) == 3 * 3 and (whole.xs("full", level="setting").coded_share == 0).all()
    assert (whole.drop("full", level="setting").kl > 0).all()
    pd.testing.assert_frame_equal(parts, whole, check_exact=True)


@pytest.mark.slow
def test_multirun_of_shards_fills_one_folder(sweep, tmp_path):
    assert main([*sweep, "-m", "shard=1/2,2/2", "out=run"]) == 0
    assert len(read_run(tmp_path / "run")[0]) == 3 * 3


@pytest.mark.slow
def test_a_multirun_begun_again_repeats_no_finished_job(sweep, tmp_path, capsys):
    jobs = [*sweep, "-m", "per_task=1,2"]
    assert main(jobs) == 0
    runs = sorted((tmp_path / "results/runs").iterdir())
    records = {run: (run / "records-0.jsonl").read_bytes() for run in runs}
    # As a kill in the second job would have left it.
    torn = next(run for run in runs if read_run(run)[1]["per_task"] == 2)
    (torn / "records-0.jsonl").write_bytes(records[torn][:-9])
    capsys.readouterr()
    assert main(jobs) == 0
    out = capsys.readouterr().out
    assert "is complete; fresh=true" in out and "ran 1 example" in out
    assert {
        run: (run / "records-0.jsonl").read_bytes() for run in (tmp_path / "results/runs").iterdir()
    } == records


def test_weights_that_cannot_be_read_are_told_before_the_first_job(sweep, local_folder, tmp_path, capsys):
    broken = tmp_path / "broken"
    shutil.copytree(local_folder, broken)
    (broken / "model.safetensors").write_bytes(b"torn")
    jobs = [o for o in sweep if not o.startswith("model.path=")]
    assert main([*jobs, "-m", f"model.path={broken},{local_folder}", "per_task=1"]) == 3
    err = capsys.readouterr().err
    assert "Error executing job" not in err and "Traceback" not in err
    assert len(err.splitlines()) == 1 and "broken cannot be read" in err
    assert not list((tmp_path / "results/runs").glob("*"))


@pytest.mark.slow
def test_a_job_that_fails_later_is_named_and_the_others_run(sweep, local_folder, tmp_path, capsys):
    misfit = tmp_path / "misfit"
    shutil.copytree(local_folder, misfit)
    config = json.loads((misfit / "config.json").read_text())
    # Nothing but loading the weights can tell.
    (misfit / "config.json").write_text(
        json.dumps(config | {"intermediate_size": 2 * config["intermediate_size"]})
    )
    jobs = [o for o in sweep if not o.startswith("model.path=")]
    assert main([*jobs, "-m", f"model.path={misfit},{local_folder}", "per_task=1"]) == 3
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("semkv-bench: job 0 (") and "failed: cannot load the model in" in last
    # The folder of the job that failed holds no record.
    (run,) = (path for path in (tmp_path / "results/runs").glob("*/records-0.jsonl") if path.read_text())
    frame, charter = read_run(run.parent)
    assert charter["model"] == local_folder.name and len(frame) == 3


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["out=x", "per_task=1,2"], "can hold one"),
        (["out=x", "per_task=1,2", "shard=1/2"], "can hold one"),
        (["out=x", "shard=1/2,1/2"], "names a shard twice: shard=1/2,1/2"),
        (["out=x", "shard=1/2,3/2"], "shard=3/2 must be i/K"),
    ],
)
def test_what_one_folder_cannot_hold(overrides, told):
    with pytest.raises(UsageError, match=told):
        check_sweeps("sweep", overrides)


def test_folders_and_shards_may_be_crossed():
    assert len(check_sweeps("sweep", ["shard=1/2,2/2", "out=x"])) == 2
    assert len(check_sweeps("sweep", ["shard=1/2,2/2", "quantizer=affine,turboquant"])) == 4


@pytest.mark.parametrize(
    ("command", "code", "told"),
    [
        (["sweep", "shard=0/4"], 2, "shard=0/4 must be i/K"),
        (["sweep", "shard=5/4"], 2, "shard=5/4 must be i/K"),
        (["sweep", "shard=x"], 2, "shard=x must be i/K"),
        (["plan", "shard=2"], 2, "shard=2 must be i/K"),
        (["recipe", "shard=1/2"], 2, "recipe judges whole sweeps; leave shard out"),
        (["regress", "shard=1/2"], 2, "regress judges whole sweeps; leave shard out"),
        (["sweep", "-m", "hydra/launcher=nope", "shard=1/2,2/2"], 2, "choose one of basic, joblib"),
    ],
)
def test_wrong_usage_is_one_line(command, code, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(command) == code
    err = capsys.readouterr().err
    assert told in err and len(err.strip().splitlines()) == 1
    assert not (tmp_path / "results").exists()


def test_a_missing_launcher_says_what_to_install(monkeypatch, capsys):
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(launchers, "version", absent)
    assert main(["sweep", "-m", "shard=1/2,2/2", "hydra/launcher=ray"]) == 3
    err = capsys.readouterr().err
    assert "pip install hydra-ray-launcher" in err and len(err.strip().splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local", "ray"])
def test_killed_workers_lose_nothing(launcher, sweep, tmp_path, monkeypatch, capsys):
    if launcher != "joblib" and "SEMKV_ALL_LAUNCHERS" not in os.environ:
        pytest.skip("ray and submitit take a minute each: SEMKV_ALL_LAUNCHERS=1 runs them, too")
    try:
        version(launchers.LAUNCHER_PACKAGES[launcher])
    except PackageNotFoundError:
        pytest.skip(f"{launcher} is not installed")
    # The last digits of a sum depend on the number of threads.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(multirun.__file__).parents[2]))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    wide = [*sweep, "per_task=12"]
    assert main([*wide, "out=alone"]) == 0
    torch.set_num_threads(threads)
    shards = [*wide, "-m", "shard=1/4,2/4,3/4,4/4", "out=shards", f"hydra/launcher={launcher}"]
    shards += ["hydra.launcher.n_jobs=2"] if launcher == "joblib" else []
    ended = Event()
    killer = Thread(target=_kill_writers, args=(tmp_path / "shards", 2, ended))
    killer.start()
    try:
        first = main(shards)
    finally:
        ended.set()
        killer.join()
    # Ray starts a lost job again by itself.
    assert first == (0 if launcher == "ray" else 3)
    capsys.readouterr()
    assert main(shards) == 0
    for run in ("alone", "shards"):
        assert len(read_run(tmp_path / run)[0]) == 12 * 3
        assert main(["cliff-report", f"run={run}"]) == 0
    reports = [(tmp_path / run / "report.json").read_bytes() for run in ("alone", "shards")]
    assert reports[0] == reports[1]


def _kill_writers(run: Path, wanted: int, ended: Event) -> None:
    """End ``wanted`` processes that write records of ``run``, as soon as something is recorded."""
    killed: set[int] = set()
    while len(killed) < wanted and not ended.is_set():
        if any(path.stat().st_size for path in run.glob("records-*")):
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    held = [Path(file.path).parent for file in process.open_files()]
                    if run in held and process.pid not in killed and len(killed) < wanted:
                        process.kill()
                        killed.add(process.pid)
        time.sleep(0.001)


@pytest.mark.slow
def test_multirun_takes_one_list_of_methods(sweep, tmp_path):
    assert main([*sweep, "-m", "methods=[affine,turboquant]", "per_task=1,2"]) == 0
    runs = [read_run(run)[0] for run in (tmp_path / "results/runs").iterdir()]
    assert sorted(map(len, runs)) == [5, 10]
    assert set(runs[0]["quantizer"].dropna()) == {"affine", "turboquant"}


def test_lists_of_methods_are_no_choices_of_a_multirun(sweep):
    with pytest.raises(UsageError, match="one list of methods"):
        multirun.multirun([*sweep[1:], "methods=[affine],[turboquant]"], None)
