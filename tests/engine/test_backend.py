"""The boundary: any engine that answers through it gets a sweep, records and statistics."""

import json
import sys
from types import SimpleNamespace

import pytest

from semkv_bench.cli import main
from semkv_bench.config.compose import build, compose_config
from semkv_bench.engine.transformers import TransformersBackend
from semkv_bench.errors import UsageError
from semkv_bench.models.shape import ModelShape
from semkv_bench.protocols.through import Through
from semkv_bench.settings.setting import FULL

PARROT = '''
from dataclasses import dataclass

from semkv_bench.engine.backend import Answers, Backend, Session
from semkv_bench.engine.outcome import Outcome
from semkv_bench.grid.levels import FULL_PRECISION, Storage
from semkv_bench.settings.setting import FULL, Setting


@dataclass(frozen=True)
class CacheType(Setting):
    """A setting that only this engine knows: so many bits a value, by its own word."""

    bits: float = 16.0

    def storage(self, head_dim, heads=1):
        return Storage(self.bits, self.bits, self.bits) if self.bits < 16 else FULL_PRECISION


class Parrot(Session):
    """Says the reference answer, but nothing below five bits."""

    label, revision, together = "parrot", "1", 3

    def __init__(self):
        self.calls, self.closed = [], False

    def describe(self):
        return {"engine_version": "parrot 1"}

    def answers(self, examples, settings, protocol, alone):
        self.calls.append(len(examples))
        for example, once_more in zip(examples, alone, strict=True):
            turn = [
                Outcome(s, tokens=[1], ended=True, context=len(example.input_ids), text=self.say(example, s))
                for s in settings
            ]
            yield Answers([turn], turn[:1] if once_more else None)

    def say(self, example, setting):
        return "" if getattr(setting, "bits", 16) < 5 else example.answers[0]

    def close(self):
        self.closed = True


SESSIONS = []


@dataclass(frozen=True)
class ParrotBackend(Backend):
    """Needs a tokenizer and no model."""

    name = "parrot"
    free = ("port",)
    types: tuple[str, ...] = ("f16",)
    port: int = 1
    temperature: float = 0.0
    noise_examples: int = 2

    def settings(self, simulated):
        return (FULL, *(CacheType(t, "uniform", "parrot", bits=float(t[1])) for t in self.types))

    def open(self, source):
        SESSIONS.append(Parrot())
        return SESSIONS[-1]
'''


@pytest.fixture
def own_engine(tmp_path, monkeypatch):
    """The two files that an engine is, in a folder of the user's own."""
    folder = tmp_path / "own"
    (folder / "engine").mkdir(parents=True)
    (folder / "own_parrot.py").write_text(PARROT)
    (folder / "engine/parrot.yaml").write_text(
        "_target_: own_parrot.ParrotBackend\ntypes: [q8, q4]\nport: 9\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("SEMKV_CONF", str(folder))
    yield folder
    sys.modules.pop("own_parrot", None)


def test_an_engine_of_ones_own_is_two_files_and_gets_records(own_engine, local_folder, tmp_path):
    assert len([path for path in own_engine.rglob("*") if path.is_file()]) == 2
    out = tmp_path / "run"
    task = ["task=synthetic", "task.length=300", "subset=[niah_noise]", "max_new_tokens=3", "per_task=4"]
    source = ["model=custom", f"model.path={local_folder}"]
    assert main(["sweep", "engine=parrot", *source, *task, f"out={out}"]) == 0
    records = [json.loads(line) for path in out.glob("records-*.jsonl") for line in path.open()]
    assert [r["setting"] for r in records] == ["full", "q8", "q4"] * 4
    assert {r["setting"]: r["score"] for r in records} == {"full": 1.0, "q8": 1.0, "q4": 0.0}
    assert {r["setting"]: r["effective_bits"] for r in records} == {"full": 16.0, "q8": 8.0, "q4": 4.0}
    # Witnesses that this engine cannot give are absent, not zero.
    for absent in ("kl", "top1_agreement", "quantized_reads", "coded_share", "batch_rows"):
        assert {r[absent] for r in records} == {None}
    assert {r["model"] for r in records} == {"parrot"}
    assert sum("alone_score" in r for r in records) == 2
    (session,) = sys.modules["own_parrot"].SESSIONS
    assert session.calls == [3, 1] and session.closed
    environment = json.loads((out / "environment.json").read_text())
    assert "parrot 1" in json.dumps(environment)
    charter = _charter(out)
    assert charter["engine"] == {
        "name": "parrot",
        "types": ["q8", "q4"],
        "temperature": 0.0,
        "noise_examples": 2,
    }
    assert charter["quantizer"] is None
    assert main(["cliff-report", f"run={out}"]) == 0


def test_nothing_is_estimated_for_an_engine_that_loads_the_model_itself(own_engine, local_folder, capsys):
    task = ["task=synthetic", "task.length=300", "subset=[niah_noise]", "max_new_tokens=3", "per_task=4"]
    command = ["plan", "engine=parrot", "model=custom", f"model.path={local_folder}", *task]
    assert main(command) == 0
    assert "engine=parrot loads the model itself; neither is estimated" in capsys.readouterr().out
    assert main([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["memory"] is None and told["time"] is None and told["examples"] == 4
    assert main([*command, "--calibrate"]) == 2
    assert "--calibrate times engine=transformers, not engine=parrot" in capsys.readouterr().err


def _charter(out):
    from omegaconf import OmegaConf

    return OmegaConf.to_container(OmegaConf.load(out / "protocol.yaml"))


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("engine.max_rows=x", "engine.max_rows=x must be a whole number of at least 1"),
        ("engine.max_rows=0", "engine.max_rows=0 must be a whole number of at least 1"),
        ("engine.teacher_tokens=null", "engine.teacher_tokens=None must be a whole number"),
        ("engine.temperature=warm", "engine.temperature=warm must be a number"),
        ("engine.memory_fraction=2", "engine.memory_fraction=2.0 must be above 0"),
    ],
)
def test_options_of_the_wrong_kind_are_one_clear_line(override, told):
    config = compose_config("sweep", [override])
    with pytest.raises(UsageError) as raised:
        build(config.engine, "engine")
    assert told in str(raised.value) and "\n" not in str(raised.value)


def test_what_changes_no_result_is_left_out_of_the_charter():
    assert TransformersBackend(max_rows=3, prefill_chunk=5).decided() == TransformersBackend().decided()
    assert TransformersBackend(temperature=1).decided() != TransformersBackend().decided()


def test_one_pass_is_not_cut_into_chunks():
    source = SimpleNamespace(shape=lambda: ModelShape.alike(2, 1, 8), check_packages=lambda: None)
    line = r"protocol=through reads question and answer in one pass; leave engine\.prefill_chunk out"
    with pytest.raises(UsageError, match=line):
        TransformersBackend(prefill_chunk=64).check(source, [FULL], Through())
