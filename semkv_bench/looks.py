"""Sequential sweeps: examples in stages, a look at the records after each, and an early end where they decide.

The stages are fixed by the plan, before the first record. ``looks.json`` in the run folder notes every look that
was taken; it follows from the records, and is taken anew where it is lost.
"""

import fcntl
import hashlib
import json
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pandas as pd

from semkv_bench.errors import UsageError
from semkv_bench.records import RunFolder, read_looks, read_run, write_looks
from semkv_bench.stats import StatsOptions
from semkv_bench.stats.sequential import take_look
from semkv_bench.stats.spending import Look, spent
from semkv_bench.tasks import Example

__all__ = [
    "Stage",
    "Standing",
    "arrange",
    "described",
    "in_order",
    "last_look",
    "progress_words",
    "settle",
    "stage_number",
]

Unit = tuple[str, str, int]
_LEAST_SPENT = 1e-10  # of alpha, at a look that can decide something


@dataclass(frozen=True)
class Stage:
    """The examples that one look adds; counts and the share of the information are up to its end."""

    units: frozenset[Unit]
    examples: int
    clusters: int
    information: float


def arrange(examples: Sequence[Example], stats: StatsOptions) -> tuple[Stage, ...]:
    """The stages of a sequential plan, the last one up to its end; none where ``stats`` plans no looks.

    An example stays together with its other seeds. Every stage holds the same mixture of tasks and seeds as
    the plan, as far as whole examples allow; which examples come first is random, but follows from their names.

    Raises:
        UsageError: looks beyond the plan, too close together, too early, or before every task has an example.
    """
    if stats.looks is None:
        return ()
    if stats.looks[-1] > len(examples):
        raise UsageError(f"stats.looks={list(stats.looks)} goes beyond the {len(examples)} planned examples")
    clusters = _balanced(examples)
    tasks = {cluster[0].task for cluster in clusters}
    total = _counts(clusters, tasks)
    held = list(accumulate(len(cluster) for cluster in clusters))
    ends = [bisect_left(held, size) + 1 for size in sorted({*stats.looks, len(examples)})]
    if len(set(ends)) < len(ends):
        raise UsageError(
            f"stats.looks={list(stats.looks)} are too close together or to the end ({len(examples)} examples): an "
            "example's seeds stay together"
        )
    stages, before = [], 0
    for end in ends:
        counts = _counts(clusters[:end], tasks)
        if not all(counts.values()):
            raise UsageError(
                f"the first of stats.looks={list(stats.looks)} must leave room for an example of each of the "
                f"{len(tasks)} tasks"
            )
        share = _information(counts, total, stats.average)
        if spent(stats.alpha, share) < _LEAST_SPENT:
            raise UsageError(
                f"a look at {held[end - 1]} of {len(examples)} examples comes too early to decide anything: start "
                "stats.looks at a tenth of the plan or later"
            )
        units = frozenset(_unit(example) for cluster in clusters[before:end] for example in cluster)
        stages.append(Stage(units, held[end - 1], end, share))
        before = end
    return tuple(stages)


def _balanced(examples: Iterable[Example]) -> list[list[Example]]:
    """Clusters (an example with its seeds) in an order in which tasks and seeds alternate in proportion."""
    clusters: dict[tuple[str, str], list[Example]] = {}
    for example in examples:
        clusters.setdefault((example.task, example.example_id), []).append(example)
    tasks: dict[str, dict[tuple, list[list[Example]]]] = {}
    for key in sorted(clusters, key=_shuffled):
        seeds = tuple(sorted(example.seed for example in clusters[key]))
        tasks.setdefault(key[0], {}).setdefault(seeds, []).append(clusters[key])
    return _merged([_merged([tasks[task][seeds] for seeds in sorted(tasks[task])]) for task in sorted(tasks)])


def _shuffled(key: tuple[str, str]) -> str:
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()


def _merged(groups: Sequence[Sequence[list[Example]]]) -> list[list[Example]]:
    """Members of all groups, each group spread evenly over the whole and its first member early."""
    placed = [
        (rank / len(group), number, member)
        for number, group in enumerate(groups)
        for rank, member in enumerate(group)
    ]
    return [member for _, _, member in sorted(placed, key=lambda item: item[:2])]


def _counts(clusters: Iterable[Sequence[Example]], tasks: Iterable[str]) -> dict[str, int]:
    counts = dict.fromkeys(sorted(tasks), 0)
    for cluster in clusters:
        counts[cluster[0].task] += 1
    return counts


def _information(counts: dict[str, int], total: dict[str, int], average: str) -> float:
    """Share of the information: the variance of the average at the end over that of now, clusters being alike."""
    if average == "micro":
        return sum(counts.values()) / sum(total.values())
    return sum(1 / n for n in total.values()) / sum(1 / n for n in counts.values())


def _unit(example: Example) -> Unit:
    return (example.task, example.example_id, example.seed)


