"""Servers that answer, lie, die and go away."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from semkv_bench.engine.served.completion import coarse_kl
from semkv_bench.engine.served.llamacpp import LlamaCppBackend, check_caches, stored_caches
from semkv_bench.engine.served.presets import PRESETS, Said, preset_of
from semkv_bench.engine.served.process import ServerProcess, free_port
from semkv_bench.engine.served.server import ServerBackend, check_said
from semkv_bench.engine.served.setting import GGML_BITS, served_setting
from semkv_bench.errors import MissingError, SemkvError, UsageError
from semkv_bench.models.shape import ModelShape
from semkv_bench.protocols import Generation, Prefill
from semkv_bench.tasks import Example

FAKE = Path(__file__).with_name("fake_server.py")


class Words:
    """A tokenizer of numbers."""

    def __call__(self, text, add_special_tokens=True, verbose=False):
        return {"input_ids": [int(word) for word in text.split()]}

    def decode(self, ids, skip_special_tokens=False):
        return " ".join(map(str, ids))


@dataclass
class Source:
    name: str = "m"

    def tokenizer(self):
        return Words()

    def shape(self):
        return ModelShape.alike(6, 1, 64, 1000)


def _examples(count=3):
    return [Example("t", str(i), 0, (10 + i, 20, 30), ("x",), 4, target_ids=(7, 8)) for i in range(count)]


def _backend(*lies, types=None, **options):
    command = f"{sys.executable} {FAKE} {{port}} type={{type}} {' '.join(lies)}"
    types = types or {"full": "f16", "q8_0": "q8_0", "q4_0": "q4_0"}
    settings = {"preset": "llama-server", "start_seconds": 60, "attempts": 5, "teacher_tokens": 2, **options}
    return ServerBackend(command=command, types=types, **settings)


def _run(backend, count=3):
    settings = backend.settings(None)
    with backend.open(Source()) as session:
        answers = list(
            session.answers(
                _examples(count), settings, backend.protocol(Prefill()), [True] + [False] * (count - 1)
            )
        )
        return answers, session.notes()["servers"]


def test_every_setting_is_asked_and_priced():
    answers, said = _run(_backend())
    assert [[outcome.setting.name for outcome in answer.turns[0]] for answer in answers] == [
        ["full", "q8_0", "q4_0"]
    ] * 3
    full, q8, q4 = answers[0].turns[0]
    assert full.tokens == q8.tokens != q4.tokens and not full.ended
    assert full.kl == 0 and 0 < q8.kl < q4.kl and q4.top1_agreement == 1
    assert [o.setting.cost(o.stored).cache_bits for o in (full, q8, q4)] == [16, 8.5, 4.5]
    assert answers[0].alone[0].tokens == full.tokens and answers[1].alone is None
    assert said["q4_0"]["type"] == "q4_0" and said["q8_0"]["effect"] == "shown"


@pytest.mark.parametrize(
    ("lies", "words"),
    [
        (("ignores",), "q8_0: all 3 answers and their log-probabilities equal those of full"),
        (("says=f16",), "q8_0: asked for q8_0, the server stores f16"),
        (("cached",), "took 5 tokens from its prompt cache"),
        (("truncates",), "the server cut a prompt of 3 tokens"),
        (("other",), "counts 2 tokens in a prompt of 3"),
        (("retokenizes",), "its tokenizer is another"),
        (("nan",), "a log-probability that is not finite"),
        (("dies",), "it was started twice"),
    ],
)
def test_a_server_that_lies_is_caught(lies, words):
    with pytest.raises(SemkvError, match=words):
        _run(_backend(*lies, attempts=2))


def test_a_busy_server_is_waited_for():
    answers, _ = _run(_backend("busy", types={"full": "f16", "q4_0": "q4_0"}, concurrency=1), count=1)
    assert len(answers) == 1


def test_a_server_that_never_starts_is_named():
    with pytest.raises(MissingError, match="no program '/nowhere/server'"):
        _run(
            ServerBackend(
                command="/nowhere/server {type} {port}",
                types={"full": "f16"},
                preset="openai",
                start_seconds=20,
            )
        )
    with pytest.raises(SemkvError, match="ended before it was ready"):
        _run(_backend(types={"full": "nonsense"}))


def _alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_server_outlives_whoever_started_it(tmp_path, number):
    server = tmp_path / "server.py"
    server.write_text(
        "import os, subprocess, sys, time\n"
        "wait = [sys.executable, '-c', 'import time; time.sleep(99)']\n"
        "child = subprocess.Popen(wait, start_new_session=True)\n"
        "print(os.getpid(), child.pid, flush=True)\n"
        "time.sleep(99)\n"
    )
    inside = (
        "import sys, time, pathlib\n"
        "from semkv_bench.engine.served.process import ServerProcess\n"
        'code = \'import os,subprocess,sys,time; p=subprocess.Popen([sys.executable,"-c","import time;time.sleep(99)"],'
        "start_new_session=True); print(os.getpid(), p.pid, flush=True); time.sleep(99)'\n"
        f"with ServerProcess([sys.executable, '-c', code], pathlib.Path({str(tmp_path / 'log')!r})):\n"
        "    time.sleep(99)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", inside], env=dict(os.environ))
    log = tmp_path / "log"
    for _ in range(600):
        if log.exists() and len(log.read_text().split()) == 2:
            break
        time.sleep(0.1)
    pids = [int(word) for word in log.read_text().split()]
    assert len(pids) == 2 and all(map(_alive, pids))
    owner.send_signal(number)
    owner.wait(30)
    for _ in range(200):
        if not any(map(_alive, pids)):
            break
        time.sleep(0.1)
    assert not any(map(_alive, pids))


def test_what_llamacpp_says_of_its_cache_must_be_what_was_asked():
    line = (
        "llama_kv_cache: size =   18.28 MiB (  2048 cells,  30 layers,  1/1 seqs), "
        "K (q4_0):    6.33 MiB, V (q8_0):   11.95 MiB"
    )
    (cache,) = stored_caches(line)
    assert (cache.cells, cache.layers, cache.key_type, cache.value_mib) == (2048, 30, "q4_0", 11.95)
    check_caches(served_setting("q4_0/q8_0", "q4_0/q8_0", "e", None, GGML_BITS), [cache])
    with pytest.raises(SemkvError, match="asked for q4_0/q4_0, the server stores q4_0/q8_0"):
        check_caches(served_setting("q4_0", "q4_0", "e", None, GGML_BITS), [cache])
    with pytest.raises(SemkvError, match="do not agree with"):
        check_caches(
            served_setting("a", "q4_0/q8_0", "e", None, GGML_BITS),
            stored_caches(line.replace("6.33", "23.91")),
        )
    with pytest.raises(SemkvError, match="does not say how it stores"):
        check_caches(served_setting("q4_0", "q4_0", "e", None, GGML_BITS), [])


def test_types_of_llamacpp_become_settings():
    backend = LlamaCppBackend(types=["f16", "q4_0", "q8_0/q4_0", "q8_0"])
    assert [(s.name, s.bits) for s in backend.settings(None)] == [
        ("full", 16),
        ("q8_0", 8.5),
        ("q8_0/q4_0", 6.5),
        ("q4_0", 4.5),
    ]
    assert backend.protocol(Prefill()).name == "engine"
    with pytest.raises(UsageError, match="codes while it prefills"):
        backend.protocol(Generation())
    for types, words in (
        (["q8_0"], "must begin with the reference"),
        (["f16", "q9"], "no cache type 'q9'"),
        ([], "must begin"),
    ):
        with pytest.raises(UsageError, match=words):
            LlamaCppBackend(types=types)
    with pytest.raises(UsageError, match="more than once"):
        LlamaCppBackend(types=["f16", "q8_0", "q8_0"]).settings(None)


def test_servers_are_told_by_their_command_and_priced_with_native_layers():
    assert preset_of("vllm serve m --kv-cache-dtype {type}").name == "vllm"
    assert preset_of("python -m sglang.launch_server").name == "sglang"
    assert (
        preset_of("trtllm-serve m").name == "trtllm"
        and preset_of("./llama-server -m x").name == "llama-server"
    )
    assert preset_of("my-own-thing").name == "openai"
    backend = ServerBackend(
        command="vllm serve m --kv-cache-dtype {type} --port {port}",
        types={"full": "bfloat16", "fp8": "fp8_e4m3", "tq4": "turboquant_4bit_nc"},
    )
    full, fp8, tq4 = backend.settings(None)
    assert (full.bits, fp8.bits, tq4.bits, tq4.native_layers) == (16, 8, 4.1875, 4)
    with pytest.raises(UsageError, match=r"not known; give them: engine.bits=\{x: 8\}"):
        ServerBackend(servers={"full": "http://h", "x": "http://h"}, preset="openai").settings(None)
    for options, words in (
        ({}, "needs one of"),
        ({"command": "vllm {type}", "types": {"full": "f16"}}, "needs {port}"),
        ({"servers": {"a": "u"}}, "named full"),
        ({"servers": {"full": "u"}, "preset": "x"}, "not known"),
        ({"servers": {"full": "u"}, "temperature": 1.0}, "greedily"),
    ):
        with pytest.raises(UsageError, match=words):
            ServerBackend(**options)


def test_native_layers_are_counted_in_16_bits():
    backend = ServerBackend(
        servers={"full": {"url": "u", "type": "f16"}, "tq": {"url": "u", "type": "turboquant_4bit_nc"}},
        preset="vllm",
    )
    _, tq = backend.settings(None)
    session = backend.open(Source())
    assert tq.cost(session._stored(tq, 10)).cache_bits == pytest.approx((4 * 16 + 2 * 4.1875) / 6)


def test_what_other_servers_say_is_held_against_what_was_asked():
    vllm = PRESETS["vllm"]
    full = served_setting("full", "bfloat16", "vllm", None, vllm.bits)
    fp8 = served_setting("fp8", "fp8", "vllm", None, vllm.bits)
    for said in (Said("auto", None), Said("fp8", None)):
        with pytest.raises(SemkvError, match="full: the server"):
            check_said(full, said, None, vllm)
    check_said(full, Said("bfloat16", 1000.0), None, vllm)
    check_said(fp8, Said("fp8_e4m3", 1990.0), Said("bfloat16", 1000.0), vllm)
    with pytest.raises(SemkvError, match=r"room for 1\.00 times the tokens"):
        check_said(fp8, Said("fp8", 1000.0), Said("bfloat16", 1000.0), vllm)
    with pytest.raises(SemkvError, match="asked for fp8, the server stores bfloat16"):
        check_said(fp8, Said("bfloat16", None), None, vllm)


def test_coarse_kl_by_hand_is_a_lower_bound():
    from math import log

    p, q = {1: log(0.5), 2: log(0.3)}, {1: log(0.25), 3: log(0.6)}
    assert coarse_kl(p, q) == pytest.approx(0.5 * log(2) + 0.5 * log(0.5 / 0.75))
    assert coarse_kl(p, p) == 0


def test_a_free_port_is_free_and_a_process_knows_its_end(tmp_path):
    assert free_port() != 0
    gone = ServerProcess([sys.executable, "-c", "print('gone')"], tmp_path / "log")
    with gone as process, pytest.raises(SemkvError, match="gone"):
        process.wait_until(lambda: False, 60)
