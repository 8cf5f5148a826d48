"""Running a plan: folder, resume, the loop over examples, one record per setting."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from semkv_bench.config import to_yaml
from semkv_bench.device import describe
from semkv_bench.engine import Engine, Outcome, Request
from semkv_bench.errors import SemkvError
from semkv_bench.models import LoadedModel
from semkv_bench.plan import Plan, prompt_hash
from semkv_bench.records import RunFolder, protocol_hash
from semkv_bench.runaway import is_runaway
from semkv_bench.tasks import Example

__all__ = ["RUNS", "newest_run", "open_run", "run_sweep"]

RUNS = Path("results/runs")


def open_run(plan: Plan, config: DictConfig) -> RunFolder:
    """The folder of this sweep: ``out``, or the newest unfinished run of the same protocol, or a new one."""
    if config.out is not None:
        return RunFolder.open(Path(config.out).expanduser(), plan.protocol, to_yaml(config))
    short = protocol_hash(plan.protocol)[:10]
    for path in sorted(RUNS.glob(f"*-{short}"), reverse=True):
        folder = RunFolder.open(path, plan.protocol, to_yaml(config))
        if not folder.complete:
            return folder
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    return RunFolder.open(RUNS / f"{stamp}-{short}", plan.protocol, to_yaml(config))


def newest_run() -> Path | None:
    """The run under ``results/runs`` that was written last, if there is one."""
    runs = [path.parent for path in RUNS.glob("*/protocol.yaml")]
    return max(runs, key=lambda path: max(p.stat().st_mtime_ns for p in path.iterdir()), default=None)


def run_sweep(
    plan: Plan,
    folder: RunFolder,
    track: Callable[[Iterable[Example], int], Iterator[Example]],
    load: Callable[[], LoadedModel],
) -> int:
    """Run what the folder lacks; ``track`` wraps the pending examples to show progress, ``load`` gives the model.

    Returns the number of examples that were run.
    """
    folder.start()
    try:
        pending = [example for example in plan.examples if _unit(example) not in folder.done]
        if not pending:
            return 0
        loaded = load()
        started = datetime.now(UTC)
        folder.write_environment(
            {**describe(loaded.device), "started": started.isoformat(timespec="seconds")}
        )
        engine = Engine(loaded, plan.engine)
        began, previous = time.monotonic(), None
        for example in track(sorted(pending, key=lambda e: (e.task, e.example_id, e.seed)), len(pending)):
            outcomes = _outcomes(plan, engine, example, previous)
            previous = (example, outcomes)
            folder.append(_records(plan, loaded, example, outcomes))
        folder.write_environment(
            {
                "finished": datetime.now(UTC).isoformat(timespec="seconds"),
                "seconds": round(time.monotonic() - began, 1),
            }
        )
        return len(pending)
    finally:
        folder.close()


def _outcomes(
    plan: Plan, engine: Engine, example: Example, previous: tuple[Example, list[Outcome]] | None
) -> list[Outcome]:
    """Outcomes of an example; the same prompt under another seed is not run again where the seed changes nothing."""
    if (
        previous is not None
        and not any(setting.seeded for setting in plan.settings)
        and not plan.engine.temperature
    ):
        before, outcomes = previous
        if (before.task, before.example_id, before.input_ids) == (
            example.task,
            example.example_id,
            example.input_ids,
        ):
            return outcomes
    return plan.runner.run(engine, _request(engine.loaded, example), plan.settings)


def _request(loaded: LoadedModel, example: Example) -> Request:
    return Request(
        input_ids=example.input_ids,
        reference_ids=example.target_ids,
        max_new_tokens=example.max_new_tokens,
        stop_ids=frozenset((*loaded.eos_ids, *example.stop_token_ids)),
        min_new_tokens=example.min_new_tokens,
        seed=example.seed,
    )


def _records(
    plan: Plan, loaded: LoadedModel, example: Example, outcomes: list[Outcome]
) -> list[dict[str, Any]]:
    common = {
        "model": loaded.label,
        "model_revision": loaded.revision,
        "protocol": plan.runner.name,
        "task": example.task,
        "example_id": example.example_id,
        "seed": example.seed,
        "turn": example.turn,
        "prompts": plan.task.prompt_source,
        "prompt_hash": prompt_hash(example),
        "prompt_tokens": len(example.input_ids),
        "truncated": example.truncated,
        "depths": list(example.depths),
    }
    return [{**common, **_answer(plan, loaded, example, outcome)} for outcome in outcomes]


def _answer(plan: Plan, loaded: LoadedModel, example: Example, outcome: Outcome) -> Mapping[str, Any]:
    setting = outcome.setting
    quantizes = setting.keys is not None or setting.values is not None
    if quantizes and not outcome.reads:
        raise SemkvError(f"{setting.name}: attention never read a quantized token; the result is refused")
    prediction = loaded.tokenizer.decode(outcome.tokens, skip_special_tokens=True)
    return {
        "setting": setting.name,
        "kind": setting.kind,
        "quantizer": setting.quantizer,
        **asdict(setting.storage(plan.shape.head_dim)),
        "score": plan.task.score(example, prediction),
        "prediction": prediction,
        "new_tokens": len(outcome.tokens),
        "runaway": is_runaway(outcome.tokens, outcome.ended),
        "kl": outcome.kl,
        "kl_first": outcome.kl_first,
        "top1_agreement": outcome.top1_agreement,
        "quantized_reads": outcome.reads if quantizes else 0,
        "batch_rows": outcome.batch_rows,
    }


def _unit(example: Example) -> tuple[str, str, int]:
    return (example.task, example.example_id, example.seed)
