"""Serving formats against the engines' own arithmetic: gguf's, torch's, torchao's, and the formulas written out."""

import re

import gguf
import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from semkv_bench.config.choices import choice_file
from semkv_bench.config.compose import build
from semkv_bench.errors import UsageError
from semkv_bench.grid.cost import LayerShape, SideShape
from semkv_bench.quantizers import Affine, Float, GgmlAsymmetric, GgmlSymmetric, Hadamard, LloydMax, Method
from semkv_bench.quantizers.codebook import lloyd_max, trapezoid_lloyd_max
from semkv_bench.settings.sets import TwoLevelMixes, uniform_settings

GGML = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
TURBO = tuple(f"vllm_turboquant_{name}" for name in ("k8v4", "4bit_nc", "k3v4_nc", "3bit_nc"))
FIXED = (
    *GGML,
    *(f"{name}_rotated" for name in GGML),
    *("fp8", "fp8_e5m2", "fp8_per_token_head", "mxfp4", "nvfp4", "sglang_fp4"),
    *("vllm_int8_per_token_head", "vllm_int4_per_token_head", *TURBO),
)
GRIDDED = ("mlx_affine", "ggml_sym", "ggml_asym")


def method(name, **changes) -> Method:
    return build(OmegaConf.merge(OmegaConf.load(choice_file("quantizer", name)), changes), "quantizer")


def read_back(side, x, levels=None, prepare=True):
    """x [heads, tokens, head_dim] as ``side`` gives it back."""
    coder = side.coder(x.shape[-1])
    if prepare:
        coder.prepare(x)
    count = levels or side.fixed_levels or 16
    return coder.quantize_dequantize(x, torch.tensor([[count]]))[0]


def normal(shape=(2, 48, 128), seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).float()


def _outlier():
    x = normal(seed=1)
    x[..., 5] *= 30
    return x


DATA = {
    "normal": normal(),
    "half": normal(seed=2, dtype=torch.float16),  # where values meet midway
    "coarse": (normal(seed=3) * 4).round() / 4,
    "outlier": _outlier(),
    "zeros": torch.zeros(1, 2, 128),
    "constant": torch.full((1, 2, 128), -0.75),
    "subnormal": normal(seed=4) * 3e-7,
}


@pytest.fixture(params=DATA)
def data(request):
    return DATA[request.param]


@pytest.mark.parametrize("name", [*GGML[:5], "mxfp4"])
def test_llama_cpp_blocks_are_those_of_gguf(name, data):
    kind = gguf.GGMLQuantizationType[name.upper()]
    expected = gguf.quants.dequantize(gguf.quants.quantize(data.numpy(), kind), kind)
    side = method(name, **({"keys": {"code": {"ties": "down"}}} if name == "mxfp4" else {})).keys
    assert np.array_equal(read_back(side, data).numpy(), expected)


def _iq4_nl(block):
    """Codes and float16 step of one block, as ggml's reference: one value after the other in float32."""
    table = np.float32(gguf.quants.IQ4_NL.kvalues)
    largest = block[np.abs(block).argmax()]
    if abs(largest) < 1e-15:
        return np.full(32, 8, np.uint8), np.float16(0)
    inverse = np.float32(1) / (largest / table[0])
    codes = np.empty(32, np.uint8)
    upper = lower = np.float32(0)
    for place, x in enumerate(block):
        distance = np.abs(table.astype(np.float64) - float(inverse * x))
        codes[place] = 15 - distance[::-1].argmin()  # the upper one of two that are as near
        weight, value = x * x, table[codes[place]]
        upper += weight * value * x
        lower += weight * value * value
    return codes, np.float16(upper / lower)


def test_iq4_nl_is_that_of_ggml(data):
    x = data[:, :3].contiguous()
    rows = []
    for block in x.numpy().reshape(-1, 32):
        codes, step = _iq4_nl(block)
        rows.append(np.concatenate([np.frombuffer(step.tobytes(), np.uint8), codes[:16] | codes[16:] << 4]))
    kind = gguf.GGMLQuantizationType.IQ4_NL
    expected = gguf.quants.dequantize(np.stack(rows), kind).reshape(x.shape)
    assert np.array_equal(read_back(method("iq4_nl").keys, x).numpy(), expected)


