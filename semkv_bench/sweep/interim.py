"""Sequential sweeps: examples in stages, a look at the records after each, and an early end where they decide.

The stages are fixed by the plan, before the first record. ``looks.json`` in the run folder notes every look that
was taken; it follows from the records, and is taken anew where it is lost.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from semkv_bench.errors import UsageError
from semkv_bench.plan.stages import PlannedLook, _look
from semkv_bench.records.folder import RunFolder, read_looks, read_run, write_looks
from semkv_bench.records.schema import EXAMPLE
from semkv_bench.stats import StatsOptions
from semkv_bench.stats.sequential import LookDecision, take_look
from semkv_bench.stats.spending import spent
from semkv_bench.tasks import Example

__all__ = [
    "check_looks",
    "in_order",
    "progress_words",
    "refuse_other_looks",
    "take_due_looks",
]


def in_order(
    stages: Sequence[PlannedLook], folder: RunFolder, pending: Sequence[Example]
) -> Iterator[Example]:
    """``pending``, shared with the other writers and by stages, until a look ends the run.

    A process that has nothing left to do in a stage that others still work on goes on to the next: nobody
    waits for a process that may have died. What it adds counts from the next look on.
    """
    if not stages:
        yield from folder.share(pending)
        return
    for stage in stages:
        mine = [example for example in pending if example.unit in stage.units]
        for example in folder.share(mine):
            if take_due_looks(stages, folder):
                return
            yield example
    folder.refresh()
    take_due_looks(stages, folder)


def take_due_looks(stages: Sequence[PlannedLook], folder: RunFolder) -> bool:
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


def _take(stages: Sequence[PlannedLook], folder: RunFolder, number: int) -> list[dict[str, Any]]:
    """Take look ``number``, unless another process was first; the looks taken by now."""
    with folder.only_me():
        taken = read_looks(folder.path)
        if len(taken) >= number:
            return taken
        frame, charter = read_run(folder.path)
        look = _look(charter, number)
        decision = _decision(frame, charter, number)
        taken = [
            *taken,
            {
                "look": number,
                "examples": stages[number - 1].examples,
                "clusters": stages[number - 1].clusters,
                "information": look.so_far[-1],
                "alpha_spent": spent(charter["stats"]["alpha"], look.so_far[-1]),
                "alpha_at_look": look.level(charter["stats"]["alpha"]),
                "stop": _stops(decision, charter, number),
                "reason": decision.reason,
                "open": list(decision.open),
            },
        ]
        write_looks(folder.path, taken)
        return taken


def check_looks(folder: RunFolder) -> None:
    """Raise UsageError where ``looks.json`` says of a look what does not follow from the records."""
    if "looks" in folder.charter and read_looks(folder.path):
        refuse_other_looks(folder.path, *read_run(folder.path))


def refuse_other_looks(path: Path, frame: pd.DataFrame, charter: Mapping[str, Any]) -> None:
    """The same for records at hand: each look is taken once more."""
    for number, taken in enumerate(read_looks(path), start=1):
        planned = charter["looks"]
        held = 0 if number > len(planned) else len(frame[frame["look"] <= number].drop_duplicates(EXAMPLE))
        if not held or held < planned[number - 1]["examples"]:
            found = f"its examples are not all recorded ({held})"
        elif _stops(_decision(frame, charter, number), charter, number) == taken["stop"]:
            continue
        else:
            found = f"it {'goes on' if taken['stop'] else 'ends the run'}"
        raise UsageError(
            f"{path / 'looks.json'} says that look {number} {'ended the run' if taken['stop'] else 'was taken'}; by "
            f"the records {found}; remove the file and run the sweep again, it takes the looks anew"
        )


def _decision(frame: pd.DataFrame, charter: Mapping[str, Any], number: int) -> LookDecision:
    options = StatsOptions(**charter["stats"])
    return take_look(frame[frame["look"] <= number], options, charter["chance"], _look(charter, number))


def _stops(decision: LookDecision, charter: Mapping[str, Any], number: int) -> bool:
    return decision.stop and number < len(charter["looks"])


def progress_words(folder: RunFolder) -> str:
    """Where a sequential run stands, as one line."""
    planned, taken = folder.charter["looks"], read_looks(folder.path)
    if not taken:
        return f"no look taken yet; the first of {len(planned)} is due at {planned[0]['examples']} examples"
    last = taken[-1]
    where = f"look {last['look']} of {len(planned)}, {last['examples']} of {planned[-1]['examples']} examples"
    return f"{'stopped at' if last['stop'] else 'at'} {where}: {last['reason']}"
