"""What holds for every quantizer: one row of the matrix each."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from fitted import fitted
from hydra.utils import instantiate
from thinned import thinned

from semkv_bench.quantizers import (
    Affine,
    NonFiniteError,
    Quantizer,
    TurboQuant,
    TurboQuantProd,
    TurboQuantSplit,
)

CONF = Path(__file__).resolve().parents[2] / "conf" / "quantizer"


@dataclass(frozen=True)
class Row:
    """A quantizer, and where it departs from the plainest one."""

    quantizer: Quantizer
    codes: int = 1  # distinct codes per level count
    tolerance: float = 0.0  # relative; a matrix product's rounding depends on how many rows it has
    tokenwise: bool = True  # does a token's coding depend on no other token?


MATRIX = {
    "affine": Row(Affine()),
    "affine-g32": Row(Affine(group_size=32)),
    "turboquant": Row(TurboQuant(), tolerance=2e-6),
    "turboquant-auto": Row(TurboQuant("auto"), tolerance=2e-6),
    "turboquant-norm": Row(TurboQuant(norm_correction=True), tolerance=2e-6),
    "turboquant_prod": Row(TurboQuantProd(), codes=2, tolerance=2e-6),
    "turboquant_split": Row(TurboQuantSplit(), codes=2, tolerance=2e-6, tokenwise=False),
}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(params=MATRIX, scope="module")
def row(request):
    return MATRIX[request.param]


@pytest.fixture
def quantizer(row):
    return row.quantizer


def assert_same(actual, expected, row):
    """Equal to the bit, or where the row says so up to rounding of a matrix product and the final cast."""
    if row.tolerance == 0:
        assert torch.equal(actual, expected)
    else:
        rounding = 2 * torch.finfo(actual.dtype).eps if actual.dtype != torch.float32 else 0
        scale = float(expected.abs().max()) if expected.numel() else 1.0
        torch.testing.assert_close(
            actual, expected, rtol=rounding, atol=scale * max(row.tolerance, rounding / 2)
        )


def sample(heads=2, tokens=37, head_dim=64, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(heads, tokens, head_dim, generator=generator).to(dtype)


@pytest.mark.parametrize("head_dim", thinned([64, 96, 128, 256], 64, 96))
@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_of_encode_is_quantize_dequantize(row, quantizer, head_dim, dtype):
    x = sample(head_dim=head_dim, dtype=dtype)
    coder = quantizer.coder(head_dim, seed=3)
    per_token = torch.randint(2, 9, (37,), generator=torch.Generator().manual_seed(1))
    encoded = coder.encode(x, per_token)
    assert encoded.codes.dtype == torch.uint8 and encoded.codes.shape == x.shape
    assert_same(coder.decode(encoded, dtype), coder.quantize_dequantize(x, per_token[None])[0], row)


def test_metadata_is_float16_and_as_large_as_the_storage_says(quantizer):
    encoded = quantizer.coder(128).encode(sample(head_dim=128), 4)
    assert encoded.metadata.dtype == torch.float16
    assert encoded.metadata[0, 0].numel() * 16 == quantizer.metadata_bits(128)
    storage = quantizer.storage(4, 128)
    assert storage.effective_bits == pytest.approx(storage.packed_bits + quantizer.metadata_bits(128) / 128)


def test_many_settings_equal_one_at_a_time(row, quantizer):
    x = sample()
    coder = quantizer.coder(64)
    mixed = torch.where(torch.arange(37) % 3 == 0, 6, 5)
    uniform = torch.tensor([[2], [3], [5], [16]])
    together = coder.quantize_dequantize(x, torch.cat([uniform.expand(4, 37), mixed[None]]))
    for setting, levels in enumerate(uniform):
        assert_same(together[setting], coder.quantize_dequantize(x, levels[None])[0], row)
    five, six = coder.quantize_dequantize(x, torch.tensor([[5], [6]]))
    assert_same(together[4], torch.where((mixed == 6)[:, None], six, five), row)


def test_tokens_are_coded_independently(row, quantizer):
    if not row.tokenwise:
        pytest.skip("codes tokens together")
    x = sample()
    coder = quantizer.coder(64)
    whole = coder.quantize_dequantize(x, torch.tensor([[5]]))
    parts = [coder.quantize_dequantize(part, torch.tensor([[5]])) for part in x.split([1, 3, 33], dim=1)]
    assert_same(torch.cat(parts, dim=2), whole, row)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_output_is_filled_and_nothing_beside_it(quantizer, dtype):
    x = sample(dtype=dtype)
    levels = torch.tensor([[3], [8]])
    coder = quantizer.coder(64)
    store = torch.full((4, 2, 60, 64), 77.0, dtype=dtype)
    view = store[::2, :, 5:42]
    assert coder.quantize_dequantize(x, levels, out=view) is view
    assert torch.equal(view, coder.quantize_dequantize(x, levels))
    assert (store[1::2] == 77).all() and (store[:, :, :5] == 77).all() and (store[:, :, 42:] == 77).all()


@pytest.fixture
def torch_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("tokens", [1, 700])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_threads_and_inference_mode_change_nothing(row, quantizer, mode, tokens, torch_threads):
    coder, levels = quantizer.coder(64), torch.tensor([[5], [6]])
    torch_threads(1)
    expected = coder.quantize_dequantize(sample(heads=3, tokens=tokens), levels)
    torch_threads(2)
    with mode():
        x = sample(heads=3, tokens=tokens)
        out = torch.full((2, 3, tokens, 64), float("nan"))
        coder.quantize_dequantize(x, levels, out=out)
        assert_same(out, expected, row)
        x[2, -1, 0] = float("inf")
        with pytest.raises(NonFiniteError):
            coder.quantize_dequantize(x, levels, out=out)
        assert torch.get_num_threads() == 2


def test_strided_input_gives_the_same(row, quantizer):
    x = sample()
    transposed = x.transpose(0, 1).contiguous().transpose(0, 1)
    coder = quantizer.coder(64)
    levels = torch.tensor([[4]])
    assert_same(coder.quantize_dequantize(transposed, levels), coder.quantize_dequantize(x, levels), row)


def test_codes_need_no_more_bits_than_planned(row, quantizer):
    x = sample(tokens=120)
    for levels in range(2, 17):
        codes = quantizer.coder(64).encode(x, levels).codes
        # No code is too large, and this much data uses them all.
        assert codes.unique().tolist() == list(range(row.codes * levels))


def test_more_levels_lose_less(quantizer):
    x = sample(tokens=200)
    back = quantizer.coder(64).quantize_dequantize(x, torch.tensor([[n] for n in (2, 3, 4, 6, 8, 16)]))
    errors = (back - x).pow(2).mean(dim=(1, 2, 3))
    assert (errors.diff() < 0).all() and errors[-1] < 0.05


def test_zero_vectors_come_back_as_zeros(quantizer):
    x = sample()
    x[:, 5] = 0
    back = quantizer.coder(64).quantize_dequantize(x, torch.tensor([[2], [3], [7]]))
    assert (back[:, :, 5] == 0).all() and torch.isfinite(back).all()


@pytest.mark.parametrize("threads", [1, 2])
def test_no_tokens_is_no_work(quantizer, threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert quantizer.coder(64).quantize_dequantize(sample(tokens=0), torch.tensor([[4]])).shape == (
        1,
        2,
        0,
        64,
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_input_is_an_error(quantizer, bad):
    x = sample()
    x[1, 36, 63] = bad
    with pytest.raises(NonFiniteError):
        quantizer.coder(64).quantize_dequantize(x, torch.tensor([[4]]))
    with pytest.raises(NonFiniteError):
        quantizer.coder(64).encode(x, 4)


@pytest.mark.parametrize(
    "levels",
    [
        torch.tensor([4]),
        torch.tensor([[4.0]]),
        torch.tensor([[1]]),
        torch.tensor([[257]]),
        torch.full((1, 36), 4),
    ],
)
def test_wrong_levels_are_refused(quantizer, levels):
    with pytest.raises(ValueError):
        quantizer.coder(64).quantize_dequantize(sample(), levels)


def test_seed_matters_exactly_where_it_is_said_to(quantizer):
    x, levels = sample(), torch.tensor([[4]])
    one, two = (quantizer.coder(64, seed=seed).quantize_dequantize(x, levels) for seed in (1, 2))
    assert torch.equal(one, quantizer.coder(64, seed=1).quantize_dequantize(x, levels))
    assert torch.equal(one, two) != quantizer.seeded


SHIPPED = sorted(path.stem for path in CONF.glob("*.yaml"))
# Fitting these takes ten times as long as others.
LONG = {"aquakv", "cq", "kvarn", "nsnquant"}


@pytest.mark.quick_cases(15)
@pytest.mark.parametrize("name", thinned(SHIPPED, *(name for name in SHIPPED if name not in LONG)))
def test_every_shipped_configuration_builds_working_quantizers(name):
    made = instantiate(yaml.safe_load((CONF / f"{name}.yaml").read_text()), _convert_="all")
    # As many heads as the method that joins the most of them needs.
    heads = 4
    x = sample(tokens=256, heads=heads)
    sides = (made.of_side("keys"), made.of_side("values"), made.for_values())
    for place, quantizer in enumerate(sides):
        if quantizer in sides[:place]:
            continue
        quantizer.check(64)
        quantizer.check_heads(heads, 64)
        assert quantizer.name and isinstance(quantizer.seeded, bool)
        coder = fitted(quantizer, 64, heads).coder(64)
        coder.prepare(x)
        levels = quantizer.fixed_levels or 4
        found = coder.quantize_dequantize(x, torch.tensor([[levels]]))[0]
        assert 0 < (found - x).square().mean() < 0.5
        assert quantizer.storage(levels, 64, heads).effective_bits >= 2
        constant = torch.full((heads, 256, 64), 0.75)
        coder.prepare(constant)
        assert torch.isfinite(coder.quantize_dequantize(constant, torch.tensor([[levels]]))).all()
