"""How often the host waits for a GPU: once a fill, once or twice a coded block, never in a decoding step."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from host_reads import GPU, HostReads

from semkv_bench.kernels import affine_triton, attention_triton, codebook_triton, dispatch, packing_triton
from semkv_bench.kernels.numerics import finite_together, named
from semkv_bench.packed.decode import PackedPieces, can_attend_packed
from semkv_bench.packed.ranking import Layouts
from semkv_bench.packed.tensor import PackedTensor
from semkv_bench.quantizers import Affine, NonFiniteError, TurboQuant

LAYERS = 32


@pytest.fixture
def reads(monkeypatch):
    monkeypatch.setattr(dispatch, "backend", lambda device: "triton")
    for module in (affine_triton, codebook_triton, packing_triton, attention_triton):
        monkeypatch.setattr(module, "launch", lambda *args, **options: None)
    with HostReads() as mode:
        yield mode


def states(tokens, heads=2, head_dim=16):
    return torch.zeros(heads, tokens, head_dim).to(GPU)


def test_a_read_is_counted(reads):
    x = states(3)
    assert x.device == GPU
    assert bool((x == 0).all()) and x.sum().item() == 0 and x[0, 0].tolist() == [0.0] * 16
    assert (x.unique() == 0).cpu().all()
    assert reads.total == 5, reads.counts


@pytest.mark.parametrize("quantizer", [Affine(), TurboQuant()], ids=lambda q: q.name)
def test_one_read_for_all_layers_of_a_fill(quantizer, reads):
    coder = quantizer.coder(16, device=GPU)
    x, levels = states(64)[None], torch.tensor([[8], [5]]).to(GPU)
    out = torch.zeros(2, 2, 64, 16).to(GPU)
    before = reads.total
    with finite_together():
        for layer in range(LAYERS):
            with named(f"layer {layer}"):
                coder.quantize_dequantize(x, levels, out)
    # TurboQuant also reads which levels there are, once for the tensor that all layers are given.
    assert reads.total - before == 1 + (quantizer.name == "turboquant"), reads.counts


def coded(quantizer, tokens, layouts, levels, pair):
    sides = []
    for _ in range(2):
        side = PackedTensor(quantizer.coder(16, device=GPU), states(tokens)[None])
        side.code_row(0, states(tokens), levels, layouts, pair)
        side.append(states(5)[None])
        sides.append(side)
    return sides


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("aligned", [False, True])
def test_two_reads_for_all_layers_of_a_coded_block(aligned, reads):
    layouts, levels = Layouts(64), torch.tensor([5, 6, 5, 6] * 16).to(GPU)
    before = reads.total
    with finite_together():
        for _ in range(LAYERS):
            coded(Affine(), 64, layouts, levels, (levels, levels) if aligned else None)
    # The level counts of the layout that all layers share, and whether all values were finite.
    assert reads.total - before == 2, reads.counts


def test_no_read_in_a_decoding_step(reads):
    levels = torch.tensor([5, 6, 5, 6] * 16).to(GPU)
    sides = coded(Affine(), 64, Layouts(64), levels, (levels, levels))
    before = reads.total
    assert can_attend_packed(sides)
    pieces = PackedPieces(sides)
    query = torch.zeros(1, 4, 1, 16).to(GPU)
    for _ in range(3):
        assert pieces.are_of(sides)
        pieces.attend(SimpleNamespace(query=query, scaling=0.25), sides)
        for side in sides:
            side.append(states(1)[None])
    assert reads.total == before, reads.counts


def test_what_is_not_finite_is_named_at_the_end():
    flags = torch.tensor([[0], [1], [1]], dtype=torch.int32)
    from semkv_bench.kernels.numerics import note_finite

    with pytest.raises(NonFiniteError, match="layer 1, keys: NaN or infinity"), finite_together():
        for layer, flag in enumerate(flags):
            with named(f"layer {layer}, keys"):
                note_finite(flag)
    with pytest.raises(NonFiniteError, match="layer 7: NaN"), named("layer 7"):
        note_finite(flags[1])
    with finite_together():
        note_finite(flags[0])
