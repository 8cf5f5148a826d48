"""How often the host waits for a GPU: a few times a fill and a coded block, whatever the layers, and never in a
decoding step without a mask."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from host_reads import GPU, HostReads, OnGPU
from packed_caches import AFFINE, TURBO, mixes, of_file
from transformers import LlamaConfig, LlamaForCausalLM

from semkv_bench.engine.engine import Engine, Request
from semkv_bench.kernels import affine_triton, attention_triton, codebook_triton, dispatch, packing_triton
from semkv_bench.kernels.numerics import Saturation, check_noted, finite_together, gathered, named
from semkv_bench.models.load import LoadedModel
from semkv_bench.packed import SemKVCache
from semkv_bench.packed.decode import PackedPieces, can_attend_packed
from semkv_bench.packed.ranking import Layouts
from semkv_bench.packed.tensor import PackedTensor
from semkv_bench.quantizers import Affine, NonFiniteError, TurboQuant
from semkv_bench.settings.sets import uniform_settings
from semkv_bench.settings.setting import FULL

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
    torch.zeros(2, 3, 16).copy_(x)
    assert reads.total == 6, reads.counts


def test_a_copy_that_waits_is_counted(reads):
    held = torch.zeros(2, 3)
    x = held.to(GPU)
    x.copy_(held)
    assert reads.waiting_copies == 2
    held.to(GPU, non_blocking=True)
    x.copy_(held, non_blocking=True)
    x.copy_(x)
    x.to(GPU)
    torch.zeros(3, device=GPU)
    assert reads.waiting_copies == 2 and reads.total == 0


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


def small_model(layers):
    config = LlamaConfig(
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        hidden_size=64,
        intermediate_size=64,
        vocab_size=97,
    )
    return LlamaForCausalLM(config).eval()


def on_gpu(model):
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            table.update({name: OnGPU(x.detach()) for name, x in table.items() if x is not None})
    return model


SETTINGS = {
    "affine": uniform_settings(AFFINE, AFFINE, [5])[0],
    "turboquant": uniform_settings(TURBO, TURBO, [4])[0],
    "two levels": mixes(["key_norm"], ["shared"], 6, 5, quantizer=AFFINE)[0],
    "two levels by layer": mixes(["key_norm"], ["layer"], 6, 5, quantizer=AFFINE)[0],
    **{name: of_file(name, 4) for name in ("mxfp4", "q4_0")},
}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("attention", ["packed", "dequantize"])
@pytest.mark.parametrize(
    ("name", "fill", "block"),
    [
        # Level counts of a layout (of the block, and of the piece that it joins), and whether all was finite.
        ("affine", lambda layers: 2, lambda layers: 3),
        ("turboquant", lambda layers: 2, lambda layers: 3),
        ("mxfp4", lambda layers: 2, lambda layers: 3),
        ("q4_0", lambda layers: 2, lambda layers: 3),
        ("two levels", lambda layers: 3, lambda layers: 4),  # and scores
        ("two levels by layer", lambda layers: 2 * layers + 1, lambda layers: 3 * layers + 1),
    ],
)
def test_reads_of_a_whole_cache(name, fill, block, attention, monkeypatch):
    """A model's forward calls without padding: the prompt, then tokens of which the fourth completes a block."""
    models = {layers: on_gpu(small_model(layers)) for layers in (1, 3)}
    caches = {
        layers: SemKVCache(model.config, SETTINGS[name], attention=attention, parts="both", block=4)
        for layers, model in models.items()
    }
    monkeypatch.setattr(dispatch, "backend", lambda device: "triton")
    monkeypatch.setattr(Saturation, "counts", {})
    for module in (affine_triton, codebook_triton, packing_triton, attention_triton):
        monkeypatch.setattr(module, "launch", lambda *args, **options: None)
    with HostReads() as reads, torch.no_grad():
        ids = torch.full((1, 9), 5).to(GPU)
        for layers, model in models.items():
            counted, waited = [], []
            for tokens in (ids, *[ids[:, :1]] * 5):
                before = reads.total, reads.waiting_copies
                model(input_ids=tokens, past_key_values=caches[layers], use_cache=True)
                counted.append(reads.total - before[0])
                waited.append(reads.waiting_copies - before[1])
            assert counted == [fill(layers), 0, 0, 0, block(layers), 0], reads.counts
            # The first fill brings constants to the GPU: rotations, codebooks, packing plans.
            assert not any(waited[1:])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("name", "reads_before"),
    # Whether all was finite; level counts, which TurboQuant reads; scores.
    [("two levels", 2), ("affine", 1), ("turboquant", 2), ("two levels by layer", 2)],
)
def test_reads_of_a_sweep(name, reads_before, monkeypatch):
    """A prompt and its answer under several settings: beside the fill one read a token, of the tokens of all rows."""
    settings, new = [FULL, SETTINGS[name], SETTINGS["affine"]], 4
    tensor = torch.tensor

    def tensor_on(data, *args, device=None, **kwargs):
        made = tensor(data, *args, **kwargs)
        return made.to(GPU) if device == GPU else made

    for layers in (1, 3):
        tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: "", eos_token_id=2)
        loaded = LoadedModel(small_model(layers), tokenizer, label="tiny", revision=None)
        engine = Engine(loaded)
        assert loaded.later_calls  # found out before, on the CPU
        on_gpu(loaded.model)
        with monkeypatch.context() as patched:
            patched.setattr(dispatch, "backend", lambda device: "triton")
            patched.setattr(torch, "tensor", tensor_on)
            patched.setattr(LoadedModel, "device", GPU)
            for module in (affine_triton, codebook_triton, packing_triton, attention_triton):
                patched.setattr(module, "launch", lambda *args, **options: None)
            with HostReads() as reads:
                engine.run(Request(list(range(3, 40)), [5], new, frozenset()), settings)
        assert reads.total == reads_before + new, reads.counts


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
    noted = []
    with gathered(noted), named("layer 3"):
        note_finite(flags[2])
    with pytest.raises(NonFiniteError, match="layer 3: NaN"):
        check_noted(noted)
    check_noted(noted)
