"""What a cache costs: one function from what was stored, and the price of coding it, to bits and bytes.

Pure arithmetic, no tensors. A *side* is the keys or the values of one layer. What is stored is counted in
tokens by state, from the engine's own bookkeeping or from a plan; what a method asks for its codes is a ``Price``.
Whatever is not coded takes 16 bits a value.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

__all__ = [
    "FULL_BITS",
    "SIDES",
    "Cost",
    "LayerShape",
    "Price",
    "SideShape",
    "Stored",
    "StoredSide",
    "Tokens",
    "cost",
    "joined",
]

SIDES = ("keys", "values")
FULL_BITS = 16


@dataclass(frozen=True)
class SideShape:
    """What one side of one layer holds for each token: ``heads`` vectors of ``head_dim`` values."""

    heads: int
    head_dim: int

    @property
    def values(self) -> int:
        """Values of one token."""
        return self.heads * self.head_dim


@dataclass(frozen=True)
class LayerShape:
    """The cache of one layer.

    window: tokens that it holds at most, None for all of them; coded: are settings applied to it?
    """

    keys: SideShape
    values: SideShape
    window: int | None = None
    coded: bool = True

    def held(self, tokens: float) -> float:
        """Of ``tokens`` tokens, how many the layer holds."""
        return tokens if self.window is None else min(tokens, self.window)


class Price(Protocol):
    """What it takes to store one side of one layer coded."""

    def coded_bits(self, tokens: int, shape: SideShape) -> float:
        """Bits of ``tokens`` tokens that were coded together, all heads: codes and all metadata of that stretch."""

    def sequence_bits(self, shape: SideShape) -> float:
        """Bits that are kept once a sequence, however long it is."""


@dataclass(frozen=True)
class Tokens:
    """The tokens of one sequence in one side of one layer, by how they are stored.

    coded: ``(size, times)`` of the stretches that were coded together: a prompt of 611 tokens and three blocks are
    ``((611, 1), (32, 3))``. kept: in 16 bits for good, such as sinks, a recent window or a part that is never coded.
    open: in 16 bits until their block is complete. deleted: the full cache would hold them. Counts are means over
    heads where heads differ.
    """

    coded: tuple[tuple[int, int], ...] = ()
    kept: float = 0
    open: float = 0
    deleted: float = 0

    @classmethod
    def of(cls, pieces: Iterable[int], kept: float = 0, open: float = 0, deleted: float = 0) -> "Tokens":
        """From the sizes of the stretches that were coded together, in any order."""
        sizes = [(size, len(list(alike))) for size, alike in groupby(sorted(pieces))]
        return cls(tuple((size, times) for size, times in sizes if size), kept, open, deleted)

    @property
    def coded_tokens(self) -> int:
        """Tokens in all coded stretches."""
        return sum(size * times for size, times in self.coded)

    @property
    def total(self) -> float:
        """All tokens, those that are deleted as well."""
        return self.coded_tokens + self.kept + self.open + self.deleted


def joined(parts: Sequence[Tokens]) -> Tokens:
    """Tokens of several stretches of one sequence."""
    return Tokens.of(
        [size for part in parts for size, times in part.coded for _ in range(times)],
        kept=sum(part.kept for part in parts),
        open=sum(part.open for part in parts),
        deleted=sum(part.deleted for part in parts),
    )


@dataclass(frozen=True)
class StoredSide:
    """One side of the ``layers`` (their indices) that have the same shape and hold the same tokens."""

    side: str
    shape: SideShape
    layers: tuple[int, ...]
    tokens: Tokens


@dataclass(frozen=True)
class Stored:
    """All that the cache of one sequence holds. in_blocks: tokens of which steps read some blocks, by summaries."""

    sides: tuple[StoredSide, ...]
    in_blocks: int = 0

    @classmethod
    def of(cls, layers: Sequence[LayerShape | None], keys: Tokens, values: Tokens) -> "Stored":
        """Every coded layer holds ``keys`` and ``values``, every other one its newest tokens in 16 bits.

        A layer that is None has no cache of its own.
        """
        held: dict[tuple[str, SideShape, Tokens], list[int]] = {}
        for index, layer in enumerate(layers):
            if layer is None:
                continue
            for side, tokens in zip(SIDES, (keys, values), strict=True):
                here = tokens if layer.coded else Tokens(kept=layer.held(tokens.total))
                held.setdefault((side, getattr(layer, side), here), []).append(index)
        return cls(tuple(StoredSide(side, shape, tuple(at), t) for (side, shape, t), at in held.items()))

    @property
    def by_state(self) -> dict[str, float]:
        """Tokens by state, summed over sides and layers."""
        found = dict.fromkeys(("coded", "kept", "open", "deleted"), 0.0)
        for part in self.sides:
            tokens, times = part.tokens, len(part.layers)
            counts = (tokens.coded_tokens, tokens.kept, tokens.open, tokens.deleted)
            for state, count in zip(found, counts, strict=True):
                found[state] += count * times
        return found


@dataclass(frozen=True)
class Cost:
    """Bits of a cache, and the values that it stands for: those of the full cache at the same length."""

    key_bits: float
    value_bits: float
    key_values: float
    value_values: float

    @property
    def cache_bits(self) -> float:
        """Bits per value over everything that the cache holds: sum of the bits over sum of the values."""
        return _ratio(self.key_bits + self.value_bits, self.key_values + self.value_values)

    @property
    def key_cache_bits(self) -> float:
        """The same of the keys."""
        return _ratio(self.key_bits, self.key_values)

    @property
    def value_cache_bits(self) -> float:
        """The same of the values."""
        return _ratio(self.value_bits, self.value_values)

    @property
    def nbytes(self) -> int:
        """Bytes of the cache."""
        return math.ceil((self.key_bits + self.value_bits) / 8)

    @property
    def full_bytes(self) -> int:
        """Bytes of the full cache at the same length."""
        return math.ceil((self.key_values + self.value_values) * FULL_BITS / 8)

    @property
    def compression(self) -> float:
        """How many times smaller than the full cache."""
        return FULL_BITS / self.cache_bits if self.cache_bits else math.inf


def cost(price: Callable[[int, str], Price | None], stored: Stored) -> Cost:
    """What ``stored`` costs where ``price(layer, side)`` is asked for coded tokens; None: they take 16 bits too.

    >>> class Five:
    ...     def coded_bits(self, tokens, shape): return 5 * tokens * shape.values
    ...     def sequence_bits(self, shape): return 0
    >>> layers = [LayerShape(SideShape(8, 128), SideShape(8, 128))] * 2
    >>> tokens = Tokens.of([600], kept=200, deleted=200)
    >>> cost(lambda layer, side: Five(), Stored.of(layers, tokens, tokens)).cache_bits
    6.2
    """
    bits, values = dict.fromkeys(SIDES, 0.0), dict.fromkeys(SIDES, 0.0)
    for part in stored.sides:
        values[part.side] += part.shape.values * part.tokens.total * len(part.layers)
        for asked, alike in groupby(price(layer, part.side) for layer in part.layers):
            bits[part.side] += _bits(asked, part.shape, part.tokens) * len(list(alike))
    return Cost(*(bits[side] for side in SIDES), *(values[side] for side in SIDES))


def _bits(price: Price | None, shape: SideShape, tokens: Tokens) -> float:
    plain = tokens.kept + tokens.open
    if price is None:
        return FULL_BITS * shape.values * (plain + tokens.coded_tokens)
    coded = math.fsum(times * price.coded_bits(size, shape) for size, times in tokens.coded)
    once = price.sequence_bits(shape) if tokens.coded else 0
    return coded + once + FULL_BITS * shape.values * plain


def _ratio(bits: float, values: float) -> float:
    return bits / values if values else 0.0
