"""Which tokens a method leaves in 16 bits: sinks at the front, a recent window, an unfilled block at the end."""

import re
from dataclasses import dataclass

from semkv_bench.checks import is_whole, whole
from semkv_bench.errors import UsageError

__all__ = ["Keep", "Layers"]


@dataclass(frozen=True)
class Keep:
    """The first ``sinks`` and the newest ``recent`` tokens stay in 16 bits; older ones are coded ``block`` at a time.

    All three count by absolute position in the row. They are no part of the coder, so that every quantizer can be
    compared at the windows of every other.

    >>> Keep(recent=128).coded(300), Keep(block=128).coded(300), Keep(sinks=32, block=128).coded(159)
    (range(0, 172), range(0, 256), range(32, 32))
    """

    sinks: int = 0
    recent: int = 0
    block: int = 1

    def __post_init__(self) -> None:
        for name, least in (("sinks", 0), ("recent", 0), ("block", 1)):
            whole(f"keep.{name}", getattr(self, name), least)

    @property
    def windowed(self) -> bool:
        """Is anything but the sinks kept, so that a prompt is not coded to its last token?"""
        return self.recent > 0 or self.block > 1

    def coded(self, earlier: int) -> range:
        """The tokens that are coded when a query runs with ``earlier`` tokens in the cache."""
        blocks = max(0, earlier - self.sinks - self.recent) // self.block
        start = min(self.sinks, earlier)
        return range(start, start + self.block * blocks)


@dataclass(frozen=True)
class Layers:
    """Layers that depart from the grid: the first and last few in 16 bits, others at levels of their own.

    levels: by the layer's number in the model, for example ``{0: 256}``. others: levels of all other layers, which no
    grid changes then. called: what these levels are called in names, where they are not spelled out.
    """

    skip_first: int = 0
    skip_last: int = 0
    levels: dict[int, int] | None = None
    others: int | None = None
    called: str | None = None

    def __post_init__(self) -> None:
        for name in ("skip_first", "skip_last"):
            whole(f"layers.{name}", getattr(self, name), 0)
        if self.others is not None:
            whole("layers.others", self.others, 2)
        if self.called is not None and not re.fullmatch(r"[\w.-]+", str(self.called)):
            raise UsageError(f"layers.called={self.called} must be of letters, digits, dots and dashes")
        chosen = {} if self.levels is None else dict(self.levels)
        for layer, count in chosen.items():
            if not str(layer).isdigit() or not is_whole(count) or count < 2:
                raise UsageError(
                    f"layers.levels must give layers whole numbers of levels from 2, not {layer}: {count}"
                )
        object.__setattr__(self, "levels", {int(layer): count for layer, count in chosen.items()} or None)

    def __hash__(self) -> int:
        levels = tuple(sorted((self.levels or {}).items()))
        return hash((self.skip_first, self.skip_last, levels, self.others, self.called))

    def stored(self, layer: int, layers: int) -> bool:
        """Is ``layer`` of a model of ``layers`` layers coded at all?"""
        return self.skip_first <= layer < layers - self.skip_last

    def check(self, layers: int) -> None:
        """Raise UsageError if levels are given to a layer that a model of ``layers`` layers does not have."""
        if (last := max(self.levels or {}, default=0)) >= layers:
            raise UsageError(
                f"layers.levels gives levels to layer {last}, and this model's last layer is {layers - 1}"
            )

    def count(self, layer: int, levels: int) -> int:
        """Levels of ``layer`` at the grid point ``levels``."""
        return (self.levels or {}).get(layer, levels)
