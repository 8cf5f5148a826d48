"""One full-attention layer of the packed cache."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from semkv_bench.errors import SemkvError, UsageError
from semkv_bench.kernels.numerics import Noted, check_noted, gathered, named
from semkv_bench.kernels.packed import upload
from semkv_bench.models.attention_hook import Call
from semkv_bench.packed.attention import Handover, hand_over, last_query_mask, visible
from semkv_bench.packed.decode import PackedPieces, can_attend_packed
from semkv_bench.packed.ranking import Layouts, Ranking
from semkv_bench.packed.tensor import PackedTensor, empty_buffer
from semkv_bench.protocols.rule import CodingRule, Window, coder_seed, window
from semkv_bench.quantizers.keep import Keep
from semkv_bench.settings.allocation import SHARED
from semkv_bench.settings.setting import Coded, Setting

__all__ = ["CacheState", "PackedLayer"]

_NAMES = ("keys", "values")
_WORKSPACE_STEP = 64  # tokens

_States = Callable[[int, range], Tensor]
"""From a side's number and a stretch of tokens, counted from the row's start, to [rows, heads, n, head_dim]."""


@dataclass
class CacheState:
    """What all layers of a cache share.

    config, setting, seed, attention, prompt_tokens: see ``SemKVCache``; rule: which tokens are coded, and when;
    depth: layers of the model's cache.
    padding: of every row, while ``prefill`` runs. workspace: one layer's keys and values in full, reused.
    loan: what the last layer served was lent. seen_padding, seen_plain: what the first layer of a forward
    call read from the mask: padding of every row; whether it hides nothing else. noted: what kernels noted of the
    layers that a forward call has coded so far.
    """

    config: Any
    setting: Setting
    ranking: Ranking
    layouts: Layouts
    seed: int
    rule: CodingRule
    attention: str
    prompt_tokens: int | None
    depth: int
    layers: list["PackedLayer"] = field(default_factory=list)
    padding: list[int] | None = None
    workspace: dict[tuple, Tensor] = field(default_factory=dict)
    loan: Handover | None = None
    seen_padding: list[int] | None = None
    seen_plain: bool | None = None
    noted: Noted = field(default_factory=list)

    def new_call(self) -> None:
        """A forward call begins."""
        self.layouts.clear()
        self.noted.clear()
        self.seen_padding = self.seen_plain = None

    def room(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Workspace of ``shape`` [rows, heads, tokens, head_dim], its content undefined."""
        rows, heads, tokens, head_dim = shape
        needed = rows * heads * tokens * head_dim
        key = (name, like.device, like.dtype)
        if key not in self.workspace or self.workspace[key].numel() < needed:
            self.workspace.pop(key, None)
            spare = rows * heads * head_dim * (-tokens % _WORKSPACE_STEP)
            self.workspace[key] = empty_buffer((needed + spare,), like)
        return self.workspace[key][:needed].view(shape)


