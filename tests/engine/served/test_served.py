"""Servers that answer, lie, die and go away."""

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import pytest

from semkv_bench.engine.served.client import Client, LlamaServer, OpenAIServer
from semkv_bench.engine.served.completion import Asked, coarse_kl
from semkv_bench.engine.served.llamacpp import LlamaCppBackend, check_bytes, check_caches, stored_caches
from semkv_bench.engine.served.presets import PRESETS, Said, preset_of
from semkv_bench.engine.served.process import ServerProcess, free_port
from semkv_bench.engine.served.server import ServerBackend, check_said
from semkv_bench.engine.served.setting import GGML_BITS, served_setting
from semkv_bench.errors import MissingError, SemkvError, UsageError
from semkv_bench.models.shape import ModelShape
from semkv_bench.plan.cost import cost_at
from semkv_bench.protocols import Generation, Prefill
from semkv_bench.protocols.engine import EngineProtocol
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
    shape_: ModelShape = field(default_factory=lambda: ModelShape.alike(6, 1, 64, 1000))

    def tokenizer(self):
        return Words()

    def shape(self):
        return self.shape_


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


def _vllm(*lies, types=None, **options):
    """The same server by OpenAI's interface, telling its type and room as vLLM does."""
    types = types or {"full": "bfloat16", "fp8": "fp8"}
    return _backend(*lies, types=types, **{"preset": "vllm", "top": 2, **options})


@pytest.mark.parametrize("takes_ids", [True, False])
def test_openai_servers_are_asked_by_ids_or_by_text(takes_ids):
    answers, said = _run(_vllm(takes_ids=takes_ids))
    full, fp8 = answers[0].turns[0]
    assert full.text == "15 16 17 18" and full.tokens == ([15, 16, 17, 18] if takes_ids else None)
    assert full.kl == 0 < fp8.kl and fp8.top1_agreement == 1
    assert said["fp8"] == {"type": "fp8", "capacity": 2000.0, "version": "9.9", "effect": "shown"}


def test_a_server_without_token_ids_is_pointed_to_text():
    with pytest.raises(SemkvError, match=r"refuses the request \(400\).*set engine.takes_ids=false"):
        _run(_vllm("words_only"))
    assert len(_run(_vllm("words_only", takes_ids=False))[0]) == 3


@pytest.mark.parametrize(
    ("lies", "words"),
    [
        (("ignores",), "fp8: all 3 answers and their log-probabilities equal those of full"),
        (("says=bfloat16",), "fp8: asked for fp8, the server stores bfloat16"),
        (("no_room",), r"fp8: the server has room for 1\.00 times the tokens of full"),
        (("cached",), "took 5 tokens from its prompt cache"),
        (("truncates",), "the server cut a prompt of 3 tokens"),
        (("other",), "counts 2 tokens in a prompt of 3"),
        (("retokenizes",), "its tokenizer is another"),
        (("nan",), "a log-probability that is not finite"),
        (("dies",), "it was started twice"),
        (("hollow",), "answered without a choice"),
    ],
)
def test_an_openai_server_that_lies_is_caught(lies, words):
    with pytest.raises(SemkvError, match=words):
        _run(_vllm(*lies, attempts=2))


@pytest.mark.parametrize(("backend", "trouble"), [(_backend, "busy"), (_vllm, "limits"), (_vllm, "drops")])
def test_a_server_in_trouble_is_waited_for(backend, trouble):
    types = {"full": "f16", "q4_0": "q4_0"} if backend is _backend else {"full": "bfloat16", "fp8": "fp8"}
    answers, _ = _run(backend(trouble, types=types, concurrency=1, teacher_tokens=0), count=1)
    assert len(answers) == 1


