"""Which levels a token of the packed cache gets, with what a cache alone can know of its importance."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from semkv_bench.errors import UsageError
from semkv_bench.grid.levels import MAX_LEVELS
from semkv_bench.importance.base import Needs
from semkv_bench.importance.block import cache_scores
from semkv_bench.importance.choice import choices, metric
from semkv_bench.kernels import AlignedLayout, PackedLayout
from semkv_bench.kernels.packed import largest_block, upload
from semkv_bench.protocols.rule import CodingRule, Ranks
from semkv_bench.quantizers.packing import Layout
from semkv_bench.settings.allocation import SHARED, Allocation
from semkv_bench.settings.setting import Setting

__all__ = ["Layouts", "Ranking", "Seen"]

Seen = Callable[[int], tuple[Tensor, Tensor]]
"""Keys and values [heads, tokens, head_dim] of one row that packed layer number ``place`` holds open."""


class Ranking:
    """Levels of tokens under one setting.

    importance: scores by metric label for every row, [packed layers, tokens] or [1, tokens], of the
    prompt without padding and without its last token; they come before what the cache could find itself.
    prompts: token ids of every row's prompt, padding and last token included; None if they are not known.
    """

    def __init__(
        self,
        setting: Setting,
        layers: int,
        seed: int,
        importance: Sequence[Mapping[str, Tensor]] | None,
        rule: CodingRule,
        prompts: Sequence[Sequence[int]] | None = None,
    ):
        self.prompts = prompts
        self.layers = layers
        self.seed = seed
        self.importance = importance
        sides = [side.allocation for side in (setting.keys, setting.values) if side is not None]
        self.allocations = [allocation for allocation in sides if allocation.metric is not None]
        for label in sorted(setting.metrics):
            if metric(label).needs.in_cache:
                continue
            known = [name for name in choices() if metric(name).needs.in_cache]
            if rule.codes_tail:
                raise UsageError(
                    f"a cache alone cannot rank generated tokens by {label}; rank by {', '.join(known)}, "
                    "or use parts='prompt'"
                )
            if not self._given(label):
                raise UsageError(
                    f"a cache alone cannot know {label}; rank by {', '.join(known)}, "
                    f"or pass scores of the prompt's tokens: importance={{{label!r}: scores}}"
                )

    @property
    def spans_layers(self) -> bool:
        """Must every layer have seen the tokens before the first one can code them?"""
        return any(
            allocation.scope == SHARED
            and not self._given(allocation.metric)
            and metric(allocation.metric).needs is Needs.CACHE
            for allocation in self.allocations
        )

    def levels(
        self,
        allocation: Allocation,
        start: int,
        tokens: int,
        row: int,
        place: int,
        seen: Seen,
        prompt: int,
        padding: int = 0,
    ) -> Tensor:
        """Levels int64 [tokens] of the row's own tokens from ``start`` on, for packed layer number ``place``.

        prompt: tokens of the row's prompt that they belong to; 0: they come after it. padding: tokens before it.
        """

        def scores(label: str) -> Tensor:
            return self._scores(allocation, start, tokens, row, place, seen, prompt, padding)

        return Ranks(scores).levels(allocation, place, range(tokens)).expand(tokens)

    def _given(self, label: str) -> bool:
        return self.importance is not None and all(label in row for row in self.importance)

    def _scores(
        self,
        allocation: Allocation,
        start: int,
        tokens: int,
        row: int,
        place: int,
        seen: Seen,
        prompt: int,
        padding: int,
    ) -> Tensor:
        """Scores [layers or 1, tokens]; of a layer of its own scope, that layer's alone."""
        label = allocation.metric
        if prompt and self._given(label):
            return self._prepared(label, prompt, row)[:, start : start + tokens]
        scored = metric(label)
        if scored.needs is Needs.IDS and prompt and self.prompts is not None:
            ids = self._ids(row, padding, prompt)
            return cache_scores(scored, (), seen, ids, prompt, self.seed)[:, start : start + tokens]
        if self.prompts is not None:
            # As a sweep draws: anew for every prompt and block, the same for all settings.
            ids = [*self._ids(row, padding), start, *range(tokens)]
        else:
            # A cache alone never sees token ids, so a draw by chance hangs on the seed, the place and the length.
            ids = range(start, start + tokens)
        places = range(self.layers) if allocation.scope == SHARED else [place]
        return cache_scores(scored, places, seen, ids, tokens, self.seed)

    def select(self, rows: Sequence[int]) -> None:
        """The cache's rows ``rows`` are its rows from now on."""
        if self.prompts is not None:
            self.prompts = [self._prompt(row) for row in rows]

    def _prompt(self, row: int) -> Sequence[int]:
        if len(self.prompts) == 1:  # of all beams
            return self.prompts[0]
        if row >= len(self.prompts):
            raise UsageError(f"prompt_ids has {len(self.prompts)} rows, the batch has more")
        return self.prompts[row]

    def _ids(self, row: int, padding: int, tokens: int | None = None) -> Sequence[int]:
        """Ids of a row's prompt without padding and last token, which must be ``tokens`` many."""
        ids = self._prompt(row)[padding:-1]
        if tokens is not None and len(ids) != tokens:
            raise UsageError(
                f"prompt_ids has {len(ids) + 1} tokens in row {row}, the prompt that came {tokens + 1}; "
                "pass the ids that the model is fed, the last one included"
            )
        return ids

    def _prepared(self, label: str, tokens: int, row: int) -> Tensor:
        if row >= len(self.importance):
            raise UsageError(f"importance has {len(self.importance)} rows, the batch has more")
        scores = self.importance[row][label].cpu()
        scores = scores[None] if scores.dim() == 1 else scores
        if len(scores) not in (1, self.layers) or scores.shape[-1] != tokens:
            raise UsageError(
                f"importance[{label!r}] must be [{self.layers}, {tokens}] or [1, {tokens}]: packed layers, "
                f"and prompt tokens but the last; it is {tuple(scores.shape)}"
            )
        return scores


