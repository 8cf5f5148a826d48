"""Running a plan: folder, resume, the loop over examples, one record per setting."""

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from semkv_bench.config.compose import to_yaml
from semkv_bench.engine.backend import Answers, Session
from semkv_bench.engine.outcome import Outcome
from semkv_bench.errors import SemkvError, UsageError
from semkv_bench.plan.plan import Plan, prompt_hash
from semkv_bench.plan.stages import interleaved, stage_number
from semkv_bench.records.folder import RunFolder, charter_hash
from semkv_bench.records.prompts import answers_hash
from semkv_bench.records.runs import RUNS, new_folder, one_at_a_time
from semkv_bench.sweep.agreement import agreement
from semkv_bench.sweep.interim import check_looks, in_order, take_due_looks
from semkv_bench.sweep.runaway import is_loop, is_runaway
from semkv_bench.tasks import Example

__all__ = ["open_run", "run_sweep"]


# What says where a run goes, not what it is.
_NOT_WRITTEN = ("shard", "fresh")

log = logging.getLogger(__name__)

# An example and its records, none where another process has written them.
Recorded = tuple[Example, list[dict[str, Any]]]


def open_run(plan: Plan, config: DictConfig) -> RunFolder:
    """The folder of this sweep.

    ``out``; else, of the runs of the same protocol, the newest unfinished or the newest; else, or if the
    configuration asks for a ``fresh`` one, a new one.
    """
    written = to_yaml(OmegaConf.masked_copy(config, [key for key in config if key not in _NOT_WRITTEN]))
    if config.out is not None:
        return RunFolder.open(Path(config.out).expanduser(), plan.charter, written, plan.prompts)
    short = charter_hash(plan.charter)[:10]
    with one_at_a_time():
        newest = None
        for folder in () if config.get("fresh") else _runs_of(plan, short, written):
            if not folder.complete:
                return folder
            newest = newest or folder
        return newest or RunFolder.open(new_folder(short), plan.charter, written, plan.prompts)


def _runs_of(plan: Plan, short: str, written: str) -> Iterator[RunFolder]:
    """Folders of runs of the plan's protocol, the newest first; those of regress are its own."""
    for path in sorted(RUNS.glob(f"[0-9]*-{short}"), reverse=True):
        try:
            yield RunFolder.open(path, plan.charter, written, plan.prompts)
        except UsageError as error:
            log.warning("not continued: %s", error)


def run_sweep(
    plan: Plan,
    folder: RunFolder,
    track: Callable[[Iterable[Recorded], int], Iterator[Recorded]],
) -> int:
    """Run what the folder lacks of the plan's share; ``track`` wraps what comes of it, to show progress.

    Returns the number of examples that were run.
    """
    folder.start()
    try:
        check_looks(folder)
        ended = take_due_looks(plan.stages, folder)
        # Behind the looks, which say under which settings an example is to be run.
        pending = [example for example in interleaved(plan.share) if example.unit not in folder.done]
        if ended or not pending:
            return 0
        with plan.engine.open(plan.source) as session:
            started = datetime.now(UTC)
            folder.write_environment({**session.describe(), "started": started.isoformat(timespec="seconds")})
            began, ran, unread = time.monotonic(), 0, 0
            recorded = _recorded(plan, session, folder, in_order(plan.stages, folder, pending))
            if not session.tracks:
                recorded = track(recorded, len(pending))
            for example, records in recorded:
                if records:
                    folder.append(records, _asked(plan, example))
                    ran, unread = ran + 1, unread + sum(map(_is_unread, records))
            notes = session.notes()
        folder.write_environment(
            {
                "finished": datetime.now(UTC).isoformat(timespec="seconds"),
                "seconds": round(time.monotonic() - began, 1),
                **notes,
            }
        )
        if "warning" in notes:
            log.warning("%s", notes["warning"])
        if unread:
            log.warning(
                "%d answers ended before a coded token was read (quantized_reads is 0): they say nothing of their "
                "settings; longer prompts or answers, a smaller protocol.block or a smaller quantizer keep would",
                unread,
            )
        return ran
    finally:
        folder.close()


