"""Coding the rows of a sweep: the prompt for all settings at once, later blocks row by row."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from semkv_bench.engine.rows import RowCache, RowLayer
from semkv_bench.grid.cost import SIDES, Tokens
from semkv_bench.importance import metric
from semkv_bench.importance.cached import CacheMetric
from semkv_bench.importance.controls import ControlMetric
from semkv_bench.importance.tail import Fed, TailNotes
from semkv_bench.protocols.rule import Blocks, coder_seed, ranking
from semkv_bench.quantizers import Coder, NonFiniteError
from semkv_bench.settings.allocation import GONE, Allocation
from semkv_bench.settings.setting import Coded, Setting

__all__ = ["RowCoding"]


class RowCoding:
    """Codes what a rule says of the rows of one batch.

    settings: of the rows, by ``Row.index``. quantized: the layers that are coded. prompt_ids and seed
    fix what is drawn by chance.
    """

    def __init__(
        self,
        rows: RowCache,
        settings: Sequence[Setting],
        rule: Blocks,
        quantized: Sequence[int],
        prompt_ids: Sequence[int],
        seed: int,
    ):
        self.rows = rows
        self.settings = settings
        self.rule = rule
        self.places = {layer: place for place, layer in enumerate(quantized)}
        self._prompt_ids = prompt_ids
        self._seed = seed
        self._coders: dict[tuple, Coder] = {}
        self.notes: TailNotes | None = None

    def fill(self, prompt: RowCache, room: int, scores: Callable[[str], Tensor]) -> None:
        """Give every row the prompt's cache as its setting would return it.

        room: tokens that will follow; scores: a metric's scores of the prompt's tokens by its label.
        """
        length = prompt.get_seq_length()
        self.rows.reserve(len(self.settings), length + room)
        self.rows.take_states(prompt)
        for index, target in self.rows.attending.items():
            stored = prompt.attending[index].stored()
            views = target.take(length, like=stored)
            ranked = partial(ranking, place=self.places.get(index, 0), scores=scores)
            for side, (states, view) in enumerate(zip(stored, views, strict=True)):
                coded = [self._side(setting, index, side) for setting in self.settings]
                if not self.rule.codes_prompt:
                    coded = [None] * len(coded)
                with _named(index, side):
                    _fill_side(states[0], view, coded, ranked, coder_seed(self._seed, index, side))
            if self.rule.codes_prompt:
                for row in range(len(self.settings)):
                    self._delete(target, row, slice(0, length), ranked)
        for row in self.rows.rows:
            row.settled = length
            row.pieces = (length,) if self.rule.codes_prompt else ()

    @property
    def noted(self) -> list[str]:
        """Metrics of tokens after the prompt that must be noted while these are fed."""
        labels = (
            set().union(*(setting.metrics for setting in self.settings)) if self.rule.codes_tail else set()
        )
        return sorted(label for label in labels if not isinstance(metric(label), CacheMetric | ControlMetric))

    def announce(self, tokens: Sequence[Sequence[int]]) -> None:
        """A forward call begins, which feeds every row its ``tokens``."""
        if self.notes is None:
            return
        call = []
        for number, (row, length, ids) in enumerate(
            zip(self.rows.rows, self.rows.lengths, tokens, strict=True)
        ):
            call.append(Fed(row.index, length, self.rows.opened(number), ids))
        self.notes.begin(call)

    def mark(self, lengths: Sequence[int] | None = None) -> Callable[[], None]:
        """Returns a function that undoes all that is fed and coded from now on; ``lengths`` as of ``RowCache.mark``."""
        marks = self.rows.mark(lengths)
        restore = None if self.notes is None else self.notes.save()

        def undo() -> None:
            self.rows.return_to(marks)
            if restore is not None:
                restore()

        return undo

    def stored(self, number: int) -> tuple[Tokens, Tokens]:
        """Keys and values that row ``number`` holds in each coded layer, by state."""
        row, length = self.rows.rows[number], self.rows.lengths[number]
        setting, opened = self._setting(number), self.rows.opened(number)
        lasting, waiting = (0, opened) if self.rule.codes_tail else (opened, 0)
        if setting.prune is not None:
            deleted = self.rows.count_deleted(number)
            held = Tokens(kept=row.settled - deleted + lasting, open=waiting, deleted=deleted)
        else:
            held = Tokens.of(row.pieces, kept=row.settled - row.coded + lasting, open=waiting)
        return tuple(held if setting.codes(side) else Tokens(kept=length) for side in SIDES)

    def fits(self, row: int, new: int = 0) -> int | None:
        """Tokens that one call may bring after ``new`` more in row number ``row`` and see what single steps would see.

        None: any number.
        """
        return self.rule.fits(self.rows.opened(row) + new)

    def due(self, row: int, new: int) -> bool:
        """Would ``new`` more tokens in row number ``row`` leave something that must be coded?"""
        return self.rule.due(self.rows.opened(row) + new) > 0

    def close(self, all_open: bool = False) -> None:
        """Code what must be coded before another token comes; with ``all_open``, everything that is open."""
        if not self.rule.codes_tail:
            return
        due = {}
        for number in range(len(self.rows.rows)):
            opened = self.rows.opened(number)
            if count := opened if all_open else self.rule.due(opened):
                due[number] = self.rule.pieces(count)
        for block in itertools.zip_longest(*due.values()):
            self._code({row: size for row, size in zip(due, block, strict=True) if size})

    def _code(self, sizes: dict[int, int]) -> None:
        """Code the first ``sizes[row]`` open tokens of rows, or delete those that their settings prune."""
        spans = {
            row: slice(self.rows.rows[row].settled, self.rows.rows[row].settled + size)
            for row, size in sizes.items()
        }
        scores = {row: self._scores(row, here) for row, here in spans.items()}
        for index, layer in self.rows.attending.items():
            for side in range(2):
                with _named(index, side):
                    self._code_side(index, layer, side, spans, scores)
            for row, here in spans.items():
                ranked = partial(ranking, place=self.places.get(index, 0), scores=scores[row])
                self._delete(layer, row, here, ranked)
        for row, size in sizes.items():
            book = self.rows.rows[row]
            book.settled += size
            book.pieces += (size,)

    def _delete(
        self, layer: RowLayer, row: int, here: slice, ranked: Callable[[Allocation], Tensor | None]
    ) -> None:
        """Delete of the tokens ``here`` what the row's setting does not keep."""
        prune = self._setting(row).prune
        if prune is not None:
            levels = prune.levels(here.stop - here.start, ranked(prune))
            layer.delete(row, here, levels == GONE)

    def _code_side(
        self,
        index: int,
        layer: RowLayer,
        side: int,
        spans: dict[int, slice],
        scores: dict[int, Callable[[str], Tensor]],
    ) -> None:
        """Keys (0) or values (1) of one layer: rows of one quantizer in one call, tokens with levels of their own."""
        groups: dict = {}
        for row in spans:
            coded = self._side(self._setting(row), index, side)
            if coded is not None:
                groups.setdefault(coded.quantizer, []).append((row, coded.allocation))
        for quantizer, members in groups.items():
            views = [layer.part(row, spans[row])[side] for row, _ in members]
            levels = [
                allocation.levels(view.shape[1], ranking(allocation, self.places[index], scores[row])).expand(
                    view.shape[1]
                )
                for (row, allocation), view in zip(members, views, strict=True)
            ]
            x = torch.cat(views, dim=1)
            coder = self._coder(quantizer, index, side, x)
            decoded = coder.decode(coder.encode(x, torch.cat(levels).to(x.device)), x.dtype)
            for view, values in zip(views, decoded.split([v.shape[1] for v in views], dim=1), strict=True):
                view.copy_(values)

    def _scores(self, row: int, here: slice) -> Callable[[str], Tensor]:
        """A metric's scores of the tokens at ``here`` of one row, [quantized layers, tokens] or [1, tokens]."""
        found: dict[str, Tensor] = {}

        def scores(label: str) -> Tensor:
            if label not in found:
                found[label] = self._score(label, row, here)
            return found[label]

        # Scores must be taken before the first layer is coded.
        for label in self._setting(row).metrics:
            scores(label)
        return scores

    def _score(self, label: str, row: int, here: slice) -> Tensor:
        scored, count = metric(label), here.stop - here.start
        if isinstance(scored, CacheMetric):
            layers = [self.rows.layers[index] for index in self.places]
            return torch.stack([scored.score(*layer.part(row, here)).cpu() for layer in layers])
        first = here.start
        if isinstance(scored, ControlMetric):
            # Chance is drawn anew for every prompt and block, and is the same for all settings.
            ids = [*self._prompt_ids, first, *range(count)]
            return scored.score(torch.tensor(ids), self._seed)[None, -count:]
        return self.notes.scores(label, self.rows.rows[row].index, slice(first, first + count))

    def _setting(self, row: int) -> Setting:
        return self.settings[self.rows.rows[row].index]

    def _side(self, setting: Setting, layer: int, side: int) -> Coded | None:
        return (setting.keys, setting.values)[side] if layer in self.places else None

    def _coder(self, quantizer, index: int, side: int, x: Tensor) -> Coder:
        key = (quantizer, index, side)
        if key not in self._coders:
            seed = coder_seed(self._seed, index, side)
            self._coders[key] = quantizer.coder(x.shape[2], seed, x.device)
        return self._coders[key]


class _named:
    """Errors about values that are not finite name the layer and the tensor."""

    def __init__(self, layer: int, side: int):
        self.where = f"layer {layer}, {SIDES[side]}"

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, trace) -> None:
        if isinstance(error, NonFiniteError):
            raise NonFiniteError(f"{self.where}: {error}") from error


def _fill_side(
    states: Tensor,
    view: Tensor,
    coded: Sequence[Coded | None],
    ranked: Callable[[Allocation], Tensor | None],
    seed: int,
) -> None:
    """states [heads, tokens, head_dim] into view [rows, heads, tokens, head_dim], as each row's coding returns it."""
    start = 0
    for quantizer, run in itertools.groupby(coded, key=lambda side: None if side is None else side.quantizer):
        sides = list(run)
        target = view[start : start + len(sides)]
        start += len(sides)
        if quantizer is None:
            target.copy_(states.expand_as(target))
            continue
        levels = [side.allocation.levels(states.shape[1], ranked(side.allocation)) for side in sides]
        widest = max(len(row) for row in levels)
        stacked = torch.stack([row.expand(widest) for row in levels]).to(states.device)
        quantizer.coder(states.shape[2], seed, states.device).quantize_dequantize(states, stacked, out=target)
