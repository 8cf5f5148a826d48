"""Which tokens of a cache become coded, and when: the rule that a sweep's rows and the packed cache share.

A row is a line of tokens in two parts. The *prompt* is all prompt tokens but the last: it is coded whole after
a full-precision prefill. The *tail* is everything after it: the prompt's last token, which is fed (again) with
the first generated one, then the generated tokens and, in a conversation, later questions and answers. The tail
grows an *open* stretch of 16-bit tokens at its end. A stretch of ``block`` open tokens is complete; it is ranked
and coded once, from its 16-bit values, **before the first later token attends**, and never again. So twelve
single steps at block 4 leave eight tokens coded and four as they were: the third block is complete, but nothing
has come after it yet. Between two turns of a conversation all that is open is coded, an incomplete block too.

Tokens that one forward call brings attend to each other in 16 bits, whatever blocks they complete.

A quantizer whose ``keep`` has a recent window or blocks of its own brings its own rule: what is coded then follows
from the number of earlier tokens alone (``Keep.coded``), across the prompt's end, between turns too, and the
protocol's ``block`` only says by how many tokens a tail moves on whose tokens are ranked. ``Window`` is both rules.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from semkv_bench.checks import choice, whole
from semkv_bench.grid.cost import SIDES, Tokens, joined
from semkv_bench.importance import shared
from semkv_bench.quantizers.keep import Keep
from semkv_bench.settings.allocation import SHARED, Allocation
from semkv_bench.settings.setting import Setting

__all__ = ["PARTS", "PREFILL", "CodingRule", "Ranks", "Window", "coder_seed", "settled", "window"]

PARTS = ("prompt", "generated", "both")


@dataclass(frozen=True)
class CodingRule:
    """The rule, for one choice of ``parts`` (``prompt``, ``generated`` for the tail, or ``both``) and ``block``.

    >>> rule = CodingRule("both", block=4)
    >>> rule.due(11), rule.due(12), rule.fits(11), rule.fits(12)
    (8, 12, 1, 4)
    """

    parts: str = "prompt"
    block: int = 32

    def __post_init__(self) -> None:
        choice("parts", self.parts, PARTS)
        whole("block", self.block, 1)

    @property
    def codes_prompt(self) -> bool:
        """Is the prompt coded?"""
        return self.parts != "generated"

    @property
    def codes_tail(self) -> bool:
        """Is the tail coded?"""
        return self.parts != "prompt"

    def due(self, opened: int) -> int:
        """Of ``opened`` open tokens, how many the next call must find coded: whole blocks."""
        return opened // self.block * self.block if self.codes_tail else 0

    def pieces(self, tokens: int) -> list[int]:
        """Sizes of the blocks that ``tokens`` tokens are ranked and coded in; the last may be incomplete."""
        whole, rest = divmod(tokens, self.block)
        return [self.block] * whole + [rest] * (rest > 0)

    def fits(self, opened: int) -> int | None:
        """Tokens that one call may bring after ``opened`` open ones and see what single steps would see.

        None: any number.
        """
        return self.block - opened % self.block if self.codes_tail else None

    def stored(self, setting: Setting, prompt: int, tails: Sequence[int] = ()) -> tuple[Tokens, Tokens]:
        """How a row holds keys and values of a prompt and of what follows it, ``tails`` tokens turn by turn.

        The last turn's answer has just ended, so its last block, complete or not, is still open.
        """
        return tuple(
            self._pruned(setting, prompt, tails)
            if setting.prune is not None
            else window(self, setting, number, prompt).stored(tails)
            if setting.codes(side)
            else Tokens(kept=prompt + sum(tails))
            for number, side in enumerate(SIDES)
        )

    def _pruned(self, setting: Setting, prompt: int, tails: Sequence[int]) -> Tokens:
        whole = [size for tail in tails[:-1] for size in self.pieces(tail)]
        due = self.due(max(0, (tails[-1] if tails else 0) - 1))
        pieces = [*whole, *self.pieces(due)] if self.codes_tail else []
        left = sum(tails) - sum(pieces)
        opened, kept = (left, 0) if self.codes_tail else (0, left)
        parts = [setting.stored(size)[0] for size in ([prompt] if self.codes_prompt else []) + pieces]
        return joined([*parts, Tokens(kept=kept + (0 if self.codes_prompt else prompt), open=opened)])

    def is_read(self, turn: int, answer: int) -> bool:
        """Must something coded have been read in ``turn``, whose answer fed ``answer`` tokens back to the model?"""
        # The tail begins with the prompt's last token, and a turn's last token reads what came before it.
        return self.codes_prompt or turn > 0 or self.due(answer) > 0


PREFILL = CodingRule()
"""The prompt alone is coded."""


@dataclass(frozen=True)
class Window:
    """What of one side of a row is coded: a protocol's rule and a quantizer's ``keep``.

    prompt: tokens before the tail. together: is a block more than its tokens one by one, because they are ranked, or
    because the coder looks at all of them? pivots: tokens of the prompt that stay in 16 bits besides, at most.

    >>> kivi = Window(PREFILL, Keep(block=128), prompt=300)
    >>> kivi.coded(300), kivi.coded(400), Window(CodingRule("both", 4), Keep(), prompt=10).coded(15)
    (range(0, 256), range(0, 256), range(0, 14))
    """

    rule: CodingRule
    keep: Keep
    prompt: int
    together: bool = False
    pivots: int = 0

    def coded(self, tokens: int, turn_over: bool = False, settled: int = 0) -> range:
        """The tokens that the next call must find coded in a row of ``tokens`` tokens; ``turn_over``: between turns.

        settled: where earlier coding ended, from which the protocol's blocks count: a turn's end may close a short one.
        """
        inside = min(tokens, self.prompt)
        start = self._start(tokens)
        if not self.keep.windowed:
            stop = inside if self.rule.codes_prompt else start
            base = max(self.prompt, start, settled)
            if self.rule.codes_tail and tokens > base:
                stop = max(stop, base + (tokens - base if turn_over else self.rule.due(tokens - base)))
            stop = max(stop, settled)
        else:
            stop = self.keep.coded(tokens if self.rule.codes_tail else inside).stop
            if self.together and self.keep.block == 1 and self.rule.codes_tail:
                base = max(start, self.keep.coded(inside).stop) if self.rule.codes_prompt else start
                stop = base + max(0, stop - base) // self.rule.block * self.rule.block
        return range(start, max(start, stop))

    def pieces(self, start: int, stop: int) -> list[int]:
        """Sizes of the stretches that the tokens from ``start`` to ``stop`` are ranked and coded in."""
        if not self.keep.windowed:
            return self.rule.pieces(stop - start)
        size = self.keep.block
        if size == 1:
            size = self.rule.block if self.together else stop - start
        whole, rest = divmod(stop - start, size)
        return [size] * whole + [rest] * (rest > 0)

    def prompt_pieces(self) -> tuple[int, ...]:
        """Sizes of the stretches of the prompt that are stored coded: one, or none."""
        count = len(self.coded(self.prompt)) - self.pivots
        return (count,) if count > 0 else ()

    def fits(self, tokens: int, settled: int = 0) -> int | None:
        """Tokens that one call may bring after ``tokens`` and see what single steps would see; None: any number."""
        if not self.rule.codes_tail:
            return None
        now, count = self.coded(tokens, settled=settled), 1
        while self.coded(tokens + count, settled=settled) == now:
            count += 1
        return count

    def stored(self, tails: Sequence[int]) -> Tokens:
        """How the side is held after the prompt and ``tails`` tokens turn by turn; see ``CodingRule.stored``."""
        length, span = self.prompt, self.coded(self.prompt)
        pieces, settled = [*self.prompt_pieces()], span.stop
        for turn, tail in enumerate(tails):
            length += tail
            over = turn + 1 < len(tails)
            span = self.coded(length if over else max(self.prompt, length - 1), over, settled)
            start = max(settled, span.start)
            if self.rule.codes_tail and span.stop > start:
                pieces += self.pieces(start, span.stop)
                settled = span.stop
        return self.tokens(length, pieces, settled)

    def tokens(self, length: int, pieces: Sequence[int], settled: int) -> Tokens:
        """What of ``length`` tokens is coded in ``pieces``, waits for its block or window, and stays in 16 bits."""
        left = length - sum(pieces)
        waiting = max(0, length - settled - self.keep.recent) if self.rule.codes_tail else 0
        return Tokens.of(pieces, kept=left - min(left, waiting), open=min(left, waiting))

    def _start(self, tokens: int) -> int:
        start = 0 if self.rule.codes_prompt else self.prompt
        past = max(0, start - self.keep.sinks)
        # Blocks keep their phase, which counts from the sinks, where the prompt before them is not coded.
        return min(tokens, self.keep.sinks + -(-past // self.keep.block) * self.keep.block)


def window(rule: CodingRule, setting: Setting, side: int, prompt: int) -> Window:
    """What of the keys (side 0) or values (1) of a row is coded; a side in 16 bits is counted with the other."""
    sides = (setting.keys, setting.values)
    coded = sides[side] or sides[1 - side]
    if coded is None:
        return Window(rule, Keep(), prompt)
    together = coded.allocation.metric is not None or coded.quantizer.granularity.tokens is None
    return Window(rule, coded.quantizer.keep, prompt, together, coded.quantizer.pivot_tokens)


def settled(rule: CodingRule, settings: Sequence[Setting], prompt: int) -> int:
    """The first token that any of ``settings`` may still code once a prompt of ``prompt`` tokens is coded."""
    if not rule.codes_tail:
        return prompt
    windows = (window(rule, setting, side, prompt) for setting in settings for side in range(2))
    return min(prompt, *(each.coded(prompt).stop for each in windows))


def coder_seed(seed: int, layer: int, side: int) -> int:
    """Seed of the coder of one layer's keys (side 0) or values (side 1)."""
    return ((seed * 1_000 + layer) * 2 + side) % 2**63