class PackedLayer(CacheLayerMixin):
    """Packed tokens, then open ones; tokens are coded once, before the first later token attends.

    index: number of the layer in the model; place: among the packed layers.
    length: tokens of every row, padding included. prompt: those before the tail, whose blocks count from there.
    due: tokens of a prompt that waits to be ranked over all layers.
    pieces_seen: what attention over packed pieces knows of them.
    """

    is_sliding = False
    supports_early_init = False

    def __init__(self, plan: CacheState, index: int):
        super().__init__()
        self.plan = plan
        self.index = index
        self.place = len(plan.layers)
        plan.layers.append(self)
        self._clear()

    def _clear(self) -> None:
        self.is_initialized = False
        self.sides: tuple[PackedTensor, ...] = ()
        self.pieces_seen: PackedPieces | None = None
        self.length = self.prompt = self.due = 0
        self.padding: list[int] = []

    @property
    def is_croppable(self) -> bool:
        """Cropping leaves no trace unless it undoes a token that made a block complete."""
        return not self.plan.rule.codes_tail

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take heads, head_dim, type, device and number of rows from the first states."""
        self.dtype, self.device = key_states.dtype, key_states.device
        sides = []
        for side, states in enumerate((key_states, value_states)):
            coded, coder = self._coded(side), None
            if coded is not None:
                coded.quantizer.check(states.shape[-1])
                seed = coder_seed(self.plan.seed, self.index, side)
                coder = coded.quantizer.coder(states.shape[-1], seed, self.device)
            sides.append(PackedTensor(coder, states))
        self.sides = tuple(sides)
        self.padding = [0] * len(key_states)
        self.is_initialized = True

    def _coded(self, side: int) -> Coded | None:
        """How keys (0) or values (1) of this layer are coded; None: not."""
        coded = (self.plan.setting.keys, self.plan.setting.values)[side]
        return None if coded is None else coded.at(self.index, self.plan.depth)

    def _window(self, side: int) -> Window:
        return window(self.plan.rule, self.plan.setting, side, self.prompt)

    @property
    def coded(self) -> int:
        """Tokens of every row that are packed (or padding), or put aside for good, on either side."""
        return max((side.settled for side in self.sides), default=0)

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Add states [rows, heads, new, head_dim]; returns all keys and values for the attention to follow."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        before, new = self.length, key_states.shape[2]
        self.length += new
        states = (key_states, value_states)
        with torch.no_grad():
            if not self.plan.rule.codes_prompt and (
                self.plan.padding is not None or self._in_prompt(before, new)
            ):
                return self._plain_prompt(states, before, new)
            if self.plan.padding is not None:
                self._set_padding(list(self.plan.padding))
                self._take_prompt(states, self.length)
                return states
            if self._in_prompt(before, new):
                return self._prompt(states, before, self._prompt_end(before, new))
            self._append(states)
            if self.plan.attention == "packed" and new == 1 and can_attend_packed(self.sides):
                return self._lend(key_states, value_states, self._attend_packed)
            return self._full()

    def _prompt_end(self, before: int, new: int) -> int:
        """Length of the prompt that a call of ``new`` tokens belongs to; 0: the prompt has been."""
        return self.plan.prompt_tokens or (new if before == 0 else 0)

    def _in_prompt(self, before: int, new: int) -> bool:
        end = self._prompt_end(before, new)
        if before >= end or self.prompt:
            return False
        if before + new > end and self.plan.padding is None:
            raise UsageError(f"prompt_tokens={end}, but a call went from token {before} to {before + new}")
        return True

    def _plain_prompt(self, states: tuple[Tensor, Tensor], before: int, new: int) -> tuple[Tensor, Tensor]:
        """Part of a prompt that is never coded: all its tokens but the last are put aside as they are."""
        self._append(states)
        end = self._prompt_end(before, new)
        aside = self.length if self.plan.padding is not None else (end - 1) * (self.length == end)
        for side in self.sides:
            if side.coder is not None and aside:
                side.put_aside(aside)
        self.prompt = aside
        return self._full() if before else states

    def pieces(self, turn_over: bool = False) -> tuple[list[range], list[range]]:
        """The stretches of keys and of values that must be coded before another token comes."""
        return self._pieces(0, turn_over), self._pieces(1, turn_over)

    def _pieces(self, side: int, turn_over: bool) -> list[range]:
        rule, settled = self._window(side), self.sides[side].settled
        span = rule.coded(self.length, turn_over, settled)
        start = max(settled, span.start)
        if self.sides[side].coder is None or not self.prompt_is_in or span.stop <= start:
            return []
        ends = itertools.accumulate(rule.pieces(start, span.stop), initial=start)
        return [range(*pair) for pair in itertools.pairwise(ends)]

    @property
    def prompt_is_in(self) -> bool:
        """Has the whole prompt come, and been coded if it is to be?"""
        return self.length >= (self.plan.prompt_tokens or 1) and not self.due

    def code(self, pieces: Sequence[range | None], prompt: int = 0) -> None:
        """Code a stretch of the open keys and of the values of every row; what lies before them stays as it is.

        prompt: its tokens, where the stretches are of a prompt. Padding is left out.
        Raises NonFiniteError, naming layer and tensor, on NaN or infinity.
        """
        self._code(self._open, pieces, prompt)
        for side, piece in zip(self.sides, pieces, strict=True):
            if side.coder is not None and piece is not None:
                side.put_aside(piece.start - side.settled)
                side.drop(len(piece))

    def code_prompt(self) -> None:
        """Code the prompt that waits in the open part."""
        tokens, self.due = self.due, 0
        self.prompt = tokens
        self.code(self._prompt_spans(tokens), prompt=tokens)

    def _prompt_spans(self, tokens: int) -> list[range]:
        return [self._window(side).coded(tokens) for side in range(2)]

    def _open(self, side: int, piece: range) -> Tensor:
        """Keys or values [rows, heads, n, head_dim] of open tokens, which ``piece`` counts from the row's start."""
        held = self.sides[side]
        return held.open[:, :, piece.start - held.settled : piece.stop - held.settled]

    def _append(self, states: tuple[Tensor, Tensor]) -> None:
        for side, new in zip(self.sides, states, strict=True):
            side.append(new)

    def _code(self, states: _States, pieces: Sequence[range | None], prompt: int) -> None:
        """Pack the stretches whose ``states`` are given by side and tokens."""
        for row in range(len(self.padding)):
            coded = [self._own(side, piece, row) for side, piece in zip(self.sides, pieces, strict=True)]
            levels = [
                self._levels(number, states, piece, own, row, prompt) if own else None
                for number, (piece, own) in enumerate(zip(pieces, coded, strict=True))
            ]
            pair = tuple(levels) if self._for_kernels() and coded[0] == coded[1] and coded[0] else None
            for number, (side, piece, own) in enumerate(zip(self.sides, pieces, coded, strict=True)):
                if not own:
                    continue
                x = states(number, piece)[row, :, own.start - piece.start :]
                with named(f"layer {self.index}, {_NAMES[number]}"):
                    side.code_row(row, x, levels[number], self.plan.layouts, pair)

    def _for_kernels(self) -> bool:
        """Is attention to read codes, and do its kernels know both coders?"""
        return self.plan.attention == "packed" and all(
            side.coder is not None and side.coder.known_to_kernels for side in self.sides
        )

    def _own(self, side: PackedTensor, piece: range | None, row: int) -> range | None:
        """The tokens of ``piece`` that a row codes on one side: not its padding."""
        if side.coder is None or not piece:
            return None
        return piece[min(max(piece.start, self.padding[row]), piece.stop) - piece.start :]

    def _levels(
        self, number: int, states: _States, piece: range, own: range, row: int, prompt: int
    ) -> Tensor:
        """Levels of the tokens ``own`` of a row, asked for once where rows or layers share them."""
        plan = self.plan
        allocation = self._coded(number).allocation

        def levels() -> Tensor:
            def seen(place: int) -> tuple[Tensor, Tensor]:
                of = states if place == self.place else plan.layers[place]._open
                return tuple(of(side, piece)[row, :, own.start - piece.start :] for side in range(2))

            first = own.start - self.padding[row]
            known = prompt and prompt - self.padding[row]
            return plan.ranking.levels(
                allocation, first, len(own), row, self.place, seen, known, self.padding[row]
            )

        key = (allocation, piece, len(own))
        if allocation.metric is not None:
            key += (row, None if allocation.scope == SHARED else self.place)
        return plan.layouts.levels(key, levels, self.device)

    def _take_prompt(self, states: tuple[Tensor, Tensor], tokens: int) -> None:
        """Take in a whole prompt; its first ``tokens`` tokens are coded now, or as soon as they can be ranked."""
        if self.plan.ranking.spans_layers:
            self._append(states)
            self.due = tokens
            return
        self.prompt = tokens
        spans = self._prompt_spans(tokens)
        # The open buffer never grows to the prompt's length.
        self._code(lambda side, piece: states[side][:, :, piece.start : piece.stop], spans, prompt=tokens)
        for side, new, span in zip(self.sides, states, spans, strict=True):
            if side.coder is None:
                side.append(new)
                continue
            side.append(new[:, :, : span.start])
            side.put_aside(span.start)
            side.append(new[:, :, span.stop :])
            side.settled = span.stop

    def _set_padding(self, padding: list[int]) -> None:
        """Note how many tokens of every row are padding; windows count tokens, so they cannot take any."""
        self.padding = padding
        kept = [coded for coded in (self.plan.setting.keys, self.plan.setting.values) if coded is not None]
        if any(padding) and any(coded.quantizer.keep != Keep() for coded in kept):
            raise UsageError(
                f"{self.plan.setting.name} keeps windows of tokens in 16 bits, which SemKVCache has for prompts of "
                "one length alone: pass them without padding, or one at a time"
            )

    def _prompt(self, states: tuple[Tensor, Tensor], before: int, end: int) -> tuple[Tensor, Tensor]:
        """Part of a prompt of ``end`` tokens: it attends at full precision, its last token excepted."""
        whole = before == 0 and end > 1 and self.length == end
        if not whole:
            self._append(states)
        if self.length < end or end == 1:
            return self._full() if before else states
        keys, values = states if whole else self._full()
        return self._lend(keys, values, partial(self._attend_prompt, whole))

    def _attend_prompt(self, whole: bool, call: Call) -> tuple[Tensor, Any]:
        """Attention of the prompt's last call; ``whole``: its states are not in the open buffer yet."""
        output, weights = call.attend(call.query, call.key, call.value, call.mask)
        self._set_padding(self._padding(call.mask))
        with torch.no_grad(), gathered(self.plan.noted):
            if whole:
                self._take_prompt((call.key, call.value), self.length - 1)
            else:
                self.due = self.length - 1
                if not self.plan.ranking.spans_layers:
                    self.code_prompt()
        if self.place == len(self.plan.layers) - 1:
            check_noted(self.plan.noted)  # once for all layers: each read waits for all work before it
        if self.due:
            return output, weights
        last = replace(call, query=call.query[:, :, -1:], mask=last_query_mask(call.mask))
        if self.plan.attention == "packed" and can_attend_packed(self.sides):
            seen, _ = self._attend_packed(last)
        else:
            seen, _ = last.attend(last.query, *self._full(), last.mask)
        return torch.cat([output[:, :-1], seen], dim=1), weights

    def _attend_packed(self, call: Call) -> tuple[Tensor, Any]:
        """Attention of one new token a row straight over packed tokens, where the mask lets it."""
        plan = self.plan
        if plan.seen_plain is None:
            plan.seen_plain = self._sees_all(call.mask)
        if plan.seen_plain and call.is_plain:
            if not self.pieces_seen or not self.pieces_seen.are_of(self.sides):
                self.pieces_seen = PackedPieces(self.sides)
            return self.pieces_seen.attend(call, self.sides), None
        return call.attend(call.query, *self._full(), call.mask)

    def _padding(self, mask: Any) -> list[int]:
        """Tokens before the first one that the newest query sees, of every row."""
        if self.plan.seen_padding is None:
            seen = visible(mask, self.length)
            rows = len(self.padding)
            first = [0] if seen is None else seen.int().argmax(-1).tolist()
            self.plan.seen_padding = first * rows if len(first) == 1 else first
        return list(self.plan.seen_padding)

    def _sees_all(self, mask: Any) -> bool:
        """Does the mask hide padding and nothing else?"""
        seen = visible(mask, self.length)
        if seen is None:
            return not any(self.padding)
        places = torch.arange(self.length, device=seen.device)
        padding = upload(torch.tensor(self.padding), seen.device)
        return bool((seen == (places >= padding[:, None])).all())

    def _full(self) -> tuple[Tensor, Tensor]:
        """Keys and values in full, valid until the next layer asks for its own."""
        filled = []
        for name, side in zip(_NAMES, self.sides, strict=True):
            rows, heads, _, head_dim = side.buffer.shape
            out = self.plan.room(name, (rows, heads, self.length, head_dim), side.buffer)
            filled.append(side.write(out, self.padding))
        return filled[0], filled[1]

    def _lend(self, keys: Tensor, values: Tensor, reader) -> tuple[Tensor, Tensor]:
        lent, self.plan.loan = hand_over(self.plan.config(), keys, values, reader)
        return lent, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys seen by the next ``query_length`` queries, and the position of the first of them."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens stored in every row."""
        return self.length

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest ``-tokens_to_remove`` tokens; a positive number says how many to keep.

        Coded tokens that stay keep their codes.
        """
        removed = max(0, self.length - tokens_to_remove) if tokens_to_remove > 0 else -tokens_to_remove
        kept = max(0, self.length - removed)
        if not self.is_initialized or kept == self.length:
            return
        for side in self.sides:
            side.opened = max(0, kept - side.settled)
            if kept < side.settled:
                before = [max(padding, side.aside.shape[2]) for padding in self.padding]
                side.crop_coded([max(0, kept - start) for start in before], self.plan.layouts)
                side.crop_aside(kept)
                side.settled = kept
        self.padding = [min(padding, kept) for padding in self.padding]
        self.length, self.prompt, self.due = kept, min(self.prompt, kept), min(self.due, kept)

    def reset(self) -> None:
        """Forget everything."""
        self._clear()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make the rows ``beam_idx`` the new rows."""
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times; copies share their packed tokens."""
        self._select([row for row in range(len(self.padding)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices`` (numbers, or a mask)."""
        chosen = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
        self._select(chosen.tolist())

    def offload(self) -> None:
        """Not for packed layers: raises SemkvError."""
        raise SemkvError("a packed cache cannot be offloaded; use SemKVCache without offloading")

    prefetch = offload

    def _select(self, rows: list[int]) -> None:
        if not self.is_initialized:
            return
        for side in self.sides:
            side.select(rows)
        if self.place == 0:
            self.plan.ranking.select(rows)
        self.padding = [self.padding[row] for row in rows]