def described(stages: Sequence[Stage]) -> list[dict[str, Any]]:
    """The looks as they are written into the protocol."""
    return [
        {"examples": stage.examples, "clusters": stage.clusters, "information": round(stage.information, 6)}
        for stage in stages
    ]


def stage_number(stages: Sequence[Stage], example: Example) -> int | None:
    """Number (from 1) of the look that an example is taken for; None where the plan has no stages."""
    unit = _unit(example)
    return next((number for number, stage in enumerate(stages, start=1) if unit in stage.units), None)


def in_order(stages: Sequence[Stage], folder: RunFolder, pending: Sequence[Example]) -> Iterator[Example]:
    """``pending`` in the order in which this process should take it, until a look ends the run.

    A process that has nothing left to do in a stage that others still work on goes on to the next: nobody
    waits for a process that may have died. What it adds counts from the next look on.
    """
    if not stages:
        yield from folder.share(sorted(pending, key=_unit))
        return
    for stage in stages:
        mine = [example for example in pending if _unit(example) in stage.units]
        for example in folder.share(sorted(mine, key=_unit)):
            if settle(stages, folder):
                return
            yield example
    folder.refresh()
    settle(stages, folder)


def settle(stages: Sequence[Stage], folder: RunFolder) -> bool:
    """Take the looks that are due; returns whether one of them ended the run."""
    if not stages:
        return False
    taken = read_looks(folder.path)
    for number, stage in enumerate(stages, start=1):
        if len(taken) < number:
            if not stage.units <= folder.done:
                return False
            taken = _take(stages, folder, number)
        if taken[number - 1]["stop"]:
            return True
    return False


def _take(stages: Sequence[Stage], folder: RunFolder, number: int) -> list[dict[str, Any]]:
    """Take look ``number``, unless another process was first; the looks taken by now."""
    with (folder.path / "protocol.yaml").open("r+") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        taken = read_looks(folder.path)
        if len(taken) >= number:
            return taken
        frame, protocol = read_run(folder.path)
        options, look = StatsOptions(**protocol["stats"]), _look(protocol, number)
        decision = take_look(frame[frame["look"] <= number], options, protocol["chance"], look)
        taken = [
            *taken,
            {
                "look": number,
                "examples": stages[number - 1].examples,
                "clusters": stages[number - 1].clusters,
                "information": look.so_far[-1],
                "alpha_spent": spent(options.alpha, look.so_far[-1]),
                "alpha_at_look": look.level(options.alpha),
                "stop": decision.stop and number < len(stages),
                "reason": decision.reason,
                "open": list(decision.open),
            },
        ]
        write_looks(folder.path, taken)
        return taken


def progress_words(folder: RunFolder) -> str:
    """Where a sequential run stands, as one line."""
    planned, taken = folder.protocol["looks"], read_looks(folder.path)
    if not taken:
        return f"no look taken yet; the first of {len(planned)} is due at {planned[0]['examples']} examples"
    last = taken[-1]
    where = f"look {last['look']} of {len(planned)}, {last['examples']} of {planned[-1]['examples']} examples"
    return f"{'stopped at' if last['stop'] else 'at'} {where}: {last['reason']}"


def _look(protocol: dict[str, Any], number: int) -> Look:
    planned = protocol["looks"]
    return Look(
        tuple(look["information"] for look in planned), number, tuple(look["examples"] for look in planned)
    )


@dataclass(frozen=True)
class Standing:
    """Where a sequential run stands: the look to report, its sample, how many examples make the run complete."""

    look: Look
    frame: pd.DataFrame
    complete_at: int
    facts: dict[str, Any]


def last_look(path: Path, frame: pd.DataFrame, protocol: dict[str, Any]) -> Standing | None:
    """The last look whose examples are all recorded in ``frame``, or the one that ended the run.

    Before the first look is complete, what is recorded is taken as a look of its own. None where the run is not
    sequential.
    """
    if "looks" not in protocol:
        return None
    taken = read_looks(path)
    stop = next((look for look in taken if look["stop"]), None)
    units = frame.drop_duplicates(["task", "example_id", "seed"])
    whole = [
        int((units["look"] <= n).sum()) >= look["examples"] for n, look in enumerate(protocol["looks"], 1)
    ]
    number = whole.index(False) if False in whole else len(whole)
    if stop is not None:
        number = min(number, stop["look"])
    total = protocol["examples"]["count"]
    facts = {
        "planned_examples": total,
        "recorded_examples": len(units),
        "complete_looks": number,
        "stopped": stop is not None,
        "reason": taken[number - 1]["reason"] if 0 < number <= len(taken) else None,
    }
    if number:
        look = _look(protocol, number)
        sample = frame[frame["look"] <= number].reset_index(drop=True)
        return Standing(look, sample, look.examples[number - 1] if stop else total, facts)
    planned = _look(protocol, 1)
    share = min(len(units) / planned.examples[0], 0.999) * planned.times[0]
    early = replace(planned, times=(share, *planned.times), examples=(len(units), *planned.examples))
    return Standing(early, frame, total, facts)
