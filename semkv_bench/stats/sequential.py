"""May a sequential run stop at a look: is everything decided that its report is read for?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pandas as pd

from semkv_bench.records.normalize import normalize
from semkv_bench.stats.equivalence import Judgement
from semkv_bench.stats.operating_point import choose
from semkv_bench.stats.options import StatsOptions
from semkv_bench.stats.pairing import PairedScores, SettingInfo
from semkv_bench.stats.racing import judged, leaving
from semkv_bench.stats.spending import Look

__all__ = ["LookDecision", "decide", "take_look"]


@dataclass(frozen=True)
class LookDecision:
    """Whether to stop, why in words, the settings that are still open, and those that leave a raced run here."""

    stop: bool
    reason: str
    open: tuple[str, ...]
    leave: tuple[str, ...] = ()


def take_look(
    frame: pd.DataFrame, options: StatsOptions, chance: Mapping[str, float], look: Look
) -> LookDecision:
    """Decide on the sample of ``look``; the same records give the same decision.

    ``frame`` and ``chance`` are as for :func:`semkv_bench.stats.analyze`.
    """
    found = judged(normalize(frame), options, chance, look)
    decision = decide(found.paired, found.judgement)
    ends = decision.stop and options.looks is not None
    goes_on = options.race and not ends and look.number < len(look.times)
    return replace(decision, leave=leaving(found, options)) if goes_on else decision


def decide(paired: PairedScores, judgement: Judgement) -> LookDecision:
    """Stop when every grid point holds or is degraded and no open setting could be a cheaper operating point.

    The cliff needs every grid point: all above it must hold and all below it be degraded. A mix that costs
    more than the operating point, or deleted tokens, may stay open. A run whose reference does not do the task
    has shown nothing yet and goes on.
    """
    if not judgement.reference_works:
        return LookDecision(False, "full precision is not yet shown to do the tasks", ())
    undecided = [
        info
        for info, shown in zip(paired.settings, judgement.shown, strict=True)
        if shown == "inconclusive" and info.kind in ("uniform", "mixed")
    ]
    point = choose(paired, judgement)
    left = tuple(info.name for info in undecided if info.kind == "uniform" or _could_win(info, point))
    if left:
        return LookDecision(False, f"still open: {', '.join(left)}", left)
    if judgement.positive_control is None:
        return LookDecision(
            True, "every grid point holds, so more examples would not show where quality is lost", ()
        )
    found = "no setting is left that could be equivalent" if point is None else f"cheapest is {point.name}"
    return LookDecision(True, f"every grid point is decided and {found}", ())


def _could_win(info: SettingInfo, point: SettingInfo | None) -> bool:
    """Would the open setting, if equivalent, be cheaper than the operating point?"""
    if point is None or info.paid_bits is None or point.paid_bits is None:
        return True
    return info.paid_bits <= point.paid_bits