@pytest.mark.parametrize("backend", [_backend, _vllm])
def test_a_server_that_dies_is_started_once_more_and_no_answer_comes_twice(backend, tmp_path, caplog):
    lie = f"dies_once={tmp_path / 'died'}"
    answers, _ = _run(backend(lie, concurrency=1, teacher_tokens=0, attempts=2), count=6)
    assert [answer.turns[0][0].tokens[0] for answer in answers] == [15, 16, 17, 18, 19, 20]
    assert "started once more for 4 examples" in caplog.text


class Says(Client):
    """A server that answers everything with ``content``."""

    content: dict

    def post(self, path, body):
        return self.content


@pytest.mark.parametrize(
    ("dialect", "content"),
    [
        (OpenAIServer, {"choices": ["no mapping"]}),
        (OpenAIServer, {"choices": [{"text": None}]}),
        (OpenAIServer, {"choices": [{"text": "a", "logprobs": {"top_logprobs": [["no", "mapping"]]}}]}),
        (OpenAIServer, {"choices": [{"text": "a"}], "usage": ["no mapping"]}),
        (LlamaServer, {"content": None, "tokens": [1]}),
        (LlamaServer, {"content": "a", "tokens": 5}),
        (LlamaServer, {"content": "a", "tokens": [1], "completion_probabilities": [{"top_logprobs": [{}]}]}),
    ],
)
def test_an_answer_of_another_form_is_one_line(dialect, content):
    client = Says("http://127.0.0.1:1")
    object.__setattr__(client, "content", content)
    server = dialect(client, "m") if dialect is OpenAIServer else dialect(client)
    with pytest.raises(SemkvError, match=r"127\.0\.0\.1:1 answers in another form than servers of this kind"):
        server.complete(Asked((1, 2), "", 4))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"teacher_tokens": -1}, "engine.teacher_tokens=-1 must be a whole number"),
        ({"logprobs": "many"}, "engine.logprobs=many must be a whole number"),
        ({"request_seconds": 0}, "engine.request_seconds=0 must be a number of seconds above 0"),
        ({"start_seconds": "long"}, "engine.start_seconds=long must be"),
        ({"headers": "Bearer x"}, "must name headers and their texts"),
        ({"headers": {"X": 5}}, "must name headers and their texts"),
    ],
)
def test_options_of_a_server_are_checked_before_it_is_asked(given, said):
    with pytest.raises(UsageError, match=said):
        ServerBackend(servers={"full": "http://127.0.0.1:1"}, **given)


def test_running_servers_are_asked_where_they_are(tmp_path):
    ports = [free_port(), free_port()]
    commands = [
        [sys.executable, str(FAKE), str(port), f"type={kind}"]
        for port, kind in zip(ports, ("bfloat16", "fp8"), strict=True)
    ]
    with ExitStack() as stack:
        for number, command in enumerate(commands):
            server = stack.enter_context(ServerProcess(command, tmp_path / f"log{number}"))
            client = Client(f"http://127.0.0.1:{ports[number]}")
            server.wait_until(lambda client=client: client.get("/health") is not None, 60)
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        servers = {"full": urls[0], "mine": {"url": f"{urls[1]}/v1", "bits": 8}}
        answers, said = _run(ServerBackend(servers=servers, preset="vllm", concurrency=4), count=5)
        assert len(answers) == 5 and said["mine"]["type"] == "fp8"
        wrong = {**servers, "mine": {"url": urls[1], "bits": 4}}
        with pytest.raises(SemkvError, match="mine: the server stores fp8, of 8 bits a value, not 4"):
            _run(ServerBackend(servers=wrong, preset="vllm"))
    with pytest.raises(
        MissingError, match=f"full: no server answers at http://127.0.0.1:{ports[0]}; start it"
    ):
        _run(ServerBackend(servers=servers, preset="vllm"))