def _recorded(
    plan: Plan, session: Session, folder: RunFolder, examples: Iterator[Example]
) -> Iterator[Recorded]:
    """One example after another with its records, as many asked together as the engine wants.

    One that another process has written meanwhile has none.
    """
    noisy, before, records, under = _noise_sample(plan), None, [], ()

    def lacks(example: Example) -> tuple[str, ...]:
        folder.refresh()
        return (
            ()
            if example.unit in folder.done
            else folder.missing(example.unit, stage_number(plan.stages, example))
        )

    for batch in _batches(plan, folder, examples, session.together):
        for missing, group in itertools.groupby(batch, key=lacks):
            asked = list(group)
            if not missing:  # another process was first
                yield from ((example, []) for example in asked)
                continue
            if plan.settings[0].name not in missing:
                yield from _added(plan, session, asked, missing)
                continue
            if missing != under:
                before, under = None, missing
            settings = [setting for setting in plan.settings if setting.name in missing]
            # A unit without the settings that left a raced run says how many it has.
            part = {} if len(missing) == len(plan.settings) else {"of_unit": len(missing)}
            alike = [
                _same_answers(plan, one, other)
                for one, other in zip(asked, [before, *asked[:-1]], strict=True)
            ]
            new = [example for example, copied in zip(asked, alike, strict=True) if not copied]
            alone = [example.unit in noisy for example in new]
            answers = session.answers(new, settings, plan.protocol, alone)
            for before, copied in zip(asked, alike, strict=True):
                if copied:
                    records = [{**record, "seed": before.seed} for record in records]
                else:
                    records = [{**r, **part} for r in _records(plan, session, before, next(answers))]
                yield before, records


def _batches(
    plan: Plan, folder: RunFolder, examples: Iterable[Example], size: int
) -> Iterator[list[Example]]:
    """Up to ``size`` examples at a time, none beyond a look: what it decides must be known to those behind it."""
    batch: list[Example] = []
    for example in examples:
        if batch and stage_number(plan.stages, example) != stage_number(plan.stages, batch[0]):
            yield batch
            batch = []
        batch.append(example)
        if len(batch) == size:
            yield batch
            batch = []
    if batch and folder.stopped_after is None:
        yield batch


def _added(
    plan: Plan, session: Session, examples: Sequence[Example], missing: Sequence[str]
) -> Iterator[Recorded]:
    """Records of settings that were added to examples which have the others; ``full`` leads and is not kept again."""
    settings = [
        setting for setting in plan.settings if setting.name in missing or setting == plan.settings[0]
    ]
    answers = session.answers(examples, settings, plan.protocol, [False] * len(examples))
    for example, answer in zip(examples, answers, strict=True):
        records = _records(plan, session, example, answer)
        yield example, [{**r, "of_unit": len(missing)} for r in records if r["setting"] in missing]


def _is_unread(record: Mapping[str, Any]) -> bool:
    return record["quantizer"] is not None and record["quantized_reads"] == 0 and record["kind"] != "prune"


def _same_answers(plan: Plan, example: Example, before: Example | None) -> bool:
    """Would the records of ``before`` come out again? So where an item was drawn twice and the seed changes nothing."""
    if before is None or not plan.repeats_alike:
        return False
    one, other = ((e.task, e.example_id, prompt_hash(e)) for e in (example, before))
    return one == other


