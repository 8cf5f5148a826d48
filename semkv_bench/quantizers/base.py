"""What a KV-cache quantizer is: its storage arithmetic, and a coder bound to one head size."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from semkv_bench.checks import is_whole
from semkv_bench.errors import NonFiniteError, SemkvError, UsageError
from semkv_bench.grid.cost import SideShape, Tokens
from semkv_bench.grid.levels import Storage, aligned_plan, code_bits, packing_plan
from semkv_bench.quantizers.granularity import PER_TOKEN, Granularity
from semkv_bench.quantizers.keep import Keep, Layers

if TYPE_CHECKING:  # what storage costs can be told without torch
    import torch
    from torch import Tensor

    from semkv_bench.kernels import PackedVectors
    from semkv_bench.quantizers.packing import LayoutOf, Packed
    from semkv_bench.quantizers.parts import Place

__all__ = [
    "AlignedPrice",
    "Coder",
    "Encoded",
    "NonFiniteError",
    "Quantizer",
    "Sides",
    "brief",
    "changed",
    "follows",
    "pair_label",
]


@dataclass(frozen=True)
class Encoded:
    """Codes and metadata of [heads, tokens, head_dim] values under one setting.

    codes    uint8 [heads, tokens, head_dim], each below its token's number of codes
    metadata float16 [heads, tokens, M]; 16 * M is the quantizer's ``metadata_bits``
    levels   int64 [tokens]
    outliers bool [heads, head_dim], channels coded with more levels, if the quantizer tells channels apart
    """

    codes: Tensor
    metadata: Tensor
    levels: Tensor
    outliers: Tensor | None = None


class Sides(ABC):
    """What codes the two sides of a cache: a quantizer both, a method each by one of its own."""

    @abstractmethod
    def of_side(self, side: str) -> Quantizer:
        """What codes ``keys`` or ``values``."""

    @abstractmethod
    def for_values(self) -> Quantizer:
        """What codes the values where this codes the keys."""


@dataclass(frozen=True)
class Quantizer(Sides):
    """One way to code the vectors of a KV cache; subclasses are frozen dataclasses built by Hydra.

    keep: tokens that stay in 16 bits. layers: layers that do, or that have levels of their own.
    """

    name: ClassVar[str]
    seeded: ClassVar[bool] = False  # does the result depend on the seed?
    granularity: ClassVar[Granularity] = PER_TOKEN

    keep: Keep = field(default=Keep(), kw_only=True)
    layers: Layers = field(default=Layers(), kw_only=True)

    def __post_init__(self) -> None:
        for name, kind in (("keep", Keep), ("layers", Layers)):
            given = getattr(self, name)
            if isinstance(given, Mapping):
                known = {part.name for part in fields(kind)}
                if wrong := sorted(set(given) - known):
                    raise UsageError(f"there is no {name}.{wrong[0]}; known are {', '.join(sorted(known))}")
                object.__setattr__(self, name, kind(**given))
        group = self.granularity.tokens
        if group is not None and self.keep.block % group:
            raise UsageError(
                f"{self.name} codes groups of {group} tokens: keep.block={self.keep.block} must be a multiple of it"
            )

    @abstractmethod
    def check(self, head_dim: int) -> None:
        """Raise UsageError, naming what is legal, if vectors of ``head_dim`` values cannot be coded."""

    def check_heads(self, heads: int, head_dim: int) -> None:
        """Raise UsageError if the vectors of ``heads`` heads cannot be coded together."""

    @property
    def fixed_levels(self) -> int | None:
        """The one level count of a format that has no grid, or of layers that are all given theirs; None: any."""
        return self.layers.others

    @property
    def calibrated(self) -> bool:
        """Is it fitted to a model, by ``semkv-bench calibrate``?"""
        return False

    @property
    def prompt_metric(self) -> str | None:
        """The importance metric whose scores of a prompt's tokens its coder must be told, by ``scored``; None: none."""
        return None

    @property
    def pivot_tokens(self) -> int:
        """The most tokens that ``prompt_metric`` makes it keep in 16 bits."""
        return 0

    @property
    def positional(self) -> bool:
        """Does it undo the rotary embedding, so that it hangs on where in the sequence a token is?"""
        return False

    def check_levels(self, levels: int) -> None:
        """Raise UsageError if there is no grid point of ``levels`` levels."""

    @abstractmethod
    def metadata_bits(self, head_dim: int) -> float:
        """Bits of metadata stored with each vector of ``head_dim`` values."""

    @abstractmethod
    def coder(self, head_dim: int, seed: int = 0, device: torch.device | str = "cpu") -> Coder:
        """The coder for one head size, its tables on ``device``."""

    def storage(self, levels: int, head_dim: int, heads: int = 1) -> Storage:
        """Cost of a coded value at ``levels``; UsageError as in ``check``.

        heads: of the layer, where they share metadata. What is stored once a stretch or a sequence is not in it.
        """
        self.check(head_dim)
        packed = packing_plan(levels).packed_bits
        return Storage(code_bits(levels), packed, packed + self.metadata_bits(head_dim) / head_dim)

    @property
    def aligned(self) -> AlignedPrice | None:
        """The same with the price of codes in the layout that attention reads; None where no kernel knows it."""
        return None

    def coded_bits(self, parts: Sequence[tuple[int, int]], shape: SideShape) -> float:
        """Bits of tokens that were coded together, all heads of one side of one layer: codes and all metadata.

        parts: (levels, tokens) of the stretch. What is kept once a stretch, or once a group of tokens, belongs here.
        """
        return math.fsum(
            tokens * shape.values * self.storage(levels, shape.head_dim, shape.heads).effective_bits
            for levels, tokens in parts
        )

    def sequence_bits(self, shape: SideShape) -> float:
        """Bits that one side of one layer keeps once a sequence."""
        return 0.0

    def stored(self, tokens: int) -> Tokens:
        """How a prompt of ``tokens`` tokens is held: in one stretch, but for what is left in 16 bits."""
        coded = max(0, len(self.keep.coded(tokens)) - self.pivot_tokens)
        return Tokens.of([coded], kept=tokens - coded)

    def of_side(self, side: str) -> Quantizer:
        """What codes ``keys`` or ``values``: itself, unless a method codes them differently."""
        return self

    def unpackable(self) -> str | None:
        """What of it a packed cache cannot store, in a few words; None: it can store all."""
        return None

    def stored_codes(self, levels: int) -> int:
        """The most codes that a stored value takes at ``levels`` levels."""
        return levels

    def for_values(self) -> Quantizer:
        """The value cache's quantizer when this one codes the keys: itself, unless it is for keys only."""
        return self

    def options(self) -> dict[str, Any]:
        """Fields that differ from their defaults, those of ``keep`` and ``layers`` by their own names."""
        return changed(self)

    @property
    def label(self) -> str:
        """Name and options: ``affine``, ``affine[g32,recent128]``."""
        return pair_label(self, self)