_ALIGNED_PIECE = 768  # tokens up to which pieces for attention are stored together: a few tiles of its kernel


class Layouts:
    """Layouts that tokens coded at the same time have in common, so that each is built and stored once."""

    def __init__(self, block: int):
        self.block = block
        self._found: dict[tuple, tuple] = {}

    def clear(self) -> None:
        """Forget what was found; caches keep the layouts that they use."""
        self._found.clear()

    def levels(self, key: tuple, make: Callable[[], Tensor], device: torch.device) -> Tensor:
        """Levels int64 [tokens] that belong to ``key``, on ``device``."""
        if key not in self._found:
            self._found[key] = (make(),)
        if (key, device) not in self._found:
            self._found[key, device] = (upload(self._found[key][0], device),)
        return self._found[key, device][0]

    def layout(self, levels: Tensor, heads: int, head_dim: int) -> PackedLayout:
        """Layout of codes of so many levels, which is shared by all that come with this very tensor."""
        key = ("layout", id(levels), heads, head_dim)
        if key not in self._found:
            # The tensor is kept beside its layout, so that its identity stays taken.
            # Of wide vectors so many that a block's digits can be counted.
            block = min(self.block, largest_block(head_dim))
            self._found[key] = (PackedLayout.build(levels, heads, head_dim, block), levels)
        return self._found[key][0]

    def aligned(
        self, levels: Tensor, pair: tuple[Tensor, Tensor], heads: int, head_dim: int
    ) -> AlignedLayout:
        """Layout for attention of codes of so many levels; ``pair``: levels of keys and values of the same tokens."""
        key = ("aligned", id(levels), *map(id, pair), heads, head_dim)
        if key not in self._found:
            keys, values = pair
            order = keys * (MAX_LEVELS + 1) + values
            self._found[key] = (AlignedLayout.build(levels, heads, head_dim, order), levels, *pair)
        return self._found[key][0]

    def joins(self, layout: Layout, tokens: int) -> bool:
        """Are ``tokens`` more to be stored together with those of ``layout``?"""
        block = _ALIGNED_PIECE if isinstance(layout, AlignedLayout) else layout.block
        return layout.ends_block or layout.tokens + tokens <= block

    def joined(self, first: Layout, second: Layout) -> Layout:
        """Layout of the tokens of both."""
        # Both are kept beside their join, so that their identities stay taken.
        key = ("joined", id(first), id(second))
        if key not in self._found:
            self._found[key] = (self._of((first, second), first.tokens + second.tokens), first, second)
        return self._found[key][0]

    def shortened(self, layout: Layout, tokens: int) -> Layout:
        """Layout of the first ``tokens`` tokens."""
        key = ("shortened", id(layout), tokens)
        if key not in self._found:
            self._found[key] = (self._of((layout,), tokens), layout)
        return self._found[key][0]

    def _of(self, parts: Sequence[Layout], tokens: int) -> Layout:
        """Layout of the first ``tokens`` tokens of these together."""

        def text(of: Callable[[Layout], Tensor]) -> Tensor:
            return torch.cat([part.unsort(of(part)[None])[0] for part in parts])[:tokens]

        levels, (first, *_) = text(lambda part: part.levels()), parts
        if isinstance(first, AlignedLayout):
            keys = text(lambda part: part.keys())
            return AlignedLayout.build(levels, first.heads, first.head_dim, keys)
        return PackedLayout.build(levels, first.heads, first.head_dim, first.block)