class Ranks:
    """Importance of some tokens, and the levels that allocations give them: each computed once.

    What is ranked for all layers together is the same in every layer, for keys and for values, and under every
    setting that ranks by the same metric. What a layer ranks by itself is known until another layer asks. scores:
    gives a metric's scores of the tokens by its label, [quantized layers, tokens] or [1, tokens].
    """

    def __init__(self, scores: Callable[[str], Tensor]):
        self.scores = scores
        self._shared: dict[tuple, Tensor] = {}
        self._own: dict[tuple, Tensor] = {}
        self._place: int | None = None

    def importance(self, allocation: Allocation, place: int) -> Tensor | None:
        """What ``allocation`` ranks the tokens by in quantized layer number ``place``, [tokens]; None: by nothing."""
        label, where = allocation.metric, _where(allocation, place)
        if label is None:
            return None
        return self._once(where, ("importance", label), lambda: self._ranked(label, where))

    def levels(self, allocation: Allocation, place: int, here: range) -> Tensor:
        """Levels int64 [tokens], or [1] for all, of the tokens ``here``, which are stored together."""

        def make() -> Tensor:
            importance = self.importance(allocation, place)
            return allocation.levels(
                len(here), None if importance is None else importance[here.start : here.stop]
            )

        return self._once(_where(allocation, place), ("levels", allocation, here), make)

    def stacked(
        self, allocations: Sequence[Allocation], place: int, here: range, device: torch.device
    ) -> Tensor:
        """Levels of several settings, int64 [settings, tokens or 1], on ``device``."""

        def make() -> Tensor:
            rows = [self.levels(allocation, place, here) for allocation in allocations]
            widest = max(map(len, rows))
            return torch.stack([row.expand(widest) for row in rows]).to(device)

        own = any(_where(allocation, place) is not None for allocation in allocations)
        return self._once(place if own else None, ("stacked", tuple(allocations), here, device), make)

    def _once(self, where: int | None, key: tuple, make: Callable[[], Tensor]) -> Tensor:
        if where is not None and where != self._place:
            self._own, self._place = {}, where
        table = self._shared if where is None else self._own
        if key not in table:
            table[key] = make()
        return table[key]

    def _ranked(self, label: str, place: int | None) -> Tensor:
        found = self.scores(label)
        if place is None:
            return shared(found)
        own = found[place if len(found) > 1 else 0]
        return shared(own) if own.dim() > 1 else own


def _where(allocation: Allocation, place: int) -> int | None:
    """The quantized layer that an allocation's levels hang on; None: they are the same in all layers."""
    return place if allocation.metric is not None and allocation.scope != SHARED else None