@dataclass(frozen=True)
class AlignedPrice:
    """What a quantizer's codes cost where they lie as attention reads them: in whole groups of a 16-bit lane."""

    quantizer: Quantizer

    def storage(self, levels: int, head_dim: int, heads: int = 1) -> Storage:
        """See ``Quantizer.storage``.

        Six levels have three codes in eight bits: 2.667 and not 2.6, with affine metadata at head_dim 128 2.917.
        """
        dense, packed = self.quantizer.storage(levels, head_dim, heads), aligned_plan(levels).packed_bits
        return Storage(dense.code_bits, packed, dense.effective_bits - dense.packed_bits + packed)


class Coder(ABC):
    """A quantizer bound to one head size, seed and device, for one side of one layer.

    simulated: does it only say what is read back, without ``encode`` and ``decode`` of its own?
    turns: are codes those of turned vectors (see ``to_coded``)? predicts: must it be told what is ``beside``?
    """

    simulated: ClassVar[bool] = False
    turns: ClassVar[bool] = False
    predicts: ClassVar[bool] = False

    def at(self, place: Place) -> Coder:
        """The coder for one side of one layer, where that matters."""
        return self

    def placed(self, start: int) -> Coder:
        """The coder for a stretch of tokens that begins at position ``start``, where that matters."""
        return self

    def scored(self, scores: Tensor) -> Coder:
        """The coder for a stretch of the prompt, with its quantizer's ``prompt_metric`` of the tokens, [tokens]."""
        raise SemkvError(f"{type(self).__name__} has no use for scores of tokens")

    def beside(self, below: Sequence[Tensor]) -> Coder:
        """The coder for a stretch of one row, with what its cache gives back of the same tokens already.

        below: [heads, tokens, head_dim] each: of keys, the keys of the coded layer below, of values, the keys of their
        own layer and the values of the coded layer below; keys before the rotary embedding. None in the lowest layer.
        """
        raise SemkvError(f"{type(self).__name__} predicts nothing from other layers")

    def prepare(self, prompt: Tensor) -> None:  # noqa: B027 - most coders need not know it
        """The 16-bit prompt [heads, tokens, head_dim] of what will be coded, before anything is."""

    def quantize_dequantize(self, x: Tensor, levels: Tensor, out: Tensor | None = None) -> Tensor:
        """What each setting's cache would give back for x.

        x      [rows, heads, tokens, head_dim], float16, bfloat16 or float32: one row for every setting, or a single
               one that all settings code; without the row axis, [heads, tokens, head_dim], a single one
        levels int64 [S, tokens] or [S, 1], one row per setting, each 2..256
        out    [S, heads, tokens, head_dim] of x's type, perhaps strided, last dimension contiguous

        Fills and returns ``out``. What a row becomes hangs on that row alone. Coders that code a single row for
        many settings in one pass say so by ``code_row``.
        Raises NonFiniteError on NaN or infinity.
        """
        if x.dim() == 3:
            x = x[None]
        if x.dim() != 4 or len(x) not in (1, len(levels)):
            raise ValueError(
                f"x must have one row, or one for each of {len(levels)} settings, not {tuple(x.shape)}"
            )
        if out is None:
            out = x.new_empty(len(levels), *x.shape[1:])
        if len(x) == 1:
            self.code_row(x[0], levels, out)
        else:
            for row, count, target in zip(x, levels, out, strict=True):
                self.code_row(row, count[None], target[None])
        return out

    def code_row(self, x: Tensor, levels: Tensor, out: Tensor) -> None:
        """Fill out [S, heads, tokens, head_dim] from one row x [heads, tokens, head_dim], as said there."""
        for count, target in zip(levels, out, strict=True):
            target.copy_(self.decode(self.encode(x, count.expand(x.shape[1])), x.dtype))

    @abstractmethod
    def encode(self, x: Tensor, levels: Tensor | int) -> Encoded:
        """Codes and metadata of one row x [heads, tokens, head_dim] at levels int64 [tokens], or one for all."""

    @abstractmethod
    def decode(self, encoded: Encoded, dtype: torch.dtype) -> Tensor:
        """Values [heads, tokens, head_dim]; equals ``quantize_dequantize`` of the same input and type."""

    def pack(self, x: Tensor, levels: Tensor, layout_of: LayoutOf) -> Packed:
        """What a cache stores of one row x [heads, tokens, head_dim] at levels int64 [tokens].

        Codes are packed and metadata stay as ``encode`` gives them; a coder whose tokens share metadata, or whose
        codes are not each below its token's levels, says otherwise here and in ``unpack``.
        """
        from semkv_bench.quantizers.packing import Packed, Stream

        encoded = self.encode(x, levels)
        layout = layout_of(levels, *x.shape[::2])
        return Packed(x.shape[1], (Stream.of(encoded.codes, layout),), (encoded.metadata,))

    def unpack(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        """Values [heads, tokens, head_dim] of what ``pack`` gave; equals ``quantize_dequantize`` of the same input."""
        from semkv_bench.kernels import unpack_dequantize
        from semkv_bench.kernels.numerics import finite_cast

        vectors = self.packed_vectors(packed)
        if vectors is not None:
            if not self.turns:
                return unpack_dequantize(vectors, dtype)
            return finite_cast(self.from_coded(unpack_dequantize(vectors)), dtype)
        (stream,), (metadata,) = packed.streams, packed.by_token
        return self.decode(Encoded(stream.codes(), metadata, stream.layout.levels()), dtype)

    def unpack_into(self, packed: Packed, out: Tensor) -> None:
        """Write the values of ``unpack`` to out [heads, tokens, head_dim], in the order of the text.

        A piece that was cropped may hold more tokens than ``packed`` says; the rest is not written.
        """
        from semkv_bench.kernels import unpack_dequantize

        layout, vectors = packed.layouts[0], None if self.turns else self.packed_vectors(packed)
        if vectors is not None and layout.in_order and packed.tokens == layout.tokens:
            unpack_dequantize(vectors, out=out)
        else:
            out.copy_(layout.unsort(self.unpack(packed, out.dtype))[:, : packed.tokens])

    def packed_vectors(self, packed: Packed) -> PackedVectors | None:
        """The same for the kernels that read codes and attend in one pass; None where they do not know the coder."""
        return self.kernel_vectors(packed) if self.known_to_kernels else None

    @property
    def known_to_kernels(self) -> bool:
        """Do the kernels read what this coder packs?"""
        kind = type(self)
        return kind.kernel_vectors is not Coder.kernel_vectors and follows(
            kind, "kernel_vectors", "encode", "decode"
        )

    def kernel_vectors(self, packed: Packed) -> PackedVectors | None:
        """See ``packed_vectors``, which asks no class whose ``encode`` or ``decode`` a subclass has changed."""
        return None

    def to_coded(self, x: Tensor) -> Tensor:
        """Vectors [..., head_dim] in the basis that codes are in, float32; for coders that kernels know."""
        return x.float()

    def from_coded(self, y: Tensor) -> Tensor:
        """Inverse of ``to_coded``."""
        return y


def follows(kind: type, name: str, *others: str) -> bool:
    """Is method ``name`` of a class defined where ``others`` are, or in a class derived from there?"""

    def place(of: str) -> int:
        return next(number for number, base in enumerate(kind.__mro__) if of in vars(base))

    return all(place(name) <= place(other) for other in others)


def token_levels(levels: Tensor | int, x: Tensor) -> Tensor:
    """Levels as int64 [tokens] on x's device."""
    if isinstance(levels, int):
        return x.new_full((x.shape[1],), levels, dtype=int)
    return levels.to(x.device)


_WINDOWS = (Keep, Layers)


def changed(part: Any) -> dict[str, Any]:
    """Fields of a dataclass that differ from their defaults; those of windows stand under their own names."""
    found: dict[str, Any] = {}
    for entry in sorted(fields(part), key=lambda entry: isinstance(getattr(part, entry.name), _WINDOWS)):
        value = getattr(part, entry.name)
        default = entry.default if entry.default_factory is MISSING else entry.default_factory()
        if value == default:
            continue
        if isinstance(value, _WINDOWS):
            found |= changed(value)
        else:
            found[entry.name] = value
    return found


def pair_label(keys: Quantizer, values: Quantizer) -> str:
    """Name and options of a pair of quantizers; ``k.`` and ``v.`` mark options that one side has.

    ``affine[g32]``, ``affine[k.recent128]``, ``affine[g32]+turboquant``.
    """
    if keys.name != values.name:
        return f"{keys.label}+{values.label}"
    mine, theirs = (brief(side) for side in (keys, values))
    both = [option for option in mine if option in theirs]
    only = [f"k.{option}" for option in mine if option not in both]
    only += [f"v.{option}" for option in theirs if option not in both]
    return keys.name + (f"[{','.join([*both, *only])}]" if both or only else "")


def brief(quantizer: Quantizer) -> list[str]:
    """The options of a quantizer as a label spells them: ``g32``, ``recent128``, ``rotation=hadamard``."""
    short = (
        {part.name: part.metadata.get("short") for part in fields(quantizer)}
        if is_dataclass(quantizer)
        else {}
    )
    options = quantizer.options()
    if (called := options.pop("called", None)) is not None:
        options = {name: value for name, value in options.items() if name not in ("levels", "others")}
    spelled = [_spelled(short.get(name) or name, value) for name, value in options.items()]
    return spelled + ([] if called is None else [called])


def _spelled(name: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{name}={'+'.join(f'{key}:{count}' for key, count in value.items())}"
    whole = is_whole(value) and not name[-1].isdigit() and value >= 0
    if whole:
        return f"{name}{value}"
    return f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
