import hashlib

import pytest
import torch

from semkv_bench.grid.cost import LayerShape, SideShape
from semkv_bench.kernels import affine_quantize
from semkv_bench.models.shape import ModelShape
from semkv_bench.quantizers import Affine, TurboQuant, TurboQuantProd
from semkv_bench.regress.checksums import CHECK_LEVELS, CLOSE, code_checks, differing
from semkv_bench.regress.probe import integers, probe_states, probe_tensor
from semkv_bench.settings.sets import uniform_settings
from semkv_bench.settings.setting import FULL

SIDE = SideShape(2, 16)
SHAPE = ModelShape(tuple(LayerShape(SIDE, SIDE, coded=i != 1) for i in range(3)), None)


def _settings(quantizer):
    return [FULL, *uniform_settings(quantizer, quantizer, [8, 4, 3], [8, 4, 3], [8, 4, 2])]


def test_the_generator_is_knuths():
    # Two steps by hand: state * 6364136223846793005 + 1442695040888963407 modulo 2**64, upper bits.
    state = 0x9E3779B97F4A7C15
    expected = []
    for _ in range(2):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        expected.append(state // 2**33 % 1000)
    assert integers(2, 0, 999) == expected
    assert {*integers(500, -2, 2)} == {-2, -1, 0, 1, 2} and integers(9, 0, 99, 1) != integers(9, 0, 99, 2)


def test_the_probe_is_these_bits_everywhere():
    x = probe_tensor(64, CHECK_LEVELS, torch.float32)
    assert x.shape == (2, 24 + 2 + 12 + 2 * len(CHECK_LEVELS), 64)
    digest = hashlib.sha256(x.numpy().tobytes()).hexdigest()
    assert digest[:16] == "c97bf9ce8be6ef99"


@pytest.mark.parametrize("levels", CHECK_LEVELS)
def test_it_holds_exact_ties_and_codes_that_only_the_clamp_holds(levels):
    x = probe_tensor(64, CHECK_LEVELS, torch.float32)[:1]
    row = 24 + 2 + 12 + 2 * CHECK_LEVELS.index(levels)
    _, scale, zero = affine_quantize(x, torch.tensor([[levels]]), 64)
    steps = (x[0] - zero[0].float()) / scale[0, 0].float()
    ties = steps[row] - steps[row].floor() == 0.5
    assert scale[0, 0, row] == 2**-3 and ties.sum() == 62
    assert scale[0, 0, row + 1] == 2**-24 and steps[row + 1].max() == 1.25 * (levels - 1)


def test_it_holds_constants_extremes_and_a_minimum_that_rounds_up():
    x = probe_tensor(64, CHECK_LEVELS, torch.float32)[0]
    constant = x.amin(-1) == x.amax(-1)
    assert sorted(x[constant][:, 0].tolist()) == [-9, 0, 1365 / 4096, 9]
    assert x.max() == 2**24 - 1 and x.min() == -(10**6)
    low = x.amin(-1)
    assert ((low.half().float() > low) & (low > -65504)).any()
    half = probe_tensor(64, CHECK_LEVELS, torch.float16)
    assert torch.isfinite(half).all() and half.abs().max() == 65504


def test_states_differ_from_stream_to_stream():
    first, second = probe_states(2, 4, 16, 0), probe_states(2, 4, 16, 1)
    assert first.shape == (2, 4, 16) and not torch.equal(first, second)


@pytest.mark.parametrize("quantizer", [Affine(), TurboQuant(), TurboQuant(rotation="hadamard")], ids=repr)
def test_checks_repeat_whatever_the_number_of_threads(quantizer):
    threads = torch.get_num_threads()
    runs = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            runs.append(code_checks(quantizer, quantizer, _settings(quantizer), SHAPE))
    finally:
        torch.set_num_threads(threads)
    assert differing(*runs) == {}
    assert all(runs[0][kind] for kind in ("codes", "metadata", "values", "packed", "refusals", "rows"))


def test_keys_and_values_of_two_quantizers_are_checked_apart():
    prod = TurboQuantProd()
    checks = code_checks(prod, prod.for_values(), _settings(Affine()), SHAPE)
    sides = {case.split()[0] for case in checks["codes"]}
    assert sides == {"keys", "values"}


def test_sums_are_close_and_checksums_equal():
    old = {"values": {"a": [1.0, 2.0], "b": "x"}}
    assert differing(old, {"values": {"a": [1.0 + CLOSE / 2, 2.0], "b": "x"}}) == {}
    assert differing(old, {"values": {"a": [1.0 + 2 * CLOSE, 2.0], "b": "y"}}) == {"values": ["a", "b"]}
    assert differing(old, {"values": {"a": [1.0, 2.0]}}) == {"values": ["b"]}
    assert differing(old, {}) == {"values": ["a", "b"]}
