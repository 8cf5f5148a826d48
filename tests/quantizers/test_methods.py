"""Methods from parts: their windows, their bits, and what coding leaves of values."""

import re

import numpy as np
import pytest
import torch
from fitted import fitted
from hydra.utils import instantiate
from omegaconf import OmegaConf

from semkv_bench.config.choices import choice_file, choices
from semkv_bench.errors import UsageError
from semkv_bench.grid.cost import LayerShape, SideShape, Stored
from semkv_bench.protocols.rule import PREFILL
from semkv_bench.quantizers import Keep, Method
from semkv_bench.settings.setting import TwoLevelMixes, uniform_settings


def method(name, **changes) -> Method:
    return instantiate(
        OmegaConf.merge(OmegaConf.load(choice_file("quantizer", name)), changes), _convert_="all"
    )


def cache_bits(name, levels, tokens, key_levels=None, value_levels=None):
    """Bits per value of keys and values of a prompt of ``tokens`` tokens."""
    made = method(name)
    keys, values = made.of_side("keys"), made.for_values()
    (setting,) = uniform_settings(keys, values, [levels], key_levels, value_levels)
    shape = SideShape(8, 128)
    found = setting.cost(Stored.of([LayerShape(shape, shape)], *PREFILL.stored(setting, tokens)))
    return found.key_cache_bits, found.value_cache_bits


# As many as the method that joins the most of them needs.
HEADS = 4

# Bits of keys and values at 1,000, 4,000 and 32,000 tokens, head_dim 128, 8 KV heads.
BITS = {
    ("kivi", 4): [(4.352, 4.664), (3.104, 3.416), (3.000, 3.052)],
    ("kivi", 16): [(6.144, 6.408), (5.088, 5.352), (5.000, 5.044)],
    ("hf_quanto", 16): [(4.5, 4.5)] * 3,
    ("quarot", 16): [(4.25, 4.25)] * 3,
    ("quarot", 8): [(3.25, 3.25)] * 3,
    ("zipcache", 4): [(3.264, 3.263), (3.216, 3.239), (3.202, 3.232)],
    ("kvarn", 4, 16, 4): [(7.072, 5.536), (4.840, 2.920), (4.421, 2.429)],
    ("kitty", 4): [(3.855, 4.450), (2.554, 2.800), (2.500, 2.319)],
    ("polarquant", 16): [(5.472, 5.472), (4.344, 4.344), (4.250, 4.250)],
    ("polarquant", 16, None, "full"): [(5.472, 16), (4.344, 16), (4.250, 16)],
    # The factor of the channels is kept once for the 960 tokens that are coded, so 0.064 bits at 1,000 tokens.
    ("gear", 4): [(4.1984, 4.1984), (3.755, 3.755), (3.642, 3.642)],
    ("gear_l", 4): [(3.584, 3.584), (3.120, 3.120), (3.002, 3.002)],
    ("kvquant", 8): [(3.333, 3.364), (3.323, 3.354), (3.320, 3.352)],
    ("kvquant", 4): [(2.334, 2.365), (2.323, 2.355), (2.320, 2.352)],
    ("skvq", 4, None, 3): [(3.970, 3.624), (2.586, 2.200), (2.183, 1.784)],
    ("rotatekv", 4): [(2.525, 2.525), (2.319, 2.319), (2.259, 2.259)],
    ("cq", 4): [(2.0, 2.0)] * 3,
    ("wkvquant_lite", 16): [(4.25, 4.25)] * 3,
}


@pytest.mark.parametrize("case", BITS, ids=str)
def test_bits_are_those_of_the_method_at_three_lengths(case):
    for tokens, expected in zip((1000, 4000, 32000), BITS[case], strict=True):
        assert cache_bits(case[0], case[1], tokens, *case[2:]) == pytest.approx(expected, abs=0.002), tokens


@pytest.mark.parametrize(
    ("tokens", "keys", "values"), [(127, 0, 0), (128, 128, 0), (129, 128, 1), (300, 256, 172)]
)
def test_windows_of_kivi(tokens, keys, values):
    made = method("kivi")
    assert (len(made.keys.keep.coded(tokens)), len(made.values.keep.coded(tokens))) == (keys, values)


@pytest.mark.parametrize(("tokens", "keys", "values"), [(159, 0, 0), (160, 128, 0), (161, 128, 1)])
def test_windows_of_kitty(tokens, keys, values):
    assert len(Keep(sinks=32, block=128).coded(tokens)) == keys
    assert len(Keep(sinks=32, recent=128).coded(tokens)) == values


