"""Over all methods: prompts in one piece and in many, and values that are hard: constant, zero, tiny, one huge."""

from functools import cache

import pytest
import torch
from fitted import fitted
from omegaconf import OmegaConf

from semkv_bench.config.choices import choice_file, names_of
from semkv_bench.config.compose import build

# As many heads as the method that joins the most of them needs.
HEADS, HEAD_DIM = 4, 64

# What is coded together decides, so that a prompt in pieces is another: by what.
TOGETHER = {
    "gear": "outliers of a channel over all tokens, and one low-rank term",
    "gear_l": "one low-rank term",
    "zipcache": "a range of a channel over all tokens of a class, and factors of the channels",
    "qserve": "factors of the channels over the whole prompt",
    "qaq": "the error that the bits of all vectors allow",
    "turboquant_channel_split": "which channels have more levels",
}


@cache
def sides(name):
    made = build(OmegaConf.load(choice_file("quantizer", name)), "quantizer")
    return tuple(fitted(side, HEAD_DIM, HEADS) for side in (made.of_side("keys"), made.for_values()))


def read_back(side, x, start=0, prompt=None):
    """x [heads, tokens, head_dim] as the side gives it back, of a prompt that is x unless it is given."""
    coder = side.coder(HEAD_DIM, seed=3)
    coder.prepare(x if prompt is None else prompt)
    levels = torch.tensor([[side.fixed_levels or 4]])
    return coder.placed(start).quantize_dequantize(x, levels)[0]


@pytest.mark.quick_cases(20)
@pytest.mark.parametrize("name", names_of("quantizer"))
def test_a_prompt_in_pieces_is_the_same_prompt(name):
    told = [side.granularity.tokens for side in sides(name)]
    assert (None in told) == (name in TOGETHER)
    for side, size in zip(sides(name), told, strict=True):
        if size is None:
            continue
        tokens = 4 * max(size, 8)
        x = torch.randn(HEADS, tokens, HEAD_DIM, generator=torch.Generator().manual_seed(0))
        whole, start, parts = read_back(side, x), 0, []
        for groups in (1, 2, tokens):
            part = x[:, start : start + groups * size]
            parts.append(read_back(side, part, start, x))
            start += part.shape[1]
        # The last bit of a rotation hangs on how many vectors are rotated at once.
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-5, atol=1e-5)


def _is_exact_where_constant(side):
    """Is a group's minimum stored, in its own coordinates and in float16?"""
    codes = type(getattr(side, "code", None)).__name__
    plain = not getattr(side, "transform", ()) and not side.calibrated
    return plain and (side.name == "affine" or codes == "Uniform")


@pytest.mark.quick_cases(20)
@pytest.mark.parametrize("name", names_of("quantizer"))
def test_hard_values_are_finite_and_exact_where_the_formula_says_so(name):
    for side in sides(name):
        constant = torch.full((HEADS, max(side.granularity.tokens or 128, 8), HEAD_DIM), 0.75)
        one_channel = torch.where(torch.arange(HEAD_DIM) == 5, 6e4, 1.0) * constant
        if _is_exact_where_constant(side):
            for value in (0.75, -3.0, 2.0**-24, 6e4):
                x = torch.full_like(constant, value).half()
                assert torch.equal(read_back(side, x), x), value
        zeros = read_back(side, constant * 0)
        # What a calibration has moved has its own zero.
        assert torch.isfinite(zeros).all() if side.calibrated else torch.equal(zeros, constant * 0)
        for kind in (torch.float16, torch.bfloat16, torch.float32):
            for x in (constant, torch.full_like(constant, 6e-8), constant * 3e-7, one_channel, -one_channel):
                found = read_back(side, x.to(kind))
                assert found.dtype == kind and torch.isfinite(found).all()
