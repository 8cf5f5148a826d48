"""A level count for every vector, by the error that it may have: QAQ."""

import pytest
import torch
from test_methods import method

from semkv_bench.errors import UsageError
from semkv_bench.grid.levels import packing_plan
from semkv_bench.quantizers import Budget, Uniform


def vectors(*ranges):
    """[1, 1, tokens, 4] vectors of these ranges."""
    return torch.tensor(ranges).view(1, 1, -1, 1) * torch.tensor([0.0, 0.25, 0.5, 1.0])


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def counts(budget, y, levels, attention=None):
    return budget.levels(y, levels, attention).flatten().tolist()


def test_the_error_is_the_least_that_the_bits_allow():
    """Ranges 1 and 3, two bits each: off by a little less than 0.5, 3 and 5 levels take 1.6 + 2.33 bits.

    From 0.375 on the second would have 6, which takes 2.6 bits: 0.2 too many.
    """
    assert counts(Budget(), vectors(1.0, 3.0), 4) == [3, 5]
    assert counts(Budget(), vectors(1.0, 3.0), 3) == [2, 4]
    assert counts(Budget(ceiling=4), vectors(1.0, 3.0), 4) == [4, 4]
    assert counts(Budget(), vectors(1.0, 1e-6), 4) == [8, 2]  # 3 + 1 bits


@pytest.mark.parametrize("levels", [2, 3, 5, 8, 16])
def test_the_bits_are_those_of_the_grid_point_and_no_more(levels):
    y = normal(1, 3, 200, 16) * normal(1, 3, 200, 1, seed=1).exp()
    found = Budget().levels(y, levels, None)
    mean = sum(packing_plan(count).packed_bits for count in found.flatten().tolist()) / found.numel()
    assert packing_plan(levels).packed_bits * 0.999 < mean <= packing_plan(levels).packed_bits + 1e-9
    # A wider vector never has fewer levels.
    span = (y.amax(-1) - y.amin(-1)).flatten()
    assert (found.flatten()[span.argsort()].diff() >= 0).all()


def test_what_is_attended_to_has_more_levels_and_the_newest_the_most():
    y, attention = vectors(*[1.0] * 40), torch.ones(40)
    attention[7] = 50.0
    found = Budget(window=5).levels(y, 8, attention).flatten()
    assert (found[7] > found[:36][torch.arange(36) != 7]).all()
    assert (found[36:] == 256).all() and (found[:36] < 256).all()
    # Four tokens at 8 bits are more than a budget of two bits for six; then none has the most.
    assert counts(Budget(), vectors(*[1.0] * 6), 4, torch.ones(6)) == [4] * 6


def test_every_vector_is_coded_at_its_own_levels():
    y = normal(1, 2, 30, 64, seed=3) * normal(1, 2, 30, 1, seed=4).exp()
    side = method("qaq", keys={"outliers": None}).keys
    back = side.coder(64).quantize_dequantize(y[0], torch.tensor([[6]]))[0]
    levels = side.budget.levels(y, 6, None)[0, ..., 0]
    assert len(levels.unique()) > 4
    for head in range(2):
        for token in (0, 11, 29):
            expected = Uniform(zero="mean").quantize_dequantize(
                y[0, head, token][None], int(levels[head, token])
            )
            torch.testing.assert_close(back[head, token][None], expected)
    plain = method("atom").keys.coder(64).quantize_dequantize(y[0], torch.tensor([[6]]))[0]
    assert (back - y[0]).square().mean() < 0.8 * (plain - y[0]).square().mean()


def test_all_alike_or_all_zero_is_the_grid_point():
    assert counts(Budget(), vectors(2.0, 2.0, 2.0), 6) == [6, 6, 6]
    assert counts(Budget(), vectors(0.0, 0.0), 6) == [6, 6]


@pytest.mark.parametrize(
    ("change", "levels", "word"),
    [
        (
            {"budget": {"ceiling": 16}},
            32,
            "a budget of 32 levels is not within budget.floor=2 and budget.ceiling=16",
        ),
        ({"budget": {"floor": 4}}, 3, "a budget of 3 levels"),
        ({"budget": {"floor": 1}}, 4, "budget.floor=1 must be"),
        ({"budget": {"floor": 8, "ceiling": 4}}, 4, "budget.ceiling=4 must be a whole number from 8 to 256"),
        ({"group": {"axis": "token", "channels": 32}}, 4, "a budget is for groups of one head's vector each"),
    ],
)
def test_what_no_budget_can_be_is_said_in_one_line(change, levels, word):
    with pytest.raises(UsageError, match=word) as refused:
        method("qaq", keys=change).keys.check_levels(levels)
    assert "\n" not in str(refused.value)