def test_ggml_coders_have_any_number_of_levels():
    x = normal((1, 3, 32))
    for levels in (3, 7, 15, 255):
        half = levels // 2
        step = x.abs().amax(-1, keepdim=True) / half
        expected = (x / step).round() * step.half().float()
        torch.testing.assert_close(GgmlSymmetric().quantize_dequantize(x, levels), expected)
    for code in (GgmlSymmetric(), GgmlAsymmetric()):
        errors = [float((code.quantize_dequantize(x, n) - x).square().mean()) for n in (2, 4, 6, 16, 64, 256)]
        assert errors == sorted(errors, reverse=True)


def _float8(element):
    """All finite values of a float of 8 bits by its definition, in the order of their codes from 0."""
    bits, bias = {"e4m3": (3, 7), "e5m2": (2, 15)}[element]
    codes = np.arange(127 if element == "e4m3" else 124)
    exponent, mantissa = codes >> bits, (codes & ((1 << bits) - 1)) / (1 << bits)
    return np.where(
        exponent == 0, mantissa * 2.0 ** (1 - bias), (1 + mantissa) * 2.0 ** (exponent - float(bias))
    )


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_fp8_is_the_nearest_float_and_saturates(element, data):
    table = _float8(element)
    middles = (table[1:] + table[:-1]) / 2
    x = torch.cat(
        [data.flatten(), torch.tensor(middles).float(), torch.tensor([1e9, -1e9, 449, 6e4])]
    )  # every tie
    size = x.abs().double().numpy()
    below, above = np.searchsorted(middles, size, "left"), np.searchsorted(middles, size, "right")
    expected = np.copysign(table[np.where(below % 2 == 0, below, above)], x.numpy())
    found = Float(element=element).quantize_dequantize(x[None], 256)[0]
    assert np.array_equal(found.double().numpy(), expected)
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[element]
    inside = x.abs() <= table[-1]
    assert torch.equal(found[inside], x[inside].to(dtype).float())


