"""Shares of a sweep: ``shard=2/4`` runs the second quarter of the examples into the same run folder."""

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from semkv_bench.errors import UsageError

if TYPE_CHECKING:
    from semkv_bench.tasks import Example

__all__ = ["Shard"]


@dataclass(frozen=True)
class Shard:
    """Share number ``index`` (from 1) of ``count``."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """``2/4`` as a shard.

        Raises:
            UsageError: not of the form i/K with 1 <= i <= K.
        """
        found = re.fullmatch(r"\s*(\d+)\s*/\s*(\d+)\s*", str(text), flags=re.ASCII)
        if not found or not 1 <= int(found[1]) <= int(found[2]):
            raise UsageError(f"shard={text} must be i/K with i from 1 to K, for example shard=2/4")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def take(
        self, examples: Sequence["Example"], together: Callable[["Example"], Hashable] | None = None
    ) -> tuple["Example", ...]:
        """The examples of this share, in their order.

        A share depends on the planned examples alone. In each task the shares differ by at most one group, and so
        they do over all tasks; long prompts are dealt first, so that their tokens are close, too. ``together``
        gives examples that must stay in one share the same value (None: each is a group of its own).
        """
        groups: dict[Hashable, list[int]] = {}
        for place, example in enumerate(examples):
            key = place if together is None else together(example)
            groups.setdefault((example.task, key), []).append(place)

        def order(group: list[int]) -> tuple:
            first = examples[group[0]]
            return (first.task, -len(first.input_ids), first.example_id, first.seed)

        mine: list[int] = []
        dealt = 0
        for _, of_task in groupby(sorted(groups.values(), key=order), key=lambda g: examples[g[0]].task):
            hands = list(of_task)
            for turn, group in enumerate(hands):
                # Each round is dealt the other way, or the first shares would get the longest prompts of every round.
                lap, seat = divmod(turn, self.count)
                full_lap = (lap + 1) * self.count <= len(hands)
                if lap % 2 and full_lap:
                    seat = self.count - 1 - seat
                if (dealt + seat) % self.count == self.index - 1:
                    mine.extend(group)
            dealt += len(hands)
        return tuple(examples[place] for place in sorted(mine))
