"""Sequential sweeps: examples in stages, a look at the records after each, and an early end where they decide.

In a raced sweep (``stats.race``) a look also says which settings leave: no later example is run under them.

The stages are fixed by the plan, before the first record. ``looks.json`` in the run folder notes every look that
was taken; it follows from the records, and is taken anew where it is lost.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd

from semkv_bench.errors import UsageError
from semkv_bench.plan.stages import PlannedLook, _look
from semkv_bench.records.folder import RunFolder, read_looks, read_run, write_looks
from semkv_bench.records.racing import done_examples, left_settings, planned_at, planned_rows
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
        decision = _decision(frame, charter, taken, number)
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
                **({"leave": list(decision.leave)} if charter["stats"].get("race") else {}),
            },
        ]
        write_looks(folder.path, taken)
    folder.refresh()
    return taken


def check_looks(folder: RunFolder) -> None:
    """Raise UsageError where ``looks.json`` says of a look what does not follow from the records."""
    if "looks" in folder.charter and read_looks(folder.path):
        refuse_other_looks(folder.path, *read_run(folder.path))


def refuse_other_looks(path: Path, frame: pd.DataFrame, charter: Mapping[str, Any]) -> None:
    """The same for records at hand: each look is taken once more."""
    looks, planned = read_looks(path), charter["looks"]
    for number, taken in enumerate(looks, start=1):
        left = left_settings(looks, before=number)
        done = done_examples(frame, charter["settings"], left)
        held = 0 if number > len(planned) else int((done["look"] <= number).sum())
        if not held or held < planned[number - 1]["examples"]:
            found = f"its examples are not all recorded ({held})"
        else:
            decision = _decision(frame, charter, looks, number)
            stops, leave = _stops(decision, charter, number), set(decision.leave)
            if stops == taken["stop"] and leave == set(taken.get("leave", ())):
                continue
            found = f"it {'goes on' if taken['stop'] else 'ends the run'}"
            if stops == taken["stop"]:
                found = f"{', '.join(sorted(leave)) or 'no setting'} left at it"
        raise UsageError(
            f"{path / 'looks.json'} says that look {number} {'ended the run' if taken['stop'] else 'was taken'}; by "
            f"the records {found}; remove the file and run the sweep again, it takes the looks anew"
        )


def _decision(
    frame: pd.DataFrame, charter: Mapping[str, Any], looks: Sequence[Mapping[str, Any]], number: int
) -> LookDecision:
    """What look ``number`` decides, whichever ``looks`` were taken before it."""
    options = StatsOptions(**charter["stats"])
    rows = planned_rows(frame, left_settings(looks, before=number), number)
    return take_look(rows, options, charter["chance"], _look(charter, number))


def _stops(decision: LookDecision, charter: Mapping[str, Any], number: int) -> bool:
    """Does a look end the run? One that a race took of itself only lets settings leave."""
    return decision.stop and "looks" in charter["stats"] and number < len(charter["looks"])


def progress_words(folder: RunFolder) -> str:
    """Where a sequential run stands, as one line."""
    planned, taken = folder.charter["looks"], read_looks(folder.path)
    if not taken:
        return f"no look taken yet; the first of {len(planned)} is due at {planned[0]['examples']} examples"
    last = taken[-1]
    where = f"look {last['look']} of {len(planned)}, {last['examples']} of {planned[-1]['examples']} examples"
    words = f"{'stopped at' if last['stop'] else 'at'} {where}: {last['reason']}"
    return words if not folder.left else f"{words}\n{_rows_words(folder, taken)}"


def _rows_words(folder: RunFolder, taken: Sequence[Mapping[str, Any]]) -> str:
    """How many rows of the examples up to the last look were run, and which settings left where."""
    settings, planned = folder.charter["settings"], folder.charter["looks"]
    ends = [0, *(look["examples"] for look in planned[: len(taken)])]
    run = sum(
        (end - start) * len(planned_at(number, settings, folder.left))
        for number, (start, end) in enumerate(pairwise(ends), start=1)
    )
    places = [f"{', '.join(look['leave'])} at look {look['look']}" for look in taken if look.get("leave")]
    return f"rows run: {run:,} of {ends[-1] * len(settings):,}; shown degraded and left: {'; '.join(places)}"
