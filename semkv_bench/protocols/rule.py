"""Which tokens of a cache become coded, and when: the rule that a sweep's rows and the packed cache share.

A row is a line of tokens in two parts. The *prompt* is all prompt tokens but the last: it is coded whole after
a full-precision prefill. The *tail* is everything after it: the prompt's last token, which is fed (again) with
the first generated one, then the generated tokens and, in a conversation, later questions and answers. The tail
grows an *open* stretch of 16-bit tokens at its end. A stretch of ``block`` open tokens is complete; it is ranked
and coded once, from its 16-bit values, **before the first later token attends**, and never again. So twelve
single steps at block 4 leave eight tokens coded and four as they were: the third block is complete, but nothing
has come after it yet. Between two turns of a conversation all that is open is coded, an incomplete block too.

Tokens that one forward call brings attend to each other in 16 bits, whatever blocks they complete.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from semkv_bench.errors import UsageError
from semkv_bench.grid.cost import SIDES, Tokens, joined
from semkv_bench.importance import shared
from semkv_bench.settings.allocation import SHARED, Allocation
from semkv_bench.settings.setting import Setting

__all__ = ["PARTS", "PREFILL", "Blocks", "coder_seed", "ranking"]

PARTS = ("prompt", "generated", "both")


@dataclass(frozen=True)
class Blocks:
    """The rule, for one choice of ``parts`` (``prompt``, ``generated`` for the tail, or ``both``) and ``block``.

    >>> rule = Blocks("both", block=4)
    >>> rule.due(11), rule.due(12), rule.fits(11), rule.fits(12)
    (8, 12, 1, 4)
    """

    parts: str = "prompt"
    block: int = 32

    def __post_init__(self) -> None:
        if self.parts not in PARTS:
            raise UsageError(f"parts={self.parts} is not known; choose from {', '.join(PARTS)}")
        if isinstance(self.block, bool) or not isinstance(self.block, int) or self.block < 1:
            raise UsageError(f"block={self.block} must be a whole number of at least 1")

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
        whole = [size for tail in tails[:-1] for size in self.pieces(tail)]
        last = tails[-1] if tails else 0
        due = self.due(max(0, last - 1))
        pieces = [*whole, *self.pieces(due)] if self.codes_tail else []
        left = sum(tails) - sum(pieces)
        opened, kept = (left, 0) if self.codes_tail else (0, left)
        parts = [setting.stored(size) for size in ([prompt] if self.codes_prompt else []) + pieces]
        rest = Tokens(kept=kept + (0 if self.codes_prompt else prompt), open=opened)
        sides = [joined([*(pair[side] for pair in parts), rest]) for side in range(2)]
        return tuple(
            tokens if setting.codes(side) else Tokens(kept=tokens.total)
            for side, tokens in zip(SIDES, sides, strict=True)
        )

    def is_read(self, turn: int, answer: int) -> bool:
        """Must something coded have been read in ``turn``, whose answer fed ``answer`` tokens back to the model?"""
        # The tail begins with the prompt's last token, and a turn's last token reads what came before it.
        return self.codes_prompt or turn > 0 or self.due(answer) > 0


PREFILL = Blocks()
"""The prompt alone is coded."""


def coder_seed(seed: int, layer: int, side: int) -> int:
    """Seed of the coder of one layer's keys (side 0) or values (side 1)."""
    return ((seed * 1_000 + layer) * 2 + side) % 2**63


def ranking(allocation: Allocation, place: int, scores: Callable[[str], Tensor]) -> Tensor | None:
    """What ``allocation`` ranks a block's tokens by in quantized layer number ``place``: importance [tokens].

    scores: gives a metric's scores [quantized layers, tokens] or [1, tokens] by its label.
    """
    if allocation.metric is None:
        return None
    found = scores(allocation.metric)
    if allocation.scope == SHARED:
        return shared(found)
    return found[place if len(found) > 1 else 0]