def test_full_that_does_not_tell_its_bits_is_said(caplog):
    for types, words in (
        ({"full": "auto", "fp8": "fp8"}, "auto"),
        ({"full": "fp8", "small": "fp8"}, "stores fp8"),
    ):
        with pytest.raises(SemkvError, match=f"full: the server .*{words}"):
            _run(_vllm(types=types))
    unknown = {"preset": "openai", "teacher_tokens": 0, "bits": {"q4_0": 4.5}}
    types = {"full": "auto", "q4_0": "q4_0"}
    with pytest.raises(SemkvError, match="auto"):
        _run(_vllm(types=types, **unknown))
    answers, _ = _run(_vllm(types=types, **{**unknown, "bits": {"full": 16, "q4_0": 4.5}}))
    assert len(answers) == 3 and "does not tell how it stores its cache" in caplog.text


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
    with pytest.raises(
        SemkvError, match=r"ended before it was ready .*; its last lines: .*KeyError: 'nonsense'"
    ):
        _run(_backend(types={"full": "nonsense"}))


def test_last_words_are_the_servers_own(tmp_path):
    """The supervisor ends with the server and adds nothing, whether the server printed anything or not."""
    for number, (code, words) in enumerate(
        [("raise SystemExit('no such type')", "no such type"), ("", None)]
    ):
        with ServerProcess([sys.executable, "-c", code], tmp_path / f"log{number}") as process:
            end = f"its last lines: {words}$" if words else "it printed nothing$"
            with pytest.raises(SemkvError, match=end):
                process.wait_until(lambda: False, 60)
    sleeps = [sys.executable, "-c", "import time; time.sleep(60)"]
    with (
        ServerProcess(sleeps, tmp_path / "log", name="slow") as process,
        pytest.raises(SemkvError, match=r"not ready within 0\.2 s \(slow\).*engine.start_seconds"),
    ):
        process.wait_until(lambda: False, 0.2)


def _alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, None])
def test_no_server_outlives_whoever_started_it(tmp_path, number):
    """Killed, ended, interrupted or failed (None): server and what it started are gone, by their ids."""
    server, log = tmp_path / "server.py", tmp_path / "log"
    server.write_text(
        "import os, subprocess, sys, time\n"
        "wait = [sys.executable, '-c', 'import time; time.sleep(99)']\n"
        "child = subprocess.Popen(wait, start_new_session=True)\n"
        "print(os.getpid(), child.pid, flush=True)\n"
        "time.sleep(99)\n"
    )
    inside = (
        "import signal, sys, time, pathlib\n"
        # A shell that starts tests in the background has children ignore it.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from semkv_bench.engine.served.process import ServerProcess\n"
        f"log = pathlib.Path({str(log)!r})\n"
        f"with ServerProcess([sys.executable, {str(server)!r}], log) as process:\n"
        "    process.wait_until(lambda: len(log.read_text().split()) == 2, 60)\n"
        f"    time.sleep({0 if number is None else 99})\n"
        "    raise RuntimeError('failed')\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", inside], env=dict(os.environ), stderr=subprocess.DEVNULL)
    for _ in range(600):
        if log.exists() and len(log.read_text().split()) == 2:
            break
        time.sleep(0.1)
    pids = [int(word) for word in log.read_text().split()]
    assert len(pids) == 2
    if number is not None:
        assert all(map(_alive, pids))
        owner.send_signal(number)
    assert owner.wait(30)
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


