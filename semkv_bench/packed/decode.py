"""One new token's attention straight over packed pieces, no copy of the cache in full."""

from collections.abc import Sequence

import torch
from torch import Tensor

from semkv_bench import kernels
from semkv_bench.kernels import AlignedLayout
from semkv_bench.models.attention_hook import Call
from semkv_bench.packed.tensor import PackedTensor
from semkv_bench.quantizers.packing import Packed

__all__ = ["PackedPieces", "can_attend_packed"]


def can_attend_packed(sides: Sequence[PackedTensor]) -> bool:
    """Do kernels know both coders, and do keys and values hold the same tokens packed, in one order, some at all?"""
    keys, values = sides
    if keys.coder is None or values.coder is None or keys.buffer.shape != values.buffer.shape:
        return False
    if not any(keys.rows) or keys.opened != values.opened or keys.aside.shape != values.aside.shape:
        return False
    orders = [[[_order(packed) for packed in row] for row in side.rows] for side in sides]
    return orders[0] == orders[1] and all(order is not None for row in orders[0] for order in row)


def _order(packed: Packed) -> list[tuple[int, int]] | None:
    """How tokens are ordered: key and number of every segment; None if not for attention."""
    layout = packed.layouts[0]
    if not isinstance(layout, AlignedLayout):
        return None
    return [(segment.key, segment.tokens) for segment in layout.segments]


class PackedPieces:
    """The packed pieces of all rows of a layer as attention wants them, for as long as they are the same."""

    def __init__(self, sides: Sequence[PackedTensor]):
        self.rows = [list(side.rows) for side in sides]
        pieces = [
            [
                tuple(side.coder.packed_vectors(packed) for side, packed in zip(sides, pair, strict=True))
                for pair in zip(*row, strict=True)
            ]
            for row in zip(*self.rows, strict=True)
        ]
        self.work = kernels.attention_work(pieces, sides[0].buffer.device)

    def __deepcopy__(self, memo: dict) -> None:
        """A copy of a cache has tensors of its own, so it finds its own."""
        return None

    def are_of(self, sides: Sequence[PackedTensor]) -> bool:
        """Are these still the pieces? A row's list of pieces is never changed in place."""
        return all(
            len(before) == len(side.rows) and all(map(_same, before, side.rows))
            for before, side in zip(self.rows, sides, strict=True)
        )

    def attend(self, call: Call, sides: Sequence[PackedTensor]) -> Tensor:
        """Output [rows, 1, query_heads, head_dim] of one query a row that sees all tokens but padding."""
        keys, values = sides
        query = call.query[:, :, 0]  # [rows, query_heads, head_dim]
        turned = keys.coder.to_coded(query) if keys.coder.turns else query
        plain = [(keys.aside, values.aside), (keys.open, values.open)]
        (coded, coded_sum), (rest, rest_sum) = kernels.packed_attention(
            query, turned, self.work, plain, call.scaling
        )
        outputs = torch.stack([values.coder.from_coded(coded), rest], dim=1)
        output, _ = kernels.merge_attention(outputs, torch.stack([coded_sum, rest_sum], dim=1))
        return output[:, None].to(call.query.dtype)


def _same(one: list, other: list) -> bool:
    return one is other
