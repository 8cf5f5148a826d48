"""What a setting's name says of its allocation; foreign records follow the same spelling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from semkv_bench.records.names import parts
from semkv_bench.stats.pairing import SettingInfo
from semkv_bench.stats.result import Allocation

__all__ = ["Allocated", "allocated"]


@dataclass(frozen=True)
class Allocated:
    """A two-level mix or a pruned setting by its parts; ``index`` is its column.

    ``affine-L16/5@0.25:key_norm`` has family affine, high 16, low 5, share 0.25 and metric key_norm;
    ``prune@0.5:random`` has no levels. ``metric`` keeps all that ranks the tokens, scope and the values' own
    metric included (``key_norm:layer``, ``key_norm+value_norm``).
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
        """The name without the metric, such as ``affine-L16/5@0.25``."""
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
    """The mixes and pruned settings among ``settings`` whose names can be read, in their order."""
    found = []
    for index, info in enumerate(settings):
        match = parts(info.name, info.kind)
        if match is None:
            continue
        levels = [int(match[end]) for end in ("high", "low")] if info.kind == "mixed" else [None, None]
        found.append(
            Allocated(index, info.kind, match["family"], *levels, float(match["share"]), match["metric"])
        )
    return found