def test_the_bytes_of_llamacpp_must_shrink_with_the_bits():
    full = {"mib": 45.0, "cells": 2048}
    q8_0 = served_setting("q8_0", "q8_0", "e", None, GGML_BITS)
    check_bytes(q8_0, {"mib": 23.91, "cells": 2048}, full)
    check_bytes(q8_0, {"mib": 11.95, "cells": 1024}, full)
    with pytest.raises(
        SemkvError, match=r"45 MiB for 2048 tokens are 16\.00 bits a value beside those of full, not 8\.5"
    ):
        check_bytes(q8_0, full, full)


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
        ("f16", "must be a list"),
        (["f16", "q8_0/q4_0/q4_0"], "must be TYPE or KEYS/VALUES"),
        (["f16", "q8_0/"], "no cache type ''"),
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
        ({"servers": {"full": "u"}}, "full has no url such as http://"),
        ({"servers": "http://h"}, "must name settings"),
        ({"servers": {"full": "http://h"}, "concurrency": 0}, "engine.concurrency=0 must be"),
        (
            {"servers": {"full": "http://h", "a": {"url": "http://h", "bits": 99}}},
            "the bits of a, 99, must be",
        ),
        (
            {"servers": {"full": "http://h", "a": {"url": "http://h", "bits": "x"}}},
            "the bits of a, x, must be",
        ),
        ({"command": "run 'a {type} {port}", "types": {"full": "f16"}}, "is no command line"),
        ({"command": "run {type} {port}", "types": {"full": "f16", "a": "q8_0/q4_0"}}, "apart"),
    ):
        with pytest.raises(UsageError, match=words):
            ServerBackend(**options).settings(None)
    both = ServerBackend(
        command="run -k {keys} -v {values} {port}",
        types={"full": "f16", "a": "q8_0/q4_0"},
        preset="llama-server",
    )
    assert both.settings(None)[1].bits == 6.5


def test_native_layers_are_counted_in_16_bits():
    backend = ServerBackend(
        servers={
            "full": {"url": "http://h", "type": "f16"},
            "tq": {"url": "http://h", "type": "turboquant_4bit_nc"},
        },
        preset="vllm",
    )
    _, tq = backend.settings(None)
    assert tq.planned(backend.shape(Source()).cache, 10).cache_bits == pytest.approx(
        (4 * 16 + 2 * 4.1875) / 6
    )


def test_layers_with_a_window_are_coded_like_the_others():
    """Five of six hold 100 tokens at most; the engine codes them, too, which a simulated cache does not."""
    sliding = replace(Source().shape().cache[0], window=100, coded=False)
    source = Source(shape_=ModelShape((*[sliding] * 5, replace(sliding, window=None, coded=True)), 1000))
    backend = LlamaCppBackend(types=["f16", "q8_0"])
    shape = backend.shape(source)
    assert len(shape.quantized_layers) == shape.layers == 6
    for setting, bits in zip(backend.settings(None), (16, 8.5), strict=True):
        cost = cost_at(setting, shape, EngineProtocol(), 1000, (16,))
        assert cost.cache_bits == bits
        assert cost.nbytes == bits / 8 * (5 * 100 + 1000) * 2 * 64


def test_what_other_servers_say_is_held_against_what_was_asked():
    vllm = PRESETS["vllm"]
    full = served_setting("full", "bfloat16", "vllm", None, vllm.bits)
    fp8 = served_setting("fp8", "fp8", "vllm", None, vllm.bits)
    for said in (Said("auto", None), Said("fp8", None)):
        with pytest.raises(SemkvError, match="full: the server"):
            check_said(full, said, None, vllm, layers=32)
    check_said(full, Said("bfloat16", 1000.0), None, vllm, layers=32)
    check_said(fp8, Said("fp8_e4m3", 1990.0), Said("bfloat16", 1000.0), vllm, layers=32)
    with pytest.raises(SemkvError, match=r"room for 1\.00 times the tokens"):
        check_said(fp8, Said("fp8", 1000.0), Said("bfloat16", 1000.0), vllm, layers=32)
    with pytest.raises(SemkvError, match="asked for fp8, the server stores bfloat16"):
        check_said(fp8, Said("bfloat16", None), None, vllm, layers=32)
    # Four of the 32 layers stay in 16 bits: 5.66 bits over all of them.
    tq4 = served_setting("tq4", "turboquant_4bit_nc", "vllm", None, vllm.bits, native_layers=4)
    check_said(tq4, Said("turboquant_4bit_nc", 2825.0), Said("bfloat16", 1000.0), vllm, layers=32)
    with pytest.raises(SemkvError, match=r"where 5\.66406 bits would give 2\.82 times"):
        check_said(tq4, Said("turboquant_4bit_nc", 1400.0), Said("bfloat16", 1000.0), vllm, layers=32)


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
