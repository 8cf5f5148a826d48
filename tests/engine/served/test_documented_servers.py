"""The documented commands for servers, run from the sweep to the report; a small server stands in for theirs."""

import json
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from semkv_bench.cli import main
from semkv_bench.engine.served.client import Client
from semkv_bench.engine.served.process import ServerProcess, free_port
from semkv_bench.records.folder import read_run

FAKE = Path(__file__).with_name("fake_server.py")
PAGE = Path(__file__).parents[3] / "docs" / "engines.md"
COMMANDS = [
    shlex.split(line)[1:]
    for line in PAGE.read_text().splitlines()
    if line.startswith("semkv-bench sweep engine=server")
]
STARTED = [command for command in COMMANDS if any(word.startswith("engine.command=") for word in command)]
RUNNING = [command for command in COMMANDS if any(word.startswith("engine.servers=") for word in command)]


def _small(command, folder, run):
    kept = [word for word in command if not word.startswith(("model=", "engine.command=", "engine.servers="))]
    small = ("task=synthetic", "subset=[niah_noise]", "task.length=200", "seeds=[0]", "per_task=3")
    return [*kept, "model=custom", f"model.path={folder}", *small, "engine.preset=vllm", f"out={run}"]


def test_the_page_has_both_ways():
    assert STARTED and RUNNING and len(STARTED) + len(RUNNING) == len(COMMANDS)


@pytest.mark.slow
@pytest.mark.parametrize("command", STARTED, ids=" ".join)
def test_servers_that_are_started(command, local_folder, tmp_path, capsys):
    run = tmp_path / "run"
    fake = f"{sys.executable} {FAKE} {{port}} type={{type}}"
    words = [*_small(command, local_folder, run), f"engine.command={fake}"]
    assert main(words) == 0
    frame, charter = read_run(run)
    assert list(charter["settings"]) == ["full", "fp8", "tq4"] and len(frame) == 9
    assert set(frame.protocol) == {"engine"} and frame[frame.setting == "full"].alone_same_tokens.all()
    parted = frame[frame.setting == "tq4"]
    assert (
        set(parted.agreement) == {0.0} and set(parted.parted_by) == {"token"} and set(parted.parted_at) == {0}
    )
    said = json.loads((run / "environment.json").read_text())["sessions"][-1]["servers"]
    assert said["fp8"]["type"] == "fp8_e4m3" and said["fp8"]["version"] == "9.9"
    assert main(words) == 0 and len(read_run(run)[0]) == 9
    assert main(["cliff-report", f"run={run}", "stats.resamples=200"]) == 0
    markdown = (run / "report.md").read_text()
    assert "What the servers said" in markdown and "the noise of the engine" in markdown
    capsys.readouterr()


@pytest.mark.parametrize("command", RUNNING, ids=" ".join)
def test_servers_that_run_already(command, local_folder, tmp_path):
    ports = {"bfloat16": free_port(), "fp8": free_port()}
    with ExitStack() as stack:
        for kind, port in ports.items():
            words = [sys.executable, str(FAKE), str(port), f"type={kind}"]
            server = stack.enter_context(ServerProcess(words, tmp_path / f"log-{kind}"))
            client = Client(f"http://127.0.0.1:{port}")
            server.wait_until(lambda client=client: client.get("/health") is not None, 60)
        (servers,) = [word for word in command if word.startswith("engine.servers=")]
        for documented, port in zip((8000, 8001), ports.values(), strict=True):
            servers = servers.replace(f":{documented}", f":{port}")
        assert main([*_small(command, local_folder, tmp_path / "run"), servers]) == 0
    frame, _ = read_run(tmp_path / "run")
    assert set(frame.setting) == {"full", "fp8"} and len(frame) == 6