def _noise_sample(plan: Plan) -> set[tuple[str, str, int]]:
    """The examples, spread over the plan, on which ``full`` is decoded alone too."""
    # Of a run that may end early, the examples that are sure to be run.
    examples = [e for e in plan.examples if not plan.stages or e.unit in plan.stages[0].units]
    count = min(plan.engine.noise_examples, len(examples))
    ordered = sorted(examples, key=lambda e: e.unit)
    return {ordered[i * len(ordered) // count].unit for i in range(count)}


def _records(plan: Plan, session: Session, example: Example, answers: Answers) -> list[dict[str, Any]]:
    """One record per setting and turn; those of ``full`` say too how it fared when it was run alone, if it was."""
    single: Sequence[Outcome | None] = answers.alone or [None] * len(answers.turns)
    records = []
    for number, (outcomes, lone) in enumerate(zip(answers.turns, single, strict=True)):
        asked = example.at(number)
        common = {
            "model": session.label,
            "model_revision": session.revision,
            "protocol": plan.protocol.name,
            **plan.protocol.variant,
            "task": example.task,
            "example_id": example.example_id,
            "cluster": example.cluster or example.example_id,
            "seed": example.seed,
            "turn": number,
            "turns": example.turns,
            **({"look": stage_number(plan.stages, example)} if plan.stages else {}),
            "prompts": plan.task.prompt_source,
            "prompt_hash": prompt_hash(example),
            "truncated": example.truncated,
            "answers_hash": answers_hash(asked.answers),
            "depths": list(asked.depths),
            **({} if example.length is None else {"task_length": example.length}),
            **({} if example.perturb is None else {"perturb": example.perturb}),
        }
        mine = [
            {**common, **_answer(plan, asked, outcome), **agreement(outcomes[0], outcome)}
            for outcome in outcomes
        ]
        if lone is not None:
            mine[0] |= {
                "alone_score": plan.task.score_answer(asked, lone),
                "alone_same_tokens": lone.tokens == outcomes[0].tokens,
                "alone_kl": lone.kl,
            }
        records += mine
    return records


def _asked(plan: Plan, example: Example) -> Iterator[dict[str, Any]]:
    """What was asked and expected, turn by turn: the lines of ``prompts-N.jsonl``."""
    fed = [example.input_ids, *(later.input_ids for later in example.follow_ups)]
    for turn, ids in enumerate(fed):
        asked = example.at(turn)
        yield {
            "prompt_hash": prompt_hash(example),
            "task": example.task,
            "example_id": example.example_id,
            "seed": example.seed,
            "turn": turn,
            "prompt": plan.tokenizer.decode(ids, skip_special_tokens=False),
            "question": asked.question,
            "answers": list(asked.answers),
            "answers_hash": answers_hash(asked.answers),
        }


def _answer(plan: Plan, asked: Example, outcome: Outcome) -> Mapping[str, Any]:
    setting = outcome.setting
    quantizes = setting.keys is not None or setting.values is not None
    fed = len(outcome.tokens or ()) - (not outcome.ended)
    # A short answer may end before its first block is coded, a short row lie in its window; then nothing can be read.
    coded = outcome.stored is None or outcome.stored.by_state["coded"] > 0
    if quantizes and coded and outcome.reads == 0 and plan.protocol.rule.is_read(outcome.turn, fed):
        raise SemkvError(f"{setting.name}: attention never read a quantized token; the result is refused")
    return {
        "prompt_tokens": outcome.context,
        "setting": setting.name,
        **setting.describe(),
        "quantizer": setting.quantizer,
        **asdict(setting.storage_in(plan.shape.cache)),
        **_cache(outcome),
        "coded_share": None if outcome.coded_share is None else round(outcome.coded_share, 6),
        "score": plan.task.score_answer(asked, outcome),
        "prediction": outcome.text,
        **_length(asked, outcome),
        "kl": outcome.kl,
        "kl_first": outcome.kl_first,
        "top1_agreement": outcome.top1_agreement,
        **({"nll": outcome.nll} if asked.forced else {}),
        "quantized_reads": outcome.reads if quantizes or outcome.reads is None else 0,
        "batch_rows": outcome.batch_rows,
    }


def _length(asked: Example, outcome: Outcome) -> dict[str, Any]:
    """How long the answer is and whether it ran away; without token ids, what its end tells."""
    if asked.forced:
        return {"new_tokens": len(asked.target_ids), "runaway": None, "loop": None}
    if outcome.tokens is None:
        return {"new_tokens": None, "runaway": not outcome.ended, "loop": None}
    return {
        "new_tokens": len(outcome.tokens),
        "runaway": is_runaway(outcome.tokens, outcome.ended),
        "loop": is_loop(outcome.tokens),
    }


def _cache(outcome: Outcome) -> dict[str, Any]:
    """What the cache at the end of the answer cost, and the token-layers that it held, keys and values, by state."""
    if outcome.stored is None:
        return {}
    cost = outcome.setting.cost(outcome.stored)
    share = outcome.read_share
    return {
        **({} if share is None else {"read_bits": outcome.setting.read_bits(outcome.stored, share)}),
        "cache_bits": cost.cache_bits,
        "key_cache_bits": cost.key_cache_bits,
        "value_cache_bits": cost.value_cache_bits,
        "cache_bytes": cost.nbytes,
        "token_layers": outcome.stored.by_state,
    }
