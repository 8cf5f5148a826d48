"""TurboQuant: rotations, distortion against the codebook's optimum, and its two variants."""

import math

import pytest
import torch

from semkv_bench.errors import UsageError
from semkv_bench.grid.levels import mix
from semkv_bench.quantizers import TurboQuant, TurboQuantProd, TurboQuantSplit
from semkv_bench.quantizers.codebook import lloyd_max
from semkv_bench.quantizers.rotation import random_rotation


def unit_vectors(count, head_dim, seed=0):
    x = torch.randn(1, count, head_dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (x / x.norm(dim=-1, keepdim=True)).float()


@pytest.mark.parametrize("kind", ["qr", "hadamard", "auto"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_rotations_are_orthogonal_and_seeded(kind, head_dim):
    rotation = random_rotation(kind, head_dim, 5)
    assert torch.allclose(rotation @ rotation.T, torch.eye(head_dim, dtype=torch.float64), atol=1e-12)
    assert torch.equal(rotation, random_rotation.__wrapped__(kind, head_dim, 5))
    assert not torch.equal(rotation, random_rotation(kind, head_dim, 6))


def test_qr_rotation_is_uniform_over_directions():
    # Without the sign correction the diagonal of Q would be all of one sign.
    diagonal = torch.cat([random_rotation("qr", 64, seed).diagonal() for seed in range(20)])
    assert abs(float((diagonal > 0).double().mean()) - 0.5) < 0.06  # 4 standard deviations of 1280 coins


def test_auto_is_hadamard_where_it_exists():
    assert torch.equal(random_rotation("auto", 64, 1), random_rotation("hadamard", 64, 1))
    assert torch.equal(random_rotation("auto", 80, 1), random_rotation("qr", 80, 1))


def test_hadamard_spreads_one_channel_evenly():
    rotation = random_rotation("hadamard", 64, 0)
    assert torch.equal(rotation.abs(), torch.full((64, 64), 1 / 8, dtype=torch.float64))


@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_distortion_is_the_optimum_of_the_codebook_within_one_percent(head_dim):
    x = unit_vectors(6000, head_dim)
    levels = torch.arange(2, 17)
    back = TurboQuant().coder(head_dim, seed=1).quantize_dequantize(x, levels[:, None])
    distortion = (back.double() - x).square().sum(-1).mean(dim=(1, 2))
    optimum = torch.tensor([lloyd_max(int(n), head_dim).mse for n in levels], dtype=torch.float64)
    assert ((distortion / optimum - 1).abs() < 0.01).all(), distortion / optimum


def test_hadamard_distortion_on_dense_vectors_is_the_same():
    x = unit_vectors(6000, 128)
    back = TurboQuant("hadamard").coder(128, seed=1).quantize_dequantize(x, torch.tensor([[2], [4], [8]]))
    distortion = (back.double() - x).square().sum(-1).mean(dim=(1, 2))
    optimum = torch.tensor([lloyd_max(n, 128).mse for n in (2, 4, 8)], dtype=torch.float64)
    assert ((distortion / optimum - 1).abs() < 0.01).all()


def test_decoded_vectors_are_not_renormalised():
    # With conditional means as centroids the decoded length is sqrt(1 - mse), on average.
    x = unit_vectors(4000, 64)
    back = TurboQuant().coder(64).quantize_dequantize(x, torch.tensor([[2], [4]]))
    squared = back.double().square().sum(-1).mean(dim=(1, 2))
    expected = torch.tensor([1 - lloyd_max(n, 64).mse for n in (2, 4)], dtype=torch.float64)
    assert torch.allclose(squared, expected, rtol=0.01)


def test_norm_is_rounded_to_float16_and_scales_exactly():
    x = unit_vectors(16, 64) * 3.001
    coder = TurboQuant().coder(64)
    encoded = coder.encode(x, 4)
    assert torch.equal(encoded.metadata[..., 0], x.double().norm(dim=-1).half())
    # A power of two changes the exponent of the norm and nothing else.
    assert torch.equal(coder.encode(x * 8, 4).codes, encoded.codes)
    assert torch.equal(coder.decode(coder.encode(x * 8, 4), x.dtype), coder.decode(encoded, x.dtype) * 8)


@pytest.mark.parametrize("scale", [1e-9, 3e-8, 1e5, 1e30])
@pytest.mark.parametrize("quantizer", [TurboQuant(), TurboQuantProd(), TurboQuantSplit()])
def test_norms_beyond_float16_stay_finite(quantizer, scale):
    x = unit_vectors(8, 64) * scale
    back = quantizer.coder(64).quantize_dequantize(x, torch.tensor([[2], [16]]))
    assert torch.isfinite(back).all()
    assert back.abs().max() < 10 * 65504


def test_codes_do_not_depend_on_how_the_tokens_are_split():
    x = torch.randn(2, 120, 64)
    coder = TurboQuant().coder(64)
    whole = coder.encode(x, 16).codes
    for size in (1, 3, 37, 119):
        assert torch.equal(whole, torch.cat([coder.encode(part, 16).codes for part in x.split(size, 1)], 1))


def test_levels_above_sixteen():
    x = unit_vectors(10_000, 64, seed=1)
    back = TurboQuant().coder(64).quantize_dequantize(x, torch.tensor([[32], [256]]))
    distortion = (back.double() - x).square().sum(-1).mean(dim=(1, 2)).tolist()
    assert distortion[0] == pytest.approx(lloyd_max(32, 64).mse, rel=0.02)
    assert distortion[1] == pytest.approx(lloyd_max(256, 64).mse, rel=0.05)


@pytest.mark.slow
def test_prod_inner_products_are_unbiased_and_plain_ones_are_not():
    # Over many rotations and projections of one pair (arXiv 2504.19874, theorem 2).
    key, query = unit_vectors(2, 32, seed=4)[0].split(1)
    query = (query + key) / (query + key).norm()
    exact = float(query @ key.T)
    bias = {}
    for quantizer in (TurboQuant(), TurboQuantProd()):
        backs = torch.cat(
            [
                quantizer.coder(32, seed).quantize_dequantize(key[None], torch.tensor([[2]]))[0, 0]
                for seed in range(600)
            ]
        )
        products = (backs @ query.T).double().squeeze()
        spread = float(products.std()) / math.sqrt(len(products))
        bias[quantizer.name] = (float(products.mean()) - exact) / spread
    assert abs(bias["turboquant_prod"]) < 4
    assert bias["turboquant"] < -10  # shrunk by the error of two levels, a third


def test_prod_residual_signs_and_norm():
    x = unit_vectors(50, 64)
    plain = TurboQuant().coder(64, seed=2)
    prod = TurboQuantProd().coder(64, seed=2).encode(x, 4)
    assert torch.equal(prod.codes // 2, plain.encode(x, 4).codes)
    residual = x - plain.quantize_dequantize(x, torch.tensor([[4]]))[0]
    assert torch.allclose(prod.metadata[..., 1].float(), residual.norm(dim=-1), rtol=1e-3)


def test_prod_is_for_keys():
    assert TurboQuantProd("hadamard").for_values() == TurboQuant("hadamard")
    assert TurboQuant().for_values() == TurboQuant()


def test_split_gives_outlier_channels_more_levels():
    x = torch.randn(2, 300, 128, generator=torch.Generator().manual_seed(0))
    hot = [torch.randperm(128, generator=torch.Generator().manual_seed(seed))[:32] for seed in (1, 2)]
    for head, channels in enumerate(hot):
        x[head, :, channels] *= 10
    encoded = TurboQuantSplit().coder(128).encode(x, 4)
    for head, channels in enumerate(hot):
        assert sorted(channels.tolist()) == encoded.outliers[head].nonzero().flatten().tolist()
        assert len(encoded.codes[head][:, channels].unique()) == 8
        rest = [c for c in range(128) if c not in set(channels.tolist())]
        assert len(encoded.codes[head][:, rest].unique()) == 4
    back = TurboQuantSplit().coder(128).quantize_dequantize(x, torch.tensor([[4]]))[0]
    lost = (back - x).square().sum() / x.square().sum()
    assert lost == pytest.approx(lloyd_max(8, 32).mse, rel=0.08)  # the hot channels hold 97 % of the energy


def test_storage_of_the_published_settings():
    turbo = TurboQuant()
    mixed = mix([(0.75, turbo.storage(4, 128)), (0.25, turbo.storage(3, 128))])
    assert round(mixed.code_bits, 3) == 1.896
    assert round(mixed.packed_bits, 3) == 1.9
    assert round(mixed.effective_bits, 3) == 2.025
    assert round(mixed.compression, 2) == 7.9


def test_storage_of_the_channel_split_is_two_and_a_quarter_bits():
    split = TurboQuantSplit().storage(4, 128)
    assert (split.code_bits, split.packed_bits, split.effective_bits) == (2.25, 2.25, 2.5)
    assert TurboQuantSplit(outlier_share=0.5).storage(4, 128).packed_bits == 2.5


def test_storage_of_the_prod_variant_counts_sign_and_second_norm():
    prod = TurboQuantProd().storage(4, 128)
    assert (prod.code_bits, prod.packed_bits, prod.effective_bits) == (3, 3, 3.25)


def test_what_cannot_be_coded_is_refused():
    with pytest.raises(UsageError, match=r"rotation=hadamard needs .* not 80; use rotation=qr"):
        TurboQuant("hadamard").check(80)
    with pytest.raises(UsageError, match="rotation=haar is not known; choose from qr, hadamard, auto"):
        TurboQuant("haar").check(64)
    with pytest.raises(UsageError):
        TurboQuant().check(2)
    with pytest.raises(UsageError, match="legal are 3 to 61 channels"):
        TurboQuantSplit(outlier_share=0.01).coder(64)
    with pytest.raises(UsageError):
        TurboQuantSplit().storage(200, 64)