def test_keys_have_one_range_per_channel_and_group():
    """A channel with a large constant offset costs nothing per channel and ruins a token's common range."""
    x = torch.randn(1, 2, 64, 64, generator=torch.Generator().manual_seed(0))
    x[..., 3] += 100
    made = method("kivi")
    levels = torch.tensor([[4]])
    per_channel = made.keys.coder(64).quantize_dequantize(x, levels)[0]
    per_token = made.values.coder(64).quantize_dequantize(x, levels)[0]
    quiet = [c for c in range(32) if c != 3]
    assert (per_channel - x[0])[..., quiet].square().mean() < 0.2
    assert (per_token - x[0])[..., quiet].square().mean() > 0.9


def test_options_stand_in_the_label():
    changed = method("kivi", keys={"keep": {"block": 64}, "group": {"tokens": 16}})
    (setting,) = uniform_settings(changed.keys, changed.values, [4])
    assert setting.name == "kivi[k.block64,k.group.tokens16]-L4"
    assert setting.describe()["options"] == {"keys": {"group.tokens": 16, "block": 64}, "values": None}
    assert method("kivi").keys.label == "kivi"


def test_kivi_is_its_formula():
    """Against the formula written out in float16 scales, one channel group at a time."""
    x = torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(3))
    back = method("kivi").keys.coder(32).quantize_dequantize(x, torch.tensor([[4]]))[0]
    for head in range(2):
        for start in (0, 32):
            for channel in range(32):
                group = x[head, start : start + 32, channel].numpy()
                low = np.float32(np.float16(group.min()))
                scale = np.float32(np.float16((group.max() - group.min()) / np.float32(3)))
                codes = np.round(np.clip((group - low) / scale, 0, 3))
                expected = codes * scale + low
                np.testing.assert_array_equal(back[head, start : start + 32, channel].numpy(), expected)


@pytest.mark.parametrize(
    "name", [n for n in choices("sweep")["quantizer"] if "turbo" not in n and n != "affine"]
)
def test_constant_and_extreme_groups_stay_finite_and_constant_ones_exact(name):
    made = method(name)
    for side in (made.keys, made.values):
        coder, levels = fitted(side, 64, HEADS).coder(64), torch.tensor([[side.fixed_levels or 3]])
        constant = torch.full((HEADS, 256, 64), 0.75)
        coder.prepare(constant)
        found = coder.quantize_dequantize(constant, levels)[0]
        if not side.transform and not side.calibrated and side.fixed_levels is None:
            assert torch.equal(found, constant)
        zeros = constant * 0
        coder.prepare(zeros)
        found = coder.quantize_dequantize(zeros, levels)[0]
        assert torch.isfinite(found).all() if side.calibrated else torch.equal(found, zeros)
        for extreme in (
            torch.full_like(constant, 6e-8),
            constant * torch.where(torch.arange(64) == 5, 6e4, 1),
        ):
            coder.prepare(extreme)
            assert torch.isfinite(coder.quantize_dequantize(extreme.half(), levels)).all()


@pytest.mark.parametrize(
    ("change", "head_dim", "word"),
    [
        ({"values": {"group": {"channels": 48}}}, 64, "group.channels=48 does not divide head_dim 64"),
        ({"keys": {"keep": {"block": 100}}}, 64, "keep.block=100 must be a multiple"),
        ({"keys": {"keep": {"recent": -1}}}, 64, "keep.recent=-1 must be a whole number"),
        ({"keys": {"group": {"axis": "row"}}}, 64, "group.axis=row is not known"),
        ({"keys": {"coder": {}}}, 64, "there is no keys.coder"),
    ],
)
def test_what_does_not_fit_is_said_in_one_line(change, head_dim, word):
    from semkv_bench.config.compose import build

    node = OmegaConf.merge(OmegaConf.load(choice_file("quantizer", "kivi")), change)
    with pytest.raises(UsageError, match=re.escape(word)) as refused:
        made = build(node, "quantizer")
        made.keys.check(head_dim)
        made.values.check(head_dim)
    assert "\n" not in str(refused.value)


def test_mixed_levels_inside_a_channel_group_are_refused():
    made = method("kivi")
    (mix,) = TwoLevelMixes(16, 4, 0.25).settings(made.keys, made.values)
    with pytest.raises(UsageError, match="must have one level count"):
        mix.check(128, 8)
