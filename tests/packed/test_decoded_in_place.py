"""A packed piece is decoded where it is wanted: no copy follows, where the kernel writes to the cache's workspace."""

import pytest
import torch

from semkv_bench.kernels import dispatch, packing_reference
from semkv_bench.packed.ranking import Layouts
from semkv_bench.packed.tensor import PackedTensor
from semkv_bench.quantizers import Affine, TurboQuant

ROWS, TOKENS = 3, 64


def held(quantizer):
    """Two stretches in every row, and five open tokens."""
    x, levels = torch.randn(2, TOKENS, 16), torch.tensor([5, 6] * (TOKENS // 2))
    side = PackedTensor(quantizer.coder(16), x[None].expand(ROWS, -1, -1, -1))
    layouts = Layouts(64)
    for row in range(ROWS):
        for _ in range(2):
            # Both are whole blocks, so that they are joined into one piece.
            side.code_row(row, x, levels, layouts, None)
    side.append(torch.randn(ROWS, 2, 5, 16))
    return side


@pytest.mark.parametrize("quantizer", [Affine(), TurboQuant()], ids=lambda q: q.name)
def test_it_is_written_once(quantizer, monkeypatch):
    side, given = held(quantizer), []
    plain = packing_reference.unpack_dequantize

    def kernel(packed, dtype=torch.float32, out=None):
        given.append(out)
        values = plain(packed, dtype if out is None else out.dtype)
        return values if out is None else out.copy_(values)

    monkeypatch.setattr(dispatch.packing_reference, "unpack_dequantize", kernel)
    found = torch.empty(ROWS, 2, 2 * TOKENS + 5, 16)
    side.write(found, [0] * ROWS)
    outs = list(given)
    pieces = [(row, packed) for row, own in enumerate(side.rows) for packed in own]
    assert len(outs) == len(pieces) == ROWS
    for (row, packed), out in zip(pieces, outs, strict=True):
        assert torch.equal(found[row, :, : packed.tokens], side.coder.unpack(packed, torch.float32))
        # Rotated values must be turned back before they are written.
        assert (out is None) == side.coder.turns
        assert out is None or out.data_ptr() == found[row].data_ptr()
    assert torch.equal(found[:, :, -5:], side.open)


@pytest.mark.parametrize("heads_apart", [True, False])
def test_out_is_filled_and_nothing_beside_it(heads_apart):
    (packed,) = held(Affine()).rows[0]
    vectors = Affine().coder(16).packed_vectors(packed)
    whole = torch.full((2, 2 * TOKENS + 3, 16), 7.0)
    out = whole[:, 1 : 2 * TOKENS + 1] if heads_apart else whole[:, : 2 * TOKENS].clone()
    assert dispatch.unpack_dequantize(vectors, out=out) is out
    assert torch.equal(out, dispatch.unpack_dequantize(vectors))
    assert not heads_apart or bool((whole[:, [0, -2, -1]] == 7).all())
