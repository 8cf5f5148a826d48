"""Sequential sweeps: examples in stages, a look at the records after each, and an early end where they decide.

The stages are fixed by the plan, before the first record. ``looks.json`` in the run folder notes every look that
was taken; it follows from the records, and is taken anew where it is lost.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from semkv_bench.plan.stages import Stage, _look, _unit
from semkv_bench.records.folder import RunFolder, read_looks, read_run, write_looks
from semkv_bench.stats import StatsOptions
from semkv_bench.stats.sequential import take_look
from semkv_bench.stats.spending import spent
from semkv_bench.tasks import Example

__all__ = [
    "in_order",
    "progress_words",
    "settle",
]


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
    with folder.only_me():
        taken = read_looks(folder.path)
        if len(taken) >= number:
            return taken
        frame, charter = read_run(folder.path)
        options, look = StatsOptions(**charter["stats"]), _look(charter, number)
        decision = take_look(frame[frame["look"] <= number], options, charter["chance"], look)
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
    planned, taken = folder.charter["looks"], read_looks(folder.path)
    if not taken:
        return f"no look taken yet; the first of {len(planned)} is due at {planned[0]['examples']} examples"
    last = taken[-1]
    where = f"look {last['look']} of {len(planned)}, {last['examples']} of {planned[-1]['examples']} examples"
    return f"{'stopped at' if last['stop'] else 'at'} {where}: {last['reason']}"
