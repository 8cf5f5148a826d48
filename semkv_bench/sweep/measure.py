"""What a run's setting takes in real buffers: ``SemKVCache`` beside a plain cache, on the run's own examples."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from omegaconf import DictConfig, OmegaConf
from transformers.cache_utils import Cache, DynamicCache
from yaml import YAMLError

from semkv_bench.checks import whole
from semkv_bench.config.compose import check_config, compose_config
from semkv_bench.engine.outcome import Request, request_of
from semkv_bench.engine.prefill import prefill
from semkv_bench.engine.sampling import chooser
from semkv_bench.errors import CheckFailed, MissingError, UsageError
from semkv_bench.files import parse_json, write_atomically
from semkv_bench.importance import metric
from semkv_bench.models.load import LoadedModel
from semkv_bench.packed import CacheBytes, SemKVCache
from semkv_bench.plan.plan import Plan, make_plan
from semkv_bench.records.charter import require_same
from semkv_bench.records.folder import read_run
from semkv_bench.records.runs import RUNS, check_run, newest_run
from semkv_bench.records.schema import EXAMPLE
from semkv_bench.settings.setting import FULL, Setting
from semkv_bench.sweep.measured import MEASURED
from semkv_bench.tasks import Example

__all__ = ["measure", "measure_run"]

_WARM_UP = 4  # tokens that are generated before any is timed


@dataclass(frozen=True)
class _Answer:
    """What one cache answered, how long that took, and what it held at the end."""

    tokens: list[int]
    prefill_seconds: float
    decode_seconds: float
    steps: int
    cache: Cache


def measure(config: DictConfig) -> tuple[dict[str, Any], Path]:
    """Measure as the keys of ``conf/measure.yaml`` say; the content of ``measure.json`` and where it was written.

    Raises:
        MissingError: no run, or no report to take the operating point from.
        CheckFailed: the report has no operating point.
        UsageError: the run cannot be measured so, or its configuration now makes another run.
    """
    path = newest_run() if config.run is None else Path(config.run).expanduser()
    if path is None:
        raise MissingError(f"there is no run under {RUNS}; run `semkv-bench sweep` first, or give run=DIR")
    check_run(path)
    whole("examples", config.examples, 1)
    name = config.setting or _operating_point(path)
    return measure_run(path, _plan_of(path), name, config.examples, config.attention)


def measure_run(
    path: Path, plan: Plan, name: str, examples: int, attention: str = "dequantize"
) -> tuple[dict[str, Any], Path]:
    """Generate on ``examples`` of a run's recorded examples with the setting ``name`` packed and with a plain cache.

    Raises UsageError where that cannot be: an engine that is not ours, answers by chance, a setting that cannot be
    packed. Returns the content of ``measure.json`` and its path.
    """
    setting = next((one for one in plan.settings if one.name == name), None)
    if setting is None:
        raise UsageError(
            f"there is no setting {name} in {path}; it has {', '.join(s.name for s in plan.settings)}"
        )
    _check(plan, path)
    frame, _ = read_run(path)
    recorded = frame.set_index([*EXAMPLE, "setting"])
    chosen = _spread([e for e in plan.examples if (*e.unit, name) in recorded.index], examples)
    if not chosen:
        raise MissingError(f"{path} holds no record of {name}; run the sweep again to continue it")
    loaded = plan.source.load()
    bench = _Bench(loaded, setting, plan, attention)
    bench.warm_up(chosen[0])
    rows = []
    for number, example in enumerate(chosen):
        records = [recorded.loc[(*example.unit, of)] for of in (name, "full")]
        rows.append(_row(example, plan, bench.both(example, number), records, loaded))
    content = {
        "setting": name,
        "charter": require_same(path, plan.charter)["hash"],
        "model": loaded.label,
        "device": str(loaded.device),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "attention": attention,
        "layout": "aligned" if attention == "packed" and setting.aligns else "dense",
        **_summed(rows),
        "examples": rows,
    }
    target = path / MEASURED
    write_atomically(target, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    return content, target


def _operating_point(path: Path) -> str:
    try:
        point = parse_json((path / "report.json").read_bytes())["operating_point"]
    except OSError as error:
        raise MissingError(
            f"{path} has no report to take the operating point from: semkv-bench cliff-report {path}, or name a "
            "setting: setting=NAME"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path / 'report.json'} is damaged; write it anew: semkv-bench cliff-report {path}"
        ) from error
    if point is None:
        raise CheckFailed(f"the report of {path} has no operating point; name a setting: setting=NAME")
    return point["setting"]


def _plan_of(path: Path) -> Plan:
    """The plan that a run folder was made by; UsageError if its configuration gives another one by now."""
    file = path / "config.yaml"
    if not file.exists():
        raise MissingError(f"{path} has no config.yaml, which says what its examples are")
    try:
        written = OmegaConf.load(file)
    except (OSError, ValueError, YAMLError) as error:
        raise UsageError(f"{file} is damaged: {str(error).splitlines()[0]}") from error
    if not isinstance(written, DictConfig):
        raise UsageError(f"{file} is damaged: it holds no keys")
    known = compose_config("sweep")
    kept = OmegaConf.masked_copy(written, [key for key in written if key in known])
    try:
        config = check_config("sweep", OmegaConf.merge(kept, {"fresh": False, "shard": None}))
    except UsageError as error:
        raise UsageError(f"{file} is damaged: {error}") from error
    plan = make_plan(config)
    require_same(path, plan.charter)
    return plan


def _check(plan: Plan, path: Path) -> None:
    if not plan.engine.simulates:
        raise UsageError(
            f"{path} was run on {plan.engine.name}, which stores by itself; measure runs SemKVCache where "
            "engine=transformers did"
        )
    if plan.engine.temperature:
        raise UsageError(
            f"{path} drew its answers by chance; measure compares greedy ones (engine.temperature=0)"
        )
    if any(example.turns > 1 for example in plan.examples):
        raise UsageError(f"{path} holds conversations; measure takes runs of single questions")


def _spread(examples: Sequence[Example], count: int) -> list[Example]:
    count = min(count, len(examples))
    return [examples[i * len(examples) // count] for i in range(count)]


class _Bench:
    """A loaded model that answers with one cache and with the other."""

    def __init__(self, loaded: LoadedModel, setting: Setting, plan: Plan, attention: str):
        self.loaded, self.setting, self.rule, self.attention = loaded, setting, plan.protocol.rule, attention
        # What a cache alone cannot know.
        self.given = [m for m in sorted(setting.metrics) if not metric(m).needs.in_cache]

    def warm_up(self, example: Example) -> None:
        """Answer a few tokens with either cache."""
        for cache in self._caches(example):
            _generate(self.loaded, cache, request_of(example, self.loaded.eos_ids), _WARM_UP)

    def both(self, example: Example, number: int) -> tuple[_Answer, _Answer]:
        """Answers with the packed and with the plain cache; which is first alternates."""
        caches = list(self._caches(example))
        answers: dict[int, _Answer] = {}
        for place in (0, 1) if number % 2 == 0 else (1, 0):
            request = request_of(example, self.loaded.eos_ids)
            answers[place] = _generate(self.loaded, caches[place], request, request.max_new_tokens)
        return answers[0], answers[1]

    def _caches(self, example: Example) -> Iterator[Cache]:
        config = self.loaded.model.config
        scores = None
        if self.given:
            scores = prefill(self.loaded, example.input_ids[:-1], self.given, example.seed).scores
        yield SemKVCache(
            config,
            self.setting,
            seed=example.seed,
            parts=self.rule.parts,
            block=self.rule.block,
            attention=self.attention,
            importance=scores,
        )
        yield DynamicCache(config=config)


@torch.inference_mode()
def _generate(loaded: LoadedModel, cache: Cache, request: Request, limit: int) -> _Answer:
    """Greedy tokens without the stop token, as a sweep chooses them: the prompt but its last token first."""
    ids = torch.tensor([list(request.input_ids)], device=loaded.device)
    choose, keyword = chooser(request, 0, 0.0), {loaded.cache_keyword: cache}
    began = _now(loaded)
    if isinstance(cache, SemKVCache):
        cache.prefill(loaded.model, ids)
    else:
        loaded.decoder(input_ids=ids[:, :-1], use_cache=True, **keyword)
    fed, middle = ids[:, -1:], _now(loaded)
    tokens: list[int] = []
    steps = 0
    while len(tokens) < limit:
        logits = loaded.model(input_ids=fed, use_cache=True, logits_to_keep=1, **keyword).logits
        steps += 1
        token = int(choose(logits[:, -1].float(), [len(tokens)])[0])
        if token in request.stop_ids:
            break
        tokens.append(token)
        fed = torch.tensor([[token]], device=loaded.device)
    return _Answer(tokens, middle - began, _now(loaded) - middle, steps, cache)


def _now(loaded: LoadedModel) -> float:
    if loaded.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _row(
    example: Example,
    plan: Plan,
    answers: tuple[_Answer, _Answer],
    records: Sequence[pd.Series],
    loaded: LoadedModel,
) -> dict[str, Any]:
    """One example: bytes of both caches beside the record's, seconds, and how the answers compare with the sweep's."""
    packed, plain = answers
    tokens = packed.cache.get_seq_length()
    return {
        **dict(zip(EXAMPLE, example.unit, strict=True)),
        "cache_tokens": tokens,
        "bytes": _bytes(packed.cache.nbytes),
        "plain_bytes": sum(_held(layer) for layer in plain.cache.layers),
        "bytes_in_16_bits": _in_16_bits(packed.cache.nbytes, loaded.dtype.itemsize),
        "full_bytes_in_16_bits": FULL.planned(plan.shape.cache, tokens).full_bytes,
        "recorded_bytes": _recorded(records[0], "cache_bytes"),
        "recorded_cache_bits": _recorded(records[0], "cache_bits"),
        "packed": _answer_content(packed, records[0], loaded),
        "plain": _answer_content(plain, records[1], loaded),
    }


def _answer_content(answer: _Answer, record: pd.Series, loaded: LoadedModel) -> dict[str, Any]:
    text = loaded.tokenizer.decode(answer.tokens, skip_special_tokens=True)
    same = text == record["prediction"] and len(answer.tokens) == record["new_tokens"]
    return {
        "new_tokens": len(answer.tokens),
        "prefill_seconds": round(answer.prefill_seconds, 4),
        "decode_seconds": round(answer.decode_seconds, 4),
        "steps": answer.steps,
        "as_in_sweep": bool(same),
        "first_difference": None if same else _first_difference(answer.tokens, record["prediction"], loaded),
    }


def _first_difference(tokens: Sequence[int], recorded: str, loaded: LoadedModel) -> int:
    """How many tokens are read before the text leaves the recorded one."""
    for count in range(len(tokens), 0, -1):
        if recorded.startswith(loaded.tokenizer.decode(tokens[:count], skip_special_tokens=True)):
            return count
    return 0


def _bytes(held: CacheBytes) -> dict[str, int]:
    return {**asdict(held), "total": held.total}


def _in_16_bits(held: CacheBytes, itemsize: int) -> int:
    """Bytes where a token that is not coded takes 16 bits a value, whatever type the model computes in here."""
    return held.packed + (held.open + held.sliding) * 2 // itemsize


def _held(layer: Any) -> int:
    parts = (getattr(layer, name, None) for name in ("keys", "values"))
    return sum(part.untyped_storage().nbytes() for part in parts if part is not None)


def _recorded(record: pd.Series, name: str) -> float | None:
    found = record.get(name)
    return None if found is None or pd.isna(found) else float(found)


def _summed(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sums over the examples, and what they amount to."""

    def total(name: str) -> float:
        return sum(row[name] for row in rows)

    full, measured = total("full_bytes_in_16_bits"), total("bytes_in_16_bits")
    priced = all(row["recorded_bytes"] is not None for row in rows)
    predicted = sum(_full_at(row) for row in rows) / total("recorded_bytes") if priced else None
    speeds = {name: _speed(rows, name) for name in ("packed", "plain")}
    return {
        "bytes": {part: sum(row["bytes"][part] for row in rows) for part in rows[0]["bytes"]},
        "plain_bytes": total("plain_bytes"),
        "bytes_in_16_bits": measured,
        "full_bytes_in_16_bits": full,
        "cache_bits": {
            "measured": 16 * measured / full,
            "recorded": None if predicted is None else 16 / predicted,
        },
        "times_smaller": {"measured": full / measured, "predicted": predicted},
        "tokens_per_second": {**speeds, "ratio": speeds["packed"] / speeds["plain"]},
        "answers_as_in_sweep": {
            name: sum(row[name]["as_in_sweep"] for row in rows) for name in ("packed", "plain")
        },
    }


def _full_at(row: dict[str, Any]) -> float:
    """Bytes in 16 bits of the values that the record's cache stands for."""
    return row["recorded_bytes"] * 16 / row["recorded_cache_bits"]


def _speed(rows: Sequence[dict[str, Any]], name: str) -> float:
    seconds = sum(row[name]["decode_seconds"] for row in rows)
    return sum(row[name]["steps"] for row in rows) / max(seconds, 1e-9)
