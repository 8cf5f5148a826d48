"""Choosing options under a budget."""

import itertools
import random

import pytest

from semkv_bench.search.budget import Option, choose, spread


def _total(parts, chosen, what):
    return sum(getattr(options[at], what) for options, at in zip(parts, chosen, strict=True))


def _steps(parts):
    return max(max(o.loss for o in options) - min(o.loss for o in options) for options in parts)


@pytest.mark.parametrize("seed", range(40))
def test_what_is_chosen_fits_and_is_near_the_best(seed):
    rng = random.Random(seed)
    parts = [
        [Option(bits, rng.expovariate(bits**2)) for bits in rng.sample(range(1, 9), 4)] for _ in range(5)
    ]
    least = sum(min(o.bits for o in options) for options in parts)
    budget = least + rng.random() * 15
    chosen = choose(parts, budget)
    assert _total(parts, chosen, "bits") <= budget
    fitting = [c for c in itertools.product(range(4), repeat=5) if _total(parts, c, "bits") <= budget]
    best = min(_total(parts, c, "loss") for c in fitting)
    assert best <= _total(parts, chosen, "loss") <= best + _steps(parts)


def test_equal_parts_get_the_best_exactly():
    # Losses of a quarter for each bit more: every part goes up together, and one bit is left over for the first.
    parts = [[Option(bits, 4.0**-bits) for bits in (1, 2, 3, 4)] for _ in range(4)]
    assert choose(parts, 8) == [1, 1, 1, 1]
    assert choose(parts, 9) == [2, 1, 1, 1]
    assert choose(parts, 100) == [3, 3, 3, 3]
    with pytest.raises(ValueError, match="cheapest"):
        choose(parts, 3.9)


def test_an_option_that_costs_more_and_loses_more_is_never_taken():
    assert choose([[Option(1, 1), Option(2, 3), Option(3, 0.5)]], 2.9) == [0]
    assert choose([[Option(1, 1), Option(2, 3), Option(3, 0.5)]], 3) == [2]


def test_a_step_that_does_not_fit_leaves_its_bits_to_a_smaller_one():
    # The hull goes from the first option to the third in one step.
    assert choose([[Option(4, 10), Option(5, 9), Option(6, 1)]], 5.5) == [1]


def test_what_is_spread_fills_the_budget_evenly():
    parts = [[Option(2, 0), Option(3, 0)]] * 10
    chosen = spread(parts, [0] * 10, [1] * 10, 25)
    assert sum(chosen) == 5
    gaps = [at for at, high in enumerate(chosen) if high]
    assert max(b - a for a, b in itertools.pairwise(gaps)) <= 3
