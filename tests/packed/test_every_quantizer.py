"""Every quantizer in the packed cache: what is stored, what is read back, and what cannot be stored."""

from dataclasses import dataclass

import pytest
import torch
from packed_caches import AFFINE, greedy, of_file, small_config, some_ids, some_states, swept
from thinned import thinned

from semkv_bench import SemKVCache
from semkv_bench.engine.engine import Engine, Request
from semkv_bench.errors import UsageError
from semkv_bench.grid.cost import SideShape
from semkv_bench.kernels import PackedLayout
from semkv_bench.protocols.rule import CodingRule
from semkv_bench.quantizers import Affine, Keep, Layers, TurboQuant, TurboQuantProd, TurboQuantSplit
from semkv_bench.quantizers.affine import AffineCoder
from semkv_bench.settings.sets import TwoLevelMixes, uniform_settings
from semkv_bench.settings.setting import FULL

SIMULATED = {"gear", "gear_l", "kitty", "kvarn", "nsnquant", "ott", "qserve", "zipcache"}
PACKED = [
    "affine",
    "atom",
    "fp8",
    "fp8_e5m2",
    "fp8_per_token_head",
    "hadamard",
    "hf_quanto",
    "intactkv",
    "kivi",
    "mikv",
    "mxfp4",
    "polarquant",
    "q4_0",
    "q4_0_rotated",
    "q8_0",
    "quarot",
    "saw_int4",
    "sglang_fp4",
]
PACKED += ["turboquant", "turboquant_channel_split", "turboquant_prod"]
HEADS, HEAD_DIM, TOKENS = 4, 128, 512


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("levels", thinned([2, 5, 8], 5))
@pytest.mark.parametrize("name", PACKED)
def test_what_is_packed_reads_back_and_takes_what_it_costs(name, levels):
    setting = of_file(name, levels)
    shape = SideShape(HEADS, HEAD_DIM)
    for side, x in zip((setting.keys, setting.values), some_states(TOKENS, 1, HEADS, HEAD_DIM), strict=True):
        x, ranks = x[0].bfloat16(), torch.arange(TOKENS).float()
        counts = side.allocation.levels(TOKENS, ranks).expand(TOKENS)
        coder = side.quantizer.coder(HEAD_DIM, seed=3)
        packed = coder.pack(x, counts, PackedLayout.build)
        expected = coder.quantize_dequantize(x, counts[None])[0]
        read = coder.unpack(packed, x.dtype)
        # Rotated vectors come back within the rounding of a sum.
        torch.testing.assert_close(read, expected, rtol=0.01 * side.quantizer.seeded, atol=0)
        price = side.coded_bits(TOKENS, shape) + side.sequence_bits(shape)
        stored = packed.nbytes + sum(layout.nbytes for layout in packed.layouts)
        assert 8 * stored == pytest.approx(price, rel=0.005)


WINDOWS = Keep(sinks=3, recent=6), Keep(block=8), Keep(sinks=2, recent=3, block=4)
WINDOWED = [
    *(uniform_settings(Affine(keep=keep), Affine(keep=keep), [4])[0] for keep in WINDOWS),
    uniform_settings(TurboQuant(keep=WINDOWS[1]), Affine(keep=WINDOWS[0]), [4])[0],
    uniform_settings(Affine(layers=Layers(skip_first=1)), AFFINE, [3])[0],
    uniform_settings(Affine(layers=Layers(levels={2: 8})), Affine(layers=Layers(skip_last=1)), [3])[0],
    TwoLevelMixes(6, 2, 0.25, "key_norm", "layer").settings(*[Affine(keep=WINDOWS[2])] * 2)[0],
    TwoLevelMixes(6, 2, 0.25, "key_norm", "shared").settings(*[Affine(keep=WINDOWS[0])] * 2)[0],
    uniform_settings(TurboQuantProd(), TurboQuant(norm_correction=True), [4])[0],
    uniform_settings(TurboQuantSplit(), TurboQuantSplit(), [4])[0],
]
KIVI = "quantizer.keys.group.tokens=4", "quantizer.keys.keep.block=16", "quantizer.values.group.channels=8"
FROM_FILES = [("kivi", (*KIVI, "quantizer.values.keep.recent=5")), ("quarot", ()), ("intactkv", ())]


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    "parts", [*(pytest.param(one, marks=pytest.mark.slow) for one in ("prompt", "generated")), "both"]
)
@pytest.mark.parametrize("setting", WINDOWED, ids=lambda s: s.name)
def test_windows_layers_and_every_coder_answer_as_in_the_sweep(tiny_llama, setting, parts):
    _answers_as_swept(tiny_llama, setting, parts)


@pytest.mark.parametrize("parts", thinned(["prompt", "generated", "both"], "both"))
@pytest.mark.parametrize("made", FROM_FILES, ids=lambda made: made[0])
def test_methods_from_parts_answer_as_in_the_sweep(tiny_llama, made, parts):
    _answers_as_swept(tiny_llama, of_file(made[0], 4, *made[1]), parts)


