"""The mixes and deletions among the settings, and which of them differ in the metric alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from semkv_bench.stats.pairing import SettingInfo
from semkv_bench.stats.result import Allocation

__all__ = ["Allocated", "allocated"]


@dataclass(frozen=True)
class Allocated:
    """A two-level mix or a setting that deletes tokens, by its parts; ``index`` is its column.

    ``metric`` keeps all that ranks the tokens, scope and the values' own metric included (``key_norm:layer``,
    ``key_norm+value_norm``); a deletion has no levels.
    """

    index: int
    kind: str
    family: str | None
    high: int | None
    low: int | None
    share: float
    metric: str

    @property
    def group(self) -> tuple:
        """Equal for allocations that differ in the metric alone."""
        return (self.kind, self.family or "", self.high or 0, self.low or 0, self.share)

    @property
    def label(self) -> str:
        """The allocation without the metric, such as ``affine-L16/5@0.25``."""
        body = f"L{self.high}/{self.low}@{self.share:g}" if self.kind == "mixed" else f"prune@{self.share:g}"
        return f"{self.family}-{body}" if self.family else body

    def description(self) -> Allocation:
        """The parts as a report gives them."""
        if self.kind == "mixed":
            parts = {"high": self.high, "low": self.low, "fraction": self.share}
        else:
            parts = {"keep": self.share}
        return Allocation(group=self.label, metric=self.metric, **parts)


def allocated(settings: Sequence[SettingInfo]) -> list[Allocated]:
    """The mixes and deletions among ``settings`` that say what they favour, in their order."""
    found = []
    for index, info in enumerate(settings):
        share = {"mixed": info.fraction, "prune": info.keep}.get(info.kind)
        if share is None or info.metric is None or (info.kind == "mixed" and None in (info.high, info.low)):
            continue
        family = f"{info.family}[{info.options}]" if info.family and info.options else info.family
        found.append(Allocated(index, info.kind, family, info.high, info.low, share, _ranked_by(info)))
    return found


def _ranked_by(info: SettingInfo) -> str:
    """All that ranks the tokens; the scope belongs to the first metric, the values' own one follows."""
    first, plus, of_values = info.metric.partition("+")
    scope = f":{info.scope}" if info.scope not in (None, "shared") else ""
    return f"{first}{scope}{plus}{of_values}"