def test_fp8_scales():
    x = _outlier()
    side = method("fp8_per_token_head").keys
    scale = (x.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-6)
    expected = (x * (1 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    assert torch.equal(read_back(side, x), expected)
    whole = method("fp8", keys={"code": {"tensor_scale": "prompt"}}).keys
    scale = x.abs().max() / 448
    assert torch.equal(read_back(whole, x), (x / scale).to(torch.float8_e4m3fn).float() * scale)
    assert whole.label == "fp8[code.tensor_scale=prompt]"
    assert (
        whole.sequence_bits(SideShape(8, 128)) == 32
        and method("fp8").keys.sequence_bits(SideShape(8, 128)) == 0
    )
    with pytest.raises(UsageError, match="needs the prompt"):
        read_back(whole, x, prepare=False)


@pytest.mark.parametrize("ties", ["even", "up", "down"])
def test_e2m1_is_the_nearest_of_sixteen(ties):
    x = torch.arange(-7, 7.01, 1 / 64)
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    expected = []
    for value in x.tolist():
        distance = np.abs(table - abs(value))
        near = np.flatnonzero(distance == distance.min())
        place = {"down": near[0], "up": near[-1], "even": next((n for n in near if n % 2 == 0), near[0])}[
            ties
        ]
        expected.append(np.copysign(table[place], value))
    found = Float(element="e2m1", ties=ties).quantize_dequantize(x[None], 16)[0]
    assert found.tolist() == expected


def test_sglang_fp4_has_the_power_of_two_that_nothing_exceeds():
    x = _outlier()
    blocks = x.unflatten(-1, (-1, 16))
    scale = torch.exp2(torch.ceil(torch.log2((blocks.abs().amax(-1, keepdim=True) / 6).clamp(min=1e-10))))
    bounds = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    place = ((blocks / scale).abs()[..., None] >= bounds).sum(-1)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    expected = (torch.where(blocks < 0, -1, 1) * table[place] * scale).flatten(-2)
    assert torch.equal(read_back(method("sglang_fp4").keys, x), expected)


@pytest.mark.parametrize("kind", ["normal", "half", "coarse", "outlier", "constant"])
@pytest.mark.parametrize("whole", [False, True])
def test_nvfp4_is_that_of_torchao(kind, whole):
    source = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    kernels = pytest.importorskip("torchao.prototype.mx_formats.kernels")
    x = DATA[kind]
    tensor = source.per_tensor_amax_to_scale(x.abs().max()) if whole else None
    scale, packed = source.nvfp4_quantize(x.flatten(0, 1), 16, tensor)
    values = kernels.f4_unpacked_to_f32(kernels.unpack_uint4(packed)).view(*x.shape[:-1], -1, 16)
    scale = scale.float().view(*x.shape[:-1], -1, 1) * (1 if tensor is None else tensor)
    side = method("nvfp4", **({} if whole else {"keys": {"code": {"tensor_scale": 1.0}}})).keys
    assert torch.equal(read_back(side, x), (values * scale).flatten(-2))


@pytest.mark.parametrize("kind", ["normal", "half", "coarse", "outlier", "zeros", "constant"])
def test_mxfp4_is_that_of_torchao(kind):
    source = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    kernels = pytest.importorskip("torchao.prototype.mx_formats.kernels")
    x = DATA[kind]
    scale, packed = source.to_mx(x, torch.float4_e2m1fn_x2, 32)
    values = kernels.f4_unpacked_to_f32(kernels.unpack_uint4(packed)).view(*x.shape[:-1], -1, 32)
    scale = torch.exp2(scale.view(torch.uint8).float() - 127).unsqueeze(-1)
    assert torch.equal(read_back(method("mxfp4").keys, x), (values * scale).flatten(-2))


def test_mlx_anchors_the_end_that_is_larger():
    # Range -1..2 in 15 steps of 0.2: 2 is ten steps from 0, so the step is -0.2 and 0 is code 10.
    x = torch.tensor([[-1.0, 2.0, 0.0, 0.31, -0.5]])
    step, bias = torch.tensor(-0.2).half().float(), 2.0
    codes = torch.tensor([[15, 0, 10, 8, 13]])  # -0.5 is 12.5 steps off: away from zero
    found = read_back(method("mlx_affine", keys={"group": {"channels": 5}}).keys, x[None], 16)[0]
    torch.testing.assert_close(found, codes * step + bias, rtol=0, atol=1e-6)
    # All above zero and far from it: the bias is the larger end, seven times the range away.
    high = torch.linspace(7, 8, 64)[None, None]
    back = read_back(method("mlx_affine").keys, high, 16)
    assert float((back - high).abs().max()) < 0.6 / 15 and float(back.max()) == 8


def test_int4_hides_its_zero_point_in_the_step():
    x = normal((1, 4, 128), seed=5)
    side = method("vllm_int4_per_token_head").keys
    signs = (
        2 * torch.bernoulli(torch.full((128,), 0.5), generator=torch.Generator().manual_seed(0x9E3779B9)) - 1
    )
    turned = side.transform[0].apply(x)[0]
    assert turned.square().sum() == pytest.approx(float(128 * x.square().sum()), rel=1e-5)
    impulse = torch.zeros(1, 1, 1, 128)
    impulse[..., 0] = 1
    assert torch.equal(side.transform[0].apply(impulse)[0].flatten(), torch.full((128,), float(signs[0])))
    for row, found in zip(
        turned[0].numpy(), side.code.quantize_dequantize(turned, 16)[0].numpy(), strict=True
    ):
        step = np.float32(max((row.max() - row.min()) / np.float32(15), 1e-6))
        zero = np.clip(np.floor(-row.min() / step + np.float32(0.5)), 0, 15)
        places = row * (np.float32(1) / step) + zero
        codes = np.clip(np.trunc(places + np.where(places >= 0, 0.5, -0.5).astype(np.float32)), 0, 15)
        bits = step.view(np.int32) & ~np.int32(15)
        assert np.array_equal(found, (codes - zero).astype(np.float32) * bits.view(np.float32))
    assert float((read_back(side, x) - x).square().mean()) < 0.02


def test_int8_rounds_to_the_nearest():
    x = torch.tensor([[[127.0, -126.4, 0.6, -0.6, 0.0, 63.25, 0.2, 1.0]]])
    found = read_back(method("vllm_int8_per_token_head").keys, x)
    assert found.tolist() == [[[127, -126, 1, -1, 0, 63, 0, 1]]]


def test_books_of_the_normal_distribution():
    for levels in (8, 16):
        book = trapezoid_lloyd_max(levels, 128) * 128**0.5
        gap = np.abs(book - lloyd_max(levels, np.inf).centroids)
        assert 1e-4 < gap.max() < 2e-3 and np.allclose(book, -book[::-1])


@pytest.mark.parametrize("name", TURBO[1:])
def test_turboquant_of_vllm(name):
    made, x = method(name), _outlier()
    found = read_back(made.keys, x)
    norm = x.norm(dim=-1).half().float()
    torch.testing.assert_close(found.norm(dim=-1), norm, rtol=1e-5, atol=0)
    # Keys: the nearest centroid of every rotated coordinate, scaled to the norm.
    turned = Hadamard().apply(x / x.norm(dim=-1, keepdim=True))[0]
    book = torch.tensor(trapezoid_lloyd_max(made.keys.levels, 128)).float()
    near = book[(turned[..., None] - book).abs().argmin(-1)]
    expected = Hadamard().apply(near / near.norm(dim=-1, keepdim=True))[0] * norm[..., None]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(norm.max()))
    # Values: codes of the unrounded step, half a step goes up.
    top = made.values.levels - 1
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    step = ((high - low) / top).clamp(min=1e-8)
    codes = ((x - low) / step + 0.5).int().clamp(0, top)
    assert torch.equal(read_back(made.values, x), codes * step.half().float() + low.half().float())


def test_a_code_without_renormalisation_is_shorter():
    x = normal((1, 200, 128))
    turned = x / x.norm(dim=-1, keepdim=True)
    error = (LloydMax().quantize_dequantize(turned, 4) - turned).square().sum(-1).mean()
    assert float(error) == pytest.approx(0.1175, abs=0.005)  # J. Max, 1960
    assert float(LloydMax().quantize_dequantize(turned, 4).norm(dim=-1).mean()) < 0.96


@pytest.mark.parametrize("name", FIXED)
def test_a_format_is_one_setting_whatever_the_grid(name):
    made = method(name)
    (setting,) = uniform_settings(made.keys, made.values, [16, 8, 5, 3])
    assert setting.name == name
    levels = {made.keys.fixed_levels, made.values.fixed_levels}
    assert setting.describe()["levels"] in (
        *levels,
        {"keys": made.keys.levels, "values": made.values.levels},
    ) or (name == "vllm_turboquant_k8v4" and setting.describe()["levels"] == {"keys": 256, "values": 16})


def test_a_format_beside_a_grid_and_beside_16_bits():
    made, affine = method("q8_0"), Affine()
    names = [setting.name for setting in uniform_settings(made.keys, affine, [16, 4])]
    assert names == ["q8_0+affine-K255V16", "q8_0+affine-K255V4"]
    (setting,) = uniform_settings(made.keys, made.values, [16, 4], "full")
    assert setting.name == "q8_0-KfullV255" and setting.keys is None
    free = method("q4_0", keys={"levels": None}, values={"levels": None})
    assert [s.name for s in uniform_settings(free.keys, free.values, [16, 6])] == [
        "q4_0[levels=None]-L16",
        "q4_0[levels=None]-L6",
    ]


def test_other_levels_of_a_format_are_refused():
    made = method("q4_0")
    one_format = "q4_0 is one format: its keys have 16 levels, not 8"
    with pytest.raises(UsageError, match=one_format):
        uniform_settings(made.keys, made.values, [16, 4], 8)
    (mixed,) = TwoLevelMixes(8, 4).settings(made.keys, made.values)
    with pytest.raises(UsageError, match=one_format):
        mixed.check(128, 8)
    layered = method("q4_0", keys={"layers": {"levels": {0: 8}}})
    with pytest.raises(UsageError, match=one_format):
        uniform_settings(layered.keys, layered.values, [4])[0].check(128, 8)
    with pytest.raises(UsageError, match="at most 16 levels, not 32"):
        method("vllm_int4_per_token_head", keys={"levels": 32})
    with pytest.raises(UsageError, match="odd number of levels"):
        method("vllm_int8_per_token_head", keys={"levels": 256})
    with pytest.raises(UsageError, match="2 to 256, not 1"):
        method("q4_0", keys={"levels": 1})


def test_a_model_whose_layers_are_all_skipped_is_refused():
    made, shape = method("vllm_turboquant_3bit_nc"), SideShape(2, 64)
    (setting,) = uniform_settings(made.keys, made.values, [4])
    setting.check_in([LayerShape(shape, shape)] * 5)
    with pytest.raises(
        UsageError, match="first 2 and the last 2 layers in 16 bits, and so all 4 of this model"
    ):
        setting.check_in([LayerShape(shape, shape)] * 4)


@pytest.mark.parametrize(
    ("name", "head_dim", "told"),
    [
        ("q4_0", 80, "group.channels=32 does not divide head_dim 80"),
        ("nvfp4", 40, "group.channels=16 does not divide head_dim 40"),
        ("mlx_affine", 96, "group.channels=64 does not divide head_dim 96"),
        ("q4_0_rotated", 96, "the rotation is for head_dim that 64 divides, not 96"),
        ("vllm_int4_per_token_head", 80, "a Hadamard step of size 80 does not fit head_dim 80"),
        ("vllm_turboquant_4bit_nc", 96, "a Hadamard step of size 96 does not fit head_dim 96"),
    ],
)
def test_heads_that_do_not_fit_are_refused_in_one_line(name, head_dim, told):
    with pytest.raises(UsageError, match=re.escape(told)) as raised:
        method(name).keys.check(head_dim)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "field", [{"element": "e3m4"}, {"scale": "int"}, {"ties": "odd"}, {"tensor_scale": 0}]
)
def test_unknown_floats_are_refused(field):
    with pytest.raises(UsageError, match=f"code.{next(iter(field))}="):
        Float(**field)


