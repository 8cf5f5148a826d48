"""Methods from parts: their windows, and what coding leaves of values."""

import re

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from semkv_bench.config.choices import choice_file
from semkv_bench.config.compose import build
from semkv_bench.errors import UsageError
from semkv_bench.quantizers import Keep, Method
from semkv_bench.settings.sets import TwoLevelMixes, uniform_settings


def method(name, **changes) -> Method:
    return build(OmegaConf.merge(OmegaConf.load(choice_file("quantizer", name)), changes), "quantizer")


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
