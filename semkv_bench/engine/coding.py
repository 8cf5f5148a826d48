"""Coding the rows of a sweep: the prompt for all settings at once, later blocks row by row."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from semkv_bench.engine.row_layer import Row, RowLayer
from semkv_bench.engine.rows import RowCache
from semkv_bench.engine.stretches import stretches
from semkv_bench.grid.cost import SIDES, Tokens
from semkv_bench.importance import metric
from semkv_bench.importance.block import cache_scores
from semkv_bench.importance.generated import Feed, GeneratedScores
from semkv_bench.kernels.numerics import finite_together, named
from semkv_bench.models.rotary import Rotary
from semkv_bench.protocols.rule import CodingRule, Ranks, Window, coder_seed, settled, window
from semkv_bench.quantizers import Coder, Quantizer
from semkv_bench.quantizers.parts import Place
from semkv_bench.settings.allocation import GONE
from semkv_bench.settings.setting import Coded, Setting

__all__ = ["RowCoder"]


class RowCoder:
    """Codes what a rule says of the rows of one batch.

    settings: of the rows, by ``Row.index``. quantized: the layers that are coded. prompt_ids and seed
    fix what is drawn by chance. rotary: gives how the keys of every layer are turned, for methods that undo it.
    """

    def __init__(
        self,
        rows: RowCache,
        settings: Sequence[Setting],
        rule: CodingRule,
        quantized: Sequence[int],
        prompt_ids: Sequence[int],
        seed: int,
        rotary: Callable[[], Mapping[int, Rotary]] | None = None,
    ):
        self._rotary = rotary
        self.rows = rows
        self.settings = settings
        self.rule = rule
        self.places = {layer: place for place, layer in enumerate(quantized)}
        self._prompt_ids = prompt_ids
        self._prompt = 0
        self._seed = seed
        self._coders: dict[tuple, Coder] = {}
        self.notes: GeneratedScores | None = None

    def fill(
        self,
        prompt: RowCache,
        room: int,
        ranks: Ranks,
        unseen: Callable[[str], Tensor] | None = None,
    ) -> None:
        """Give every row the prompt's cache as its setting would return it.

        room: tokens that will follow; ranks: of the prompt's tokens; unseen: a metric's scores of the tokens before
        the question, which the metric did not see.
        """
        length = prompt.get_seq_length()
        self.rows.reserve(len(self.settings), length + room)
        self._prompt = length
        self.rows.take_states(prompt)
        evicted = self._evicted(prompt, {"seen": ranks.scores, "unseen": unseen})
        with finite_together():
            for index, target in self.rows.attending.items():
                self._fill_layer(prompt, index, target, ranks, evicted)
        for number, row in enumerate(self.rows.rows):
            self._settle_prompt(row)
            if number in evicted and self.settings[number].prune.renumbered:
                self._renumber(number, ~evicted[number][0, 0])

    def _fill_layer(
        self, prompt: RowCache, index: int, target: RowLayer, ranks: Ranks, evicted: Mapping[int, Tensor]
    ) -> None:
        """One layer of every row."""
        stored = prompt.attending[index].stored()
        target.begin(stored, settled(self.rule, self.settings, self._prompt))
        for side, states in enumerate(stored):
            with _named(index, side):
                self._fill_side(states, target, index, side, ranks)
        for row, setting in enumerate(self.settings):
            if setting.read is not None and index in self.places:
                target.read_blocks(row, setting.read)
        if self.rule.codes_prompt:
            for row in range(len(self.settings)):
                if row in evicted and index in self.places:
                    target.delete(row, slice(0, self._prompt), evicted[row][self.places[index]])
                elif row not in evicted:
                    self._delete(index, row, range(self._prompt), ranks)

    def _renumber(self, number: int, kept: Tensor) -> None:
        """Turn the keys of a row to positions that count only the ``kept`` tokens, bool [tokens], of every head."""
        rotary, true = self._rotary(), torch.arange(len(kept))
        new = (kept.cumsum(0) - 1).clamp_min(0)
        for index, layer in self.rows.attending.items():
            keys = layer.part(number, slice(0, len(kept)))[0]
            keys.copy_(rotary[index].apply(rotary[index].undo(keys.float(), true), new))
        self.rows.rows[number].shift = int((~kept).sum())

    def _settle_prompt(self, row: Row) -> None:
        """Note what of the prompt is stored coded in a row."""
        windows = [self._window(self.settings[row.index], side) for side in range(2)]
        row.settled = tuple(window.coded(self._prompt).stop for window in windows)
        row.pieces = tuple(window.prompt_pieces() for window in windows)

    def _fill_side(
        self,
        states: Tensor,
        layer: RowLayer,
        index: int,
        side: int,
        ranks: Ranks,
    ) -> None:
        """states [1, heads, tokens, head_dim] into the rows of a layer, as each row's setting stores them."""
        start, tokens = 0, states.shape[2]
        coded = [(self._side(setting, index, side), setting) for setting in self.settings]
        for quantizer, run in itertools.groupby(coded, key=lambda pair: pair[0] and pair[0].quantizer):
            alike = list(run)
            rows = range(start, start + len(alike))
            start = rows.stop
            span = range(0) if quantizer is None else self._window(alike[0][1], side).coded(tokens)
            here = slice(span.start, span.stop)
            if len(span) < tokens:
                layer.keep(side, slice(rows.start, rows.stop), states)
            if quantizer is None:
                continue
            coder = self._coder(quantizer, index, side, states)
            coder.prepare(states[0])
            if not span:
                continue
            allocations = [one.allocation for one, _ in alike]
            stacked = ranks.stacked(allocations, self.places[index], span, states.device)
            placed = coder.placed(span.start)
            if quantizer.prompt_metric is not None:
                scores = ranks.scores(quantizer.prompt_metric)[self.places[index]]
                placed = placed.scored(scores[here].to(states.device))
            if layer.packs:
                for row, levels in zip(rows, stacked, strict=True):
                    layer.pack(side, row, placed, span, states[0, :, here], levels.expand(len(span)))
                continue
            target = layer.stored()[side][rows.start : rows.stop, :, here]
            pieces = [(row, here) for row in rows]
            self._quantize(placed, (index, side), pieces, states[:, :, here], stacked, target)

    def _quantize(
        self,
        coder: Coder,
        at: tuple[int, int],
        pieces: Sequence[tuple[int, slice]],
        x: Tensor,
        levels: Tensor,
        out: Tensor,
    ) -> None:
        """See ``Coder.quantize_dequantize``; at: layer and side; pieces: row and tokens of each of ``out``."""
        if not coder.predicts:
            coder.quantize_dequantize(x, levels, out=out)
            return
        xs, counts = x.expand_as(out), levels.expand(len(out), -1)
        for (row, here), one, count, target in zip(pieces, xs, counts, out, strict=True):
            told = coder.beside(self._below(*at, row, here))
            told.quantize_dequantize(one[None], count[None], out=target[None])

    def _below(self, index: int, side: int, row: int, here: slice) -> list[Tensor]:
        """See ``Coder.beside``."""
        coded = list(self.places)
        if not self.places[index]:
            return []
        below = coded[self.places[index] - 1]
        keys, values = self.rows.attending[below].part(row, here)
        if side == 0:
            return [self._unturned_keys(keys, below, here)]
        return [self._unturned_keys(self.rows.attending[index].part(row, here)[0], index, here), values]

    def _unturned_keys(self, keys: Tensor, index: int, here: slice) -> Tensor:
        """A layer's keys as they are before the rotary embedding."""
        positions = torch.arange(here.start, here.stop, device=keys.device)
        return self._rotary()[index].undo(keys.double(), positions).float()

    def _evicted(
        self, prompt: RowCache, scores: dict[str, Callable[[str], Tensor] | None]
    ) -> dict[int, Tensor]:
        """What goes of the prompt in every layer and head, bool [quantized layers, heads, tokens], by row."""
        heads = {prompt.attending[index].kv_heads for index in self.places}
        rows = [row for row, setting in enumerate(self.settings) if setting.prune and setting.prune.per_head]
        return {
            row: self.settings[row].prune.deleted(
                lambda label, question: scores[question](label), (len(self.places), *heads), self._prompt
            )
            for row in rows
        }

    @property
    def prompt(self) -> int:
        """Tokens of the prompt."""
        return self._prompt

    @contextmanager
    def on_arrival(self, tokens: int) -> Iterator[None]:
        """While this lasts, one call of ``tokens`` tokens to empty rows codes them before attention sees them.

        They are coded as a prompt of so many tokens is, each row from its own 16-bit values.
        """
        self._prompt = tokens
        for row in self.rows.rows:
            self._settle_prompt(row)
        layers = {index: layer for index, layer in self.rows.attending.items() if index in self.places}
        for index, layer in layers.items():
            layer.arrived = partial(self._code_arrived, index, layer)
        try:
            yield
        finally:
            for layer in layers.values():
                layer.arrived = None

    def _code_arrived(self, index: int, layer: RowLayer) -> None:
        for row in range(layer.rows):
            setting = self._setting(row)
            for side in range(2):
                coded, span = (
                    self._side(setting, index, side),
                    self._window(setting, side).coded(self._prompt),
                )
                if coded is None or not span:
                    continue
                coder = self._coder(coded.quantizer, index, side, layer.keys)
                coder.prepare(layer.part(row, slice(0, self._prompt))[side].clone())
                view = layer.part(row, slice(span.start, span.stop))[side]
                levels = coded.allocation.levels(len(span), None).expand(len(span))
                coder = coder.placed(span.start)
                pieces = [(row, slice(span.start, span.stop))]
                with _named(index, side):
                    self._quantize(
                        coder,
                        (index, side),
                        pieces,
                        view[None].clone(),
                        levels[None].to(view.device),
                        view[None],
                    )

    @property
    def noted(self) -> list[str]:
        """Metrics of tokens after the prompt that must be noted while these are fed."""
        labels = (
            set().union(*(setting.metrics for setting in self.settings)) if self.rule.codes_tail else set()
        )
        return sorted(label for label in labels if not metric(label).needs.in_cache)

    def announce(self, tokens: Sequence[Sequence[int]]) -> None:
        """A forward call begins, which feeds every row its ``tokens``."""
        if self.notes is None:
            return
        call = []
        for number, (row, length, ids) in enumerate(
            zip(self.rows.rows, self.rows.lengths, tokens, strict=True)
        ):
            call.append(Feed(row.index, length, self.rows.opened(number), ids))
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
        row, length, setting = self.rows.rows[number], self.rows.lengths[number], self._setting(number)
        deleted = self.rows.count_deleted(number)
        found = []
        for side, name in enumerate(SIDES):
            window = self._window(setting, side)
            if not setting.codes(name):
                found.append(Tokens(kept=length))
            elif setting.keys is not None and setting.prune is not None:
                held = window.tokens(length, row.pieces[side], row.settled[side])
                coded = max(0, held.coded_tokens - deleted)
                found.append(Tokens.of([coded], kept=held.kept, open=held.open, deleted=deleted))
            elif setting.prune is not None:
                held = window.tokens(length, (), row.settled[side])
                found.append(Tokens(kept=held.kept - deleted, open=held.open, deleted=deleted))
            else:
                found.append(window.tokens(length, row.pieces[side], row.settled[side]))
        return tuple(found)

    def fits(self, row: int, new: int = 0) -> int | None:
        """Tokens that one call may bring after ``new`` more in row number ``row`` and see what single steps would see.

        None: any number.
        """
        length = self.rows.lengths[row] + new
        settled = self.rows.rows[row].settled
        limits = [self._window(self._setting(row), side).fits(length, settled[side]) for side in range(2)]
        return min((limit for limit in limits if limit is not None), default=None)

    def due(self, row: int, new: int) -> bool:
        """Would ``new`` more tokens in row number ``row`` leave something that must be coded?"""
        length = self.rows.lengths[row] + new
        return any(self._due_pieces(row, side, length, False) for side in range(2)) and self.rule.codes_tail

    def close(self, all_open: bool = False) -> None:
        """Code what must be coded before another token comes; with ``all_open``, what a turn's end leaves open too."""
        if not self.rule.codes_tail:
            return
        due: dict[tuple[int, int], list[range]] = {}
        for row, length in enumerate(self.rows.lengths):
            for side in range(2):
                if pieces := self._due_pieces(row, side, length, all_open):
                    due[row, side] = pieces
        for pieces in itertools.zip_longest(*due.values()):
            self._code({place: piece for place, piece in zip(due, pieces, strict=True) if piece})

    def _due_pieces(self, row: int, side: int, length: int, all_open: bool) -> list[range]:
        """The stretches of one side of a row of ``length`` tokens that must be coded."""
        window, settled = self._window(self._setting(row), side), self.rows.rows[row].settled[side]
        span = window.coded(length, all_open, settled)
        start = max(settled, span.start)
        sizes = window.pieces(start, span.stop) if span.stop > start else []
        ends = itertools.accumulate(sizes, initial=start)
        return [range(*pair) for pair in itertools.pairwise(ends)]

    def _code(self, pieces: dict[tuple[int, int], range]) -> None:
        """Code one stretch of tokens of each (row, side), or delete those that their settings prune."""
        ranks = {(row, piece): self._ranks(row, piece) for (row, _), piece in pieces.items()}
        with finite_together():
            for index, layer in self.rows.attending.items():
                for side in range(2):
                    mine = {row: piece for (row, of), piece in pieces.items() if of == side}
                    with _named(index, side):
                        self._code_side(index, layer, side, mine, ranks)
                for (row, side), piece in pieces.items():
                    if side == 0:
                        self._delete(index, row, piece, ranks[row, piece])
        for (row, side), piece in pieces.items():
            book = self.rows.rows[row]
            book.settled = _changed(book.settled, side, piece.stop)
            book.pieces = _changed(book.pieces, side, (*book.pieces[side], len(piece)))

    def _delete(self, index: int, row: int, piece: range, ranks: Ranks) -> None:
        """Delete of a row's tokens ``piece``, which ``ranks`` are of, what its setting does not keep in a layer."""
        prune = self._setting(row).prune
        if prune is not None:
            levels = ranks.levels(prune, self.places.get(index, 0), range(len(piece)))
            self.rows.attending[index].delete(row, slice(piece.start, piece.stop), levels == GONE)

    def _code_side(
        self,
        index: int,
        layer: RowLayer,
        side: int,
        pieces: dict[int, range],
        ranks: dict[tuple[int, range], Ranks],
    ) -> None:
        """Keys (0) or values (1) of one layer: rows of one quantizer and as many tokens in one call."""
        groups: dict = {}
        for row, piece in pieces.items():
            coded = self._side(self._setting(row), index, side)
            if coded is not None:
                start = piece.start if coded.quantizer.positional else 0
                groups.setdefault((coded.quantizer, len(piece), start), []).append((row, coded.allocation))
        for (quantizer, count, start), members in groups.items():
            starts = tuple((row, pieces[row].start - layer.first) for row, _ in members)
            here, buffer = stretches(starts, count, layer.device), (layer.keys, layer.values)[side]
            levels = [
                ranks[row, pieces[row]].levels(allocation, self.places[index], range(count)).expand(count)
                for row, allocation in members
            ]
            x = here.take(buffer)
            coder = self._coder(quantizer, index, side, x).placed(start)
            places = [(row, slice(pieces[row].start, pieces[row].stop)) for row, _ in members]
            decoded = torch.empty_like(x)
            self._quantize(coder, (index, side), places, x, torch.stack(levels).to(x.device), decoded)
            here.put(buffer, decoded)

    def _ranks(self, row: int, piece: range) -> Ranks:
        """Of the tokens ``piece`` of one row."""
        here = slice(piece.start, piece.stop)
        # Scores must be taken before the first layer is coded.
        return Ranks(
            {label: self._score(label, row, here) for label in self._setting(row).metrics}.__getitem__
        )

    def _score(self, label: str, row: int, here: slice) -> Tensor:
        scored, count = metric(label), here.stop - here.start
        first = here.start
        if scored.needs.in_cache:
            # Chance is drawn anew for every prompt and block, and is the same for all settings.
            ids = [*self._prompt_ids, first, *range(count)]
            return cache_scores(
                scored,
                self.places,
                lambda index: self.rows.layers[index].part(row, here),
                ids,
                count,
                self._seed,
            )
        noted = self.notes.scores(label, self.rows.rows[row].index, slice(first, first + count))
        if not scored.reads_keys:
            return noted
        return scored.with_keys(noted, [self.rows.layers[index].part(row, here)[0] for index in self.places])

    def _setting(self, row: int) -> Setting:
        return self.settings[self.rows.rows[row].index]

    def _side(self, setting: Setting, layer: int, side: int) -> Coded | None:
        """What one side of a layer is stored as; None: in 16 bits."""
        coded = (setting.keys, setting.values)[side] if layer in self.places else None
        return None if coded is None else coded.at(layer, len(self.rows.layers))

    def _window(self, setting: Setting, side: int) -> Window:
        return window(self.rule, setting, side, self._prompt)

    def _coder(self, quantizer: Quantizer, index: int, side: int, x: Tensor) -> Coder:
        key = (quantizer, index, side)
        if key not in self._coders:
            seed = coder_seed(self._seed, index, side)
            known = self._rotary() if quantizer.positional and side == 0 and self._rotary else {}
            place = Place(index, SIDES[side], known.get(index))
            self._coders[key] = quantizer.coder(x.shape[-1], seed, x.device).at(place)
        return self._coders[key]


def _changed(pair: tuple[Any, Any], place: int, value: Any) -> tuple[Any, Any]:
    return (value, pair[1]) if place == 0 else (pair[0], value)


def _named(layer: int, side: int) -> AbstractContextManager[None]:
    """Errors about values that are not finite name the layer and the tensor."""
    return named(f"layer {layer}, {SIDES[side]}")