def _huge(dtype, size):
    x = normal((2, 4, 128), seed=6)
    x[..., 7] = size
    return x.to(dtype)


BAD = {
    "zeros": torch.zeros(2, 4, 128),
    "constant": torch.full((2, 4, 128), 0.75),
    "subnormal": (normal((2, 4, 128), seed=7) * 2e-7).half(),
    "least": torch.full((2, 4, 128), 6e-8).half(),
    "huge16": _huge(torch.float16, 65504),
    "huge": _huge(torch.bfloat16, -1e30),
    "tiny": torch.full((2, 4, 128), 1e-39),
}


@pytest.mark.parametrize("name", [*FIXED, *GRIDDED])
@pytest.mark.parametrize("kind", BAD)
def test_hard_vectors_stay_finite(name, kind):
    made, x = method(name), BAD[kind]
    for side in (made.keys, made.values):
        found = read_back(side, x)
        assert found.dtype == x.dtype and torch.isfinite(found).all()
        if kind == "zeros":
            assert (found == 0).all()
        if kind == "constant" and side.transform == () and name != "vllm_int4_per_token_head":
            assert float((found - x).abs().max()) < 0.13  # e2m1 has 0.75 between two powers of two


@pytest.mark.parametrize("name", [*FIXED, *GRIDDED])
def test_a_token_is_coded_by_itself(name):
    made, x = method(name), _outlier()
    for side in (made.keys, made.values):
        coder, levels = side.coder(128), torch.tensor([[side.fixed_levels or 16]])
        coder.prepare(x)
        parts = [coder.quantize_dequantize(part, levels)[0] for part in x.split([1, 15, 32], dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), read_back(side, x), rtol=1e-6, atol=1e-6)
        heads = [coder.quantize_dequantize(head, levels)[0] for head in x.split(1)]
        torch.testing.assert_close(torch.cat(heads), read_back(side, x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", GGML)
def test_rotation_spreads_an_outlier(name):
    x = normal((1, 64, 128), seed=8)
    x[..., ::32] *= 20
    plain, turned = (read_back(method(n).keys, x) for n in (name, f"{name}_rotated"))
    rest = torch.arange(128) % 32 != 0
    assert (turned - x)[..., rest].square().mean() < 0.5 * (plain - x)[..., rest].square().mean()


def test_keys_are_rotated_by_the_largest_matrix_that_fits():
    impulse = torch.zeros(1, 1, 1, 192)
    impulse[..., 0] = 1
    made = method("q4_0_rotated")
    for side, width in ((made.keys, 64), (made.values, 64)):
        assert int((side.transform[0].apply(impulse)[0] != 0).sum()) == width
    wide = torch.zeros(1, 1, 1, 128)
    wide[..., 0] = 1
    assert [int((s.transform[0].apply(wide)[0] != 0).sum()) for s in (made.keys, made.values)] == [128, 64]
