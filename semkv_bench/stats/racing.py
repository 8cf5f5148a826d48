"""What a raced run knows from its earlier looks, and which settings leave it at this one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from semkv_bench.records.racing import LAST_LOOK
from semkv_bench.stats.equivalence import Judgement, judge
from semkv_bench.stats.options import StatsOptions
from semkv_bench.stats.pairing import PairedScores, pair
from semkv_bench.stats.sensitivity import Reacting, chance_level, lowest_points, reacting_tasks
from semkv_bench.stats.spending import Look

__all__ = ["Judged", "judged", "leaving"]


@dataclass(frozen=True)
class Judged:
    """A sample judged: ``whole`` of all tasks, ``reacting`` of those that the margin applies to.

    ``guess`` is the score of a guess in these.
    """

    whole: PairedScores
    reacting: Reacting
    guess: float
    judgement: Judgement

    @property
    def paired(self) -> PairedScores:
        """The sample that verdicts are about."""
        return self.reacting.paired


def judged(
    records: pd.DataFrame, options: StatsOptions, chance: Mapping[str, float], look: Look | None = None
) -> Judged:
    """Pair normalized ``records`` and judge every setting; in a raced run by its earlier looks as well.

    A setting that left keeps the p-values of the look at which it left: later looks may find that the margin is
    about other tasks, and it cannot be asked again. What was shown ``degraded`` stays so: a p-value that holds over
    all looks may be taken at any of them.
    """
    before = None
    if look is not None and options.race and LAST_LOOK in records and look.number > 1:
        earlier = records[records["look"] < look.number].reset_index(drop=True)
        earlier[LAST_LOOK] = earlier[LAST_LOOK].clip(upper=look.number - 1)
        known = judged(earlier, options, chance, replace(look, number=look.number - 1))
        names = [info.name for info in known.paired.settings]
        before = dict(zip(names, known.judgement.over_looks.T, strict=True))
    whole = pair(records, options)
    reacting = reacting_tasks(whole, options, chance)
    guess = chance_level(reacting.paired, options, chance)
    return Judged(whole, reacting, guess, judge(reacting.paired, options, guess, look=look, before=before))


def leaving(found: Judged, options: StatsOptions) -> tuple[str, ...]:
    """The settings that need no further examples: shown ``degraded``, and asked for nothing else.

    Settings that hold stay. The operating point is chosen among them, confirmed on two halves of their examples and
    told from a small loss by further ones; mixes and methods are compared with them; and an answer that is as that of
    ``full`` costs next to nothing. The lowest grid points stay until they have shown all tasks to react, since with
    fewer examples fewer tasks would count.
    """
    paired, last = found.paired, found.paired.last_look
    kept: set[int] = set()
    if options.sensitivity == "task" and len(found.whole.task_names) > 1:
        all_react = bool(paired.chosen_by) and not found.reacting.dead
        kept = set() if all_react else set(lowest_points(paired))
    return tuple(
        info.name
        for i, (info, verdict) in enumerate(zip(paired.settings, found.judgement.verdicts, strict=True))
        if verdict == "degraded" and i not in kept and (last is None or last[i] == np.max(last))
    )
