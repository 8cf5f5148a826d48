"""The looks of a sequential run: which examples are taken for which."""

import hashlib
import json
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from semkv_bench.errors import UsageError
from semkv_bench.records.schema import Unit
from semkv_bench.stats import StatsOptions
from semkv_bench.stats.spending import Look, spent
from semkv_bench.tasks import Example

__all__ = ["PlannedLook", "arrange", "cluster_of", "described", "interleaved", "stage_number"]


_LEAST_SPENT = 1e-10  # of alpha, at a look that can decide something


@dataclass(frozen=True)
class PlannedLook:
    """The examples that one look adds; counts and the share of the information are up to its end."""

    units: frozenset[Unit]
    examples: int
    clusters: int
    information: float


def arrange(examples: Sequence[Example], stats: StatsOptions) -> tuple[PlannedLook, ...]:
    """The stages of a sequential plan, the last one up to its end; none where ``stats`` plans no looks.

    A race without looks has them at a third and two thirds, or none where there are too few examples for that.

    An example stays together with its other seeds. Every stage holds the same mixture of tasks and seeds as
    the plan, as far as whole examples allow; which examples come first is random, but follows from their names.

    Raises:
        UsageError: looks beyond the plan, too close together, too early, or before every task has an example.
    """
    if stats.looks is None:
        return _thirds(examples, stats) if stats.race else ()
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
        units = frozenset(example.unit for cluster in clusters[before:end] for example in cluster)
        stages.append(PlannedLook(units, held[end - 1], end, share))
        before = end
    return tuple(stages)


def _thirds(examples: Sequence[Example], stats: StatsOptions) -> tuple[PlannedLook, ...]:
    size = len(examples)
    if size < 3:
        return ()
    try:
        return arrange(examples, replace(stats, looks=(size // 3, 2 * size // 3)))
    except UsageError:
        return ()


def _balanced(examples: Iterable[Example]) -> list[list[Example]]:
    """Clusters (an example with its seeds) in an order in which tasks and seeds alternate in proportion."""
    clusters: dict[tuple[str, str], list[Example]] = {}
    for example in examples:
        clusters.setdefault(cluster_of(example), []).append(example)
    tasks: dict[str, dict[tuple, list[list[Example]]]] = {}
    for key in sorted(clusters, key=_shuffled):
        seeds = tuple(sorted(example.seed for example in clusters[key]))
        tasks.setdefault(key[0], {}).setdefault(seeds, []).append(clusters[key])
    return _merged([_merged([tasks[task][seeds] for seeds in sorted(tasks[task])]) for task in sorted(tasks)])


def interleaved(examples: Iterable[Example]) -> list[Example]:
    """``examples`` in an order whose every beginning is about all tasks and seeds.

    Those of one document follow one another, and so do the seeds of one item.
    """
    return [
        example
        for cluster in _balanced(examples)
        for example in sorted(cluster, key=lambda e: (e.example_id, e.seed))
    ]


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


def cluster_of(example: Example) -> tuple[str, str]:
    """Task and cluster: equal for examples that are one piece of evidence."""
    return (example.task, example.cluster or example.example_id)


def described(stages: Sequence[PlannedLook]) -> list[dict[str, Any]]:
    """The looks as they are written into the protocol."""
    return [
        {"examples": stage.examples, "clusters": stage.clusters, "information": round(stage.information, 6)}
        for stage in stages
    ]


def stage_number(stages: Sequence[PlannedLook], example: Example) -> int | None:
    """Number (from 1) of the look that an example is taken for; None where the plan has no stages."""
    unit = example.unit
    return next((number for number, stage in enumerate(stages, start=1) if unit in stage.units), None)


def _look(charter: dict[str, Any], number: int) -> Look:
    planned = charter["looks"]
    return Look(
        tuple(look["information"] for look in planned), number, tuple(look["examples"] for look in planned)
    )
