"""Where a sequential run stands."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from semkv_bench.plan.stages import _look
from semkv_bench.records.folder import read_looks
from semkv_bench.records.racing import done_examples, left_settings, planned_rows
from semkv_bench.records.schema import EXAMPLE
from semkv_bench.stats.result import Sequential
from semkv_bench.stats.spending import Look
from semkv_bench.sweep.interim import refuse_other_looks

__all__ = ["LookState", "last_look"]


@dataclass(frozen=True)
class LookState:
    """Where a sequential run stands: the look to report, its sample, how many examples make the run complete."""

    look: Look
    frame: pd.DataFrame
    complete_at: int
    facts: dict[str, Any]

    def described(self, sequential: Sequential) -> Sequential:
        """``sequential`` with what only the run folder knows of it."""
        return replace(sequential, **self.facts)


def last_look(path: Path, frame: pd.DataFrame, charter: dict[str, Any]) -> LookState | None:
    """The last look whose examples are all recorded in ``frame``, or the one that ended the run.

    Before the first look is complete, what is recorded is taken as a look of its own. None where the run is not
    sequential.
    """
    if "looks" not in charter:
        return None
    refuse_other_looks(path, frame, charter)
    taken = read_looks(path)
    stop = next((look for look in taken if look["stop"]), None)
    left = left_settings(taken)
    units = done_examples(frame, charter["settings"], left)
    whole = [
        int((units["look"] <= n).sum()) >= look["examples"] for n, look in enumerate(charter["looks"], 1)
    ]
    number = whole.index(False) if False in whole else len(whole)
    if stop is not None:
        number = min(number, stop["look"])
    total = charter["examples"]["count"]
    facts = {
        "planned_examples": total,
        "recorded_examples": len(units),
        "complete_looks": number,
        "stopped": stop is not None,
        "reason": taken[number - 1]["reason"] if 0 < number <= len(taken) else None,
    }
    if number:
        look = _look(charter, number)
        sample = frame[frame["look"] <= number].reset_index(drop=True)
        if charter["stats"].get("race"):
            sample = planned_rows(frame, left, number)
            facts["planned_rows"] = look.examples[number - 1] * len(charter["settings"])
            facts["run_rows"] = len(sample.drop_duplicates([*EXAMPLE, "setting"]))
        return LookState(look, sample, look.examples[number - 1] if stop else total, facts)
    planned = _look(charter, 1)
    share = min(len(units) / planned.examples[0], 0.999) * planned.times[0]
    early = replace(planned, times=(share, *planned.times), examples=(len(units), *planned.examples))
    return LookState(early, frame, total, facts)
