"""Which tokens a coder looks at together."""

from dataclasses import dataclass

__all__ = ["PER_TOKEN", "TOGETHER", "Granularity"]


@dataclass(frozen=True)
class Granularity:
    """What a token's codes may hang on, besides its own values and levels. Rows and heads' other rows never count.

    tokens: 1: nothing else. G: the other tokens of its group of G, counted from the first token that is coded.
    None: all tokens that are coded together. mixed: may tokens of one group have different level counts?

    Affine per token is ``Granularity(1)``. KIVI's keys, one range per channel over 32 tokens, are
    ``Granularity(32, mixed=False)``.
    """

    tokens: int | None = 1
    mixed: bool = True


PER_TOKEN = Granularity()
TOGETHER = Granularity(None)
