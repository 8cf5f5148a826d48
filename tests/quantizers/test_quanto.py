"""KIVI's coding in float16, operation by operation: the arithmetic of optimum-quanto, and the package itself."""

from types import SimpleNamespace

import pytest
import torch

from semkv_bench.quantizers import Group, Side, Uniform

BITS = [2, 4]
GROUP = 32
GROUPS = {0: Group(channels=GROUP), -1: Group(axis="channel", tokens=GROUP)}


def data(kind):
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(1)).half()
    if kind == "outlier":
        x[:, 5] *= 30
    if kind == "constant":
        x[:32] = 0.3
    return x


def ours(x, bits, axis, arithmetic="float16"):
    """x float16 [tokens, channels]: groups along channels (axis 0), or along tokens (axis -1)."""
    side = Side(group=GROUPS[axis], code=Uniform(arithmetic=arithmetic), keep={"block": GROUP})
    return side.coder(64).quantize_dequantize(x[None], torch.tensor([[2**bits]]))[0, 0]


@pytest.mark.parametrize("kind", ["normal", "outlier"])
@pytest.mark.parametrize("axis", GROUPS)
@pytest.mark.parametrize("bits", BITS)
def test_every_operation_is_rounded_as_a_model_in_float16_does(bits, axis, kind):
    x = data(kind)
    groups = x.view(-1, GROUP) if axis == 0 else x.view(-1, GROUP, 64).transpose(1, 2).reshape(-1, GROUP)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    scale, shift = (high - low) / (2**bits - 1), -low
    codes = torch.round((groups + shift) / scale).clamp(0, 2**bits - 1)
    back = scale * codes - shift
    assert back.dtype == torch.float16
    back = back.view(256, 64) if axis == 0 else back.view(-1, 64, GROUP).transpose(1, 2).reshape(256, 64)
    assert torch.equal(ours(x, bits, axis), back)
    # In float32 values are the same within a rounding, but for those that lie between two codes.
    close = (ours(x, bits, axis, "float32") - back).abs() < 0.01 * scale.max()
    assert close.float().mean() > 0.99


@pytest.fixture
def quanto(monkeypatch):
    """optimum-quanto, but for the C++ that takes its codes out of bytes, so that nothing is compiled."""
    package = pytest.importorskip("optimum.quanto")
    from optimum.quanto import library

    def unpack(packed, bits):
        return torch.cat([packed >> shift & 2**bits - 1 for shift in range(0, 8, bits)])

    monkeypatch.setattr(
        library.extensions.extension.get_extension("quanto_cpp"), "_lib", SimpleNamespace(unpack=unpack)
    )
    return package


@pytest.mark.parametrize("kind", ["normal", "outlier"])
@pytest.mark.parametrize("axis", GROUPS)
@pytest.mark.parametrize("bits", BITS)
def test_it_is_that_of_optimum_quanto(quanto, bits, axis, kind):
    x, kinds = data(kind), {2: quanto.qint2, 4: quanto.qint4}
    scale, shift = quanto.MaxOptimizer()(x, kinds[bits], axis, GROUP)
    theirs = quanto.quantize_weight(x, kinds[bits], axis, scale, shift, GROUP).dequantize()
    assert torch.equal(ours(x, bits, axis), theirs)


def test_constant_groups_are_exact_and_large_ones_finite():
    x = data("constant")
    assert torch.equal(ours(x, 2, -1)[:32], x[:32])
    large = torch.full((256, 64), 6e4).half() * torch.where(torch.arange(64) % 2 == 0, 1, -1).half()
    assert torch.isfinite(ours(large, 2, 0)).all()
