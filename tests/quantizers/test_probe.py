"""A quantizer of a user's own is tried before anything is prefilled."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from semkv_bench.errors import UsageError
from semkv_bench.quantizers import (
    TOGETHER,
    Affine,
    Coder,
    Encoded,
    Granularity,
    Keep,
    Quantizer,
    TurboQuant,
    TurboQuantProd,
    TurboQuantSplit,
)
from semkv_bench.quantizers.base import token_levels
from semkv_bench.quantizers.probe import probe_own, probe_quantizer


@dataclass(frozen=True)
class PerChannel(Quantizer):
    """Keys per channel over groups of 32 tokens, the last 32 in 16 bits, as one would write it at first."""

    name: ClassVar[str] = "per_channel"
    last: int = 32

    def check(self, head_dim):
        pass

    def metadata_bits(self, head_dim):
        return head_dim  # 32 bits a channel for 32 tokens

    def coder(self, head_dim, seed=0, device="cpu"):
        return PerChannelCoder(self.last)


class PerChannelCoder(Coder):
    def __init__(self, last):
        self.last = last

    def _read_back(self, x, levels):
        end = max(0, x.shape[1] - self.last)
        out = x.clone()
        for group in out[:, :end].split(32, dim=1):
            low, high = group.amin(1, keepdim=True), group.amax(1, keepdim=True)
            step = ((high - low) / (int(levels[0]) - 1)).clamp_min(1e-8)
            group.copy_(((group - low) / step).round() * step + low)
        return out

    def encode(self, x, levels):
        levels = token_levels(levels, x)
        metadata = torch.zeros(*x.shape[:2], x.shape[2] // 16, dtype=torch.float16)
        return Encoded(self._read_back(x, levels), metadata, levels)

    def decode(self, encoded, dtype):
        return encoded.codes.to(dtype)

    def pack(self, x, levels, layout_of):
        raise NotImplementedError  # its tokens share metadata


@dataclass(frozen=True)
class Declared(PerChannel):
    granularity: ClassVar[Granularity] = Granularity(32, mixed=False)


@dataclass(frozen=True)
class Whole(PerChannel):
    granularity: ClassVar[Granularity] = TOGETHER


@pytest.mark.parametrize(
    ("quantizer", "word"),
    [
        (PerChannel(), "returns tokens as they were"),
        (PerChannel(last=0), "declare `granularity`"),
        (Declared(keep=Keep(block=32)), "returns tokens as they were"),
        (Whole(), "returns tokens as they were"),
    ],
)
def test_a_coder_per_channel_is_refused_in_one_line(quantizer, word):
    with pytest.raises(UsageError) as refused:
        probe_own([quantizer], 64)
    assert (
        word in str(refused.value) and "\n" not in str(refused.value) and "per_channel" in str(refused.value)
    )


def test_it_is_right_once_it_says_what_it_does():
    probe_own([Declared(last=0, keep=Keep(recent=32, block=32))], 64)
    with pytest.raises(UsageError, match=r"keep\.block=48 must be a multiple"):
        Declared(last=0, keep=Keep(block=48))


@pytest.mark.parametrize(
    "quantizer", [Affine(), Affine(32), TurboQuant(), TurboQuant("auto"), TurboQuantProd(), TurboQuantSplit()]
)
def test_the_packages_own_pass(quantizer):
    probe_quantizer(quantizer, 64)


class Faulty(Coder):
    """Per token and right, but for one fault."""

    def __init__(self, fault):
        self.fault, self.first = fault, None

    def quantize_dequantize(self, x, levels, out=None):
        if self.fault == "rows" and x.dim() == 4 and len(x) > 1:
            x = x + x.mean()
        if self.fault == "in place":
            x.clamp_(-2, 2)
        return super().quantize_dequantize(x, levels, out)

    def encode(self, x, levels):
        levels = token_levels(levels, x)
        largest = x.abs().amax(-1, keepdim=True).half()
        if self.fault == "memory":
            self.first = largest.amax() if self.first is None else self.first
            largest = self.first.expand_as(largest)
        codes = (x / largest.float().clamp_min(1e-8) + 1) / 2 * self._top(levels)
        if self.fault == "draws":
            codes = codes + torch.rand_like(codes) - 0.5
        codes = codes.round().clamp_min(0).minimum(self._top(levels))
        if self.fault == "finite":
            largest = largest / 0
        metadata = largest.repeat(1, 1, 1 + (self.fault == "metadata"))
        return Encoded(codes, metadata, levels)

    def _top(self, levels):
        levels = levels[:1].expand_as(levels) if self.fault == "levels" else levels
        return (levels * (4 if self.fault == "codes" else 1) - 1)[:, None]

    def decode(self, encoded, dtype):
        found = encoded.codes * 2 / self._top(encoded.levels) - 1
        return (found * encoded.metadata[..., :1].float()).to(dtype)


@dataclass(frozen=True)
class WithFault(PerChannel):
    name: ClassVar[str] = "faulty"
    fault: str = ""

    def metadata_bits(self, head_dim):
        return 16

    def coder(self, head_dim, seed=0, device="cpu"):
        return Faulty(self.fault)


def test_without_a_fault_it_passes():
    probe_own([WithFault()], 64)


@pytest.mark.parametrize(
    ("fault", "word"),
    [
        ("rows", "when other rows are coded with it"),
        ("finite", "NaN or infinity"),
        ("metadata", "metadata_bits=16 for a vector, but encode returns 32"),
        ("in place", "changes the vectors that it is given"),
        ("memory", "differently after other rows"),
        ("draws", "differently when asked again"),
        ("levels", "at the levels of others"),
        ("codes", "not whole numbers below the 4 levels"),
    ],
)
def test_each_fault_is_named(fault, word):
    with pytest.raises(UsageError, match=word):
        probe_own([WithFault(fault=fault)], 64)
