"""A step writes the rows of a batch by one copy a layer and side, wherever they end; counted."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig

from semkv_bench.engine.coding import RowCoder
from semkv_bench.engine.rows import RowCache
from semkv_bench.engine.stretches import stretches
from semkv_bench.protocols.rule import CodingRule
from semkv_bench.quantizers import Affine
from semkv_bench.settings.sets import uniform_settings
from semkv_bench.settings.setting import FULL

LAYERS, ROWS, BLOCK = 3, 12, 4
ROUNDED = uniform_settings(Affine(), Affine(), [6])[0]


class Writes(TorchDispatchMode):
    """Counts the operations that write into a buffer."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.copy_.default, torch.ops.aten.index_put_.default):
            self.counts[func.__name__.split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def states(tokens):
    return torch.randn(2, ROWS, 2, tokens, 8, generator=torch.Generator().manual_seed(tokens))


def filled(lengths):
    rows = RowCache(LlamaConfig(num_hidden_layers=LAYERS))
    rows.reserve(ROWS, 30)
    for layer in range(LAYERS):
        rows.update(*states(max(lengths)), layer)
    rows.rewind(lengths)
    return rows


@pytest.mark.parametrize("lengths", [[9] * ROWS, [9, 7, 8] * (ROWS // 3)], ids=["even", "uneven"])
def test_a_step_of_many_rows_writes_twice_a_layer(lengths):
    rows, new = filled(lengths), states(1)
    with Writes() as writes:
        for layer in range(LAYERS):
            rows.update(*new, layer)
    assert writes.counts.total() == 2 * LAYERS, writes.counts
    for number, end in enumerate(lengths):
        for side, stored in enumerate(rows.layers[0].part(number, slice(end, end + 1))):
            assert torch.equal(stored, new[side, number])
    # One upload says for all layers where that is.
    starts = tuple(enumerate(lengths))
    assert stretches(starts, 1, torch.device("cpu")) is stretches(starts, 1, torch.device("cpu"))


@pytest.mark.parametrize("lengths", [[10] * ROWS, [8, 9, 10] * (ROWS // 3)], ids=["even", "uneven"])
def test_a_block_of_many_rows_is_written_once_a_layer_and_side(lengths):
    rows = filled([3] * ROWS)
    coding = RowCoder(
        rows, [FULL, *[ROUNDED] * (ROWS - 1)], CodingRule("generated", BLOCK), [0, 1, 2], [1], 0
    )
    for row in rows.rows:
        row.settled = (row.index % 3 if len(set(lengths)) > 1 else 2,) * 2
    for layer in range(LAYERS):
        rows.update(*states(7), layer)
    rows.rewind(lengths)
    before = [side.clone() for side in rows.layers[1].stored()]
    settled = [row.settled[0] for row in rows.rows]
    due = [coding._due_pieces(row, 0, length, False) for row, length in enumerate(lengths)]
    put = Counter()
    real = stretches(((0, 0),), 1, torch.device("cpu")).__class__.put

    def counted(self, buffer, values):
        put[len(self.starts)] += 1
        real(self, buffer, values)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("semkv_bench.engine.stretches.Stretches.put", counted)
        coding.close()
    rounds = max(map(len, due))
    assert put.total() == 2 * LAYERS * rounds and max(put) == ROWS - 1, (put, due)
    coder = Affine().coder(8)
    for row in range(1, ROWS):
        for side, stored in enumerate(rows.layers[1].part(row, slice(0, lengths[row]))):
            for piece in due[row]:
                here = slice(piece.start, piece.stop)
                once = coder.quantize_dequantize(before[side][row : row + 1, :, here], torch.tensor([[6]]))[0]
                assert torch.equal(stored[:, here], once)
            left = slice(0, settled[row])
            assert torch.equal(stored[:, left], before[side][row, :, left])