# Effective bits at head_dim 128, and what the kernels call its codes.
FORMATS = {
    "fp8_per_token_head": (8.25, "e4m3"),
    "mxfp4": (4.25, "e2m1"),
    "q4_0": (4.5, "symmetric"),
    "sglang_fp4": (4.5, "e2m1"),
    "nvfp4": (4.5, "e2m1"),
}
GIVEN = [f"quantizer.{side}.code.tensor_scale=0.25" for side in ("keys", "values")]


def test_formats_that_attention_does_not_know():
    for name in ("fp8", "kivi", "q4_0_rotated", "nvfp4", "q4_1"):
        assert not of_file(name, 4).aligns
    assert not of_file("mxfp4", 4, "quantizer.keys.group.channels=8").aligns
    with pytest.raises(UsageError, match=r"nvfp4: code\.tensor_scale=prompt is simulated: give a number"):
        SemKVCache(small_config(layers=4, head_dim=128), of_file("nvfp4", 4))


@pytest.mark.parametrize("name", thinned(list(FORMATS), "mxfp4"))
def test_attention_over_the_codes_of_formats_answers_as_in_the_sweep(tiny_wide, name):
    (bits, element), ids = FORMATS[name], some_ids(43)
    setting = of_file(name, 4, *(GIVEN if name == "nvfp4" else ()))
    assert setting.aligns and setting.aligned_storage(128).effective_bits == bits
    cache = SemKVCache(tiny_wide.model.config, setting, attention="packed", parts="both", block=8)
    expected = SemKVCache(tiny_wide.model.config, setting, parts="both", block=8)
    answer = greedy(tiny_wide, cache, ids, new=12)
    assert answer == greedy(tiny_wide, expected, ids, new=12)
    request = Request(ids[0].tolist(), [5], 12, frozenset())
    assert answer[0] == Engine(tiny_wide).run(request, [FULL, setting], CodingRule("both", 8))[1].tokens
    (side, _), pieces = cache.layers[0].sides, cache.layers[0].pieces_seen
    assert side.coder.known_to_kernels and pieces is not None
    # Bits stored are those of the price: whole words of codes, and scales of their own size.
    stored = [packed for row in side.rows for packed in row]
    values = 2 * 64 * sum(packed.tokens for packed in stored)
    assert sum(packed.nbytes for packed in stored) * 8 == pytest.approx(
        values * (bits if element != "e4m3" else 8.5), rel=0.05
    )
    assert {vectors.element for row in pieces.work for pair in row for vectors in pair} == {element}


def _answers_as_swept(loaded, setting, parts):
    ids, new = some_ids(43), 18
    request = Request(ids[0].tolist(), [5], new, frozenset())
    outcome = Engine(loaded).run(request, [FULL, setting], CodingRule(parts, 4))[1]
    cache = SemKVCache(loaded.model.config, setting, parts=parts, block=4)
    assert greedy(loaded, cache, ids, new=new)[0] == outcome.tokens
    for part in outcome.stored.sides:
        for layer in part.layers:
            side = cache.layers[layer].sides[part.side == "values"]
            coded = sum(packed.tokens for packed in side.rows[0])
            expected = 0 if side.coder is None else part.tokens.coded_tokens
            assert coded == expected and (side.coder is None or side.settled >= coded)


class Doubled(AffineCoder):
    def encode(self, x, levels):
        return super().encode(x * 2, levels)

    def decode(self, encoded, dtype):
        return super().decode(encoded, dtype) / 2

    def code_row(self, x, levels, out):
        super(AffineCoder, self).code_row(x, levels, out)


@dataclass(frozen=True)
class OfAUser(Affine):
    name = "of_a_user"

    def coder(self, head_dim, seed=0, device="cpu"):
        return Doubled(head_dim)


def test_a_subclass_is_packed_by_its_own_encode_and_decode(tiny_llama):
    """No kernel of the parent's reads what the child has written."""
    coder = OfAUser().coder(64)
    x, levels = some_states(40)[0][0], torch.full((40,), 5)
    packed = coder.pack(x, levels, PackedLayout.build)
    assert coder.packed_vectors(packed) is None
    assert AffineCoder(64).packed_vectors(packed) is not None
    assert torch.equal(coder.unpack(packed, x.dtype), coder.quantize_dequantize(x, levels[None])[0])
    (setting,) = uniform_settings(OfAUser(), OfAUser(), [4])
    for attention in ("dequantize", "packed"):
        cache = SemKVCache(tiny_llama.model.config, setting, attention=attention)
        assert greedy(tiny_llama, cache, some_ids(30)) == swept(tiny_llama, some_ids(30), [setting])


@pytest.mark.parametrize("name", sorted(SIMULATED))
def test_what_cannot_be_packed_is_named_in_one_line(name):
    setting = of_file(name, 4)
    with pytest.raises(UsageError, match=rf"{name}\b|at most") as caught:
        SemKVCache(small_config(layers=4, head_dim=128), setting)
    assert "\n" not in str(caught.value)


def test_windows_refuse_padded_prompts(tiny_llama):
    cache = SemKVCache(tiny_llama.model.config, WINDOWED[0])
    ids, mask = some_ids(20), torch.ones(1, 20, dtype=torch.int64)
    mask[0, :4] = 0
    with pytest.raises(UsageError, match="without padding"):
        cache.prefill(tiny_llama.model, ids, mask)
