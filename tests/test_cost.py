"""What a cache costs: against figures worked out by hand, published ones, and what rows really held."""

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from requested import GRID, some_request

from semkv_bench.engine.engine import Engine
from semkv_bench.grid.cost import LayerShape, SideShape, Stored, Tokens, cost, joined
from semkv_bench.protocols.rule import PREFILL, CodingRule
from semkv_bench.quantizers import Affine, TurboQuant, TurboQuantSplit
from semkv_bench.settings.sets import Pruned, TwoLevelMixes, uniform_settings
from semkv_bench.settings.setting import FULL

SHAPE = SideShape(8, 128)
LAYERS = (LayerShape(SHAPE, SHAPE),) * 4
AFFINE5 = uniform_settings(Affine(), Affine(), [5])[0]
PRUNED = Pruned(0.25).settings(Affine(), Affine())[0]


def _cost(setting, layers, prompt, tails=(), rule=PREFILL):
    return setting.cost(Stored.of(layers, *rule.stored(setting, prompt, tails)))


# The function


def test_a_wholly_coded_cache_costs_the_price_of_a_coded_value():
    mixed = TwoLevelMixes(6, 5, 0.25).settings(Affine(), Affine())[0]
    for setting, bits in ((AFFINE5, 2.5833333), (mixed, 2.65), (PRUNED, 4.0), (FULL, 16.0)):
        found = _cost(setting, LAYERS, 1000)
        assert (
            found.cache_bits
            == pytest.approx(bits)
            == pytest.approx(found.compression and 16 / found.compression)
        )
        assert setting.storage(128).effective_bits == pytest.approx(bits)
        assert found.nbytes == pytest.approx(1000 * 4 * 2 * 1024 * bits / 8, abs=1)
        assert found.full_bytes == 1000 * 4 * 2 * 1024 * 2


def test_what_stays_in_16_bits_counts_as_that():
    # 611 tokens coded, 40 answered: under prefill they stay; where only they are coded, the prompt does.
    price = AFFINE5.storage(128).effective_bits
    assert _cost(AFFINE5, LAYERS, 611, [40]).cache_bits == pytest.approx((611 * price + 40 * 16) / 651)
    generated = CodingRule("generated", 32)
    assert _cost(AFFINE5, LAYERS, 611, [40], generated).cache_bits == pytest.approx(
        (619 * 16 + 32 * price) / 651
    )
    both = CodingRule("both", 32)
    assert _cost(AFFINE5, LAYERS, 611, [40], both).cache_bits == pytest.approx((643 * price + 8 * 16) / 651)
    # A block that is complete when the answer ends has had nothing come after it.
    assert _cost(AFFINE5, LAYERS, 611, [32], both).cache_bits == pytest.approx((611 * price + 32 * 16) / 643)
    # Between turns everything becomes coded.
    two = _cost(AFFINE5, LAYERS, 611, [40, 5], both)
    assert two.cache_bits == pytest.approx((651 * price + 5 * 16) / 656)


def test_deleted_tokens_are_values_of_no_bits():
    assert _cost(PRUNED, LAYERS, 1000, [200]).cache_bits == pytest.approx((250 + 200) * 16 / 1200)


def test_sliding_layers_hold_their_window_in_16_bits():
    small = SideShape(2, 64)
    layers = (None, LayerShape(SHAPE, SHAPE), *[LayerShape(small, small, window=128, coded=False)] * 5)
    price = AFFINE5.storage(128).effective_bits
    found = _cost(AFFINE5, layers, 1000)
    coded, sliding = 1000 * 1024, 5 * 128 * 128
    assert found.cache_bits == pytest.approx((coded * price + sliding * 16) / (coded + sliding))
    assert found.full_bytes == 2 * 2 * (coded + sliding)
    assert _cost(AFFINE5, layers, 100).full_bytes == 2 * 2 * 100 * (1024 + 5 * 128)


def test_sides_of_different_sizes_weigh_by_their_values():
    latent = (LayerShape(SideShape(1, 512), SideShape(1, 64)),) * 61
    found = _cost(uniform_settings(Affine(), Affine(), [16])[0], latent, 131072)
    assert found.key_cache_bits == pytest.approx(4 + 32 / 512)
    assert found.value_cache_bits == pytest.approx(4 + 32 / 64)
    assert found.cache_bits == pytest.approx(4.111, abs=5e-4)
    assert found.full_bytes / 2**30 == pytest.approx(8.58, abs=5e-3)


def test_the_channel_map_of_the_split_is_counted():
    (setting,) = uniform_settings(TurboQuantSplit(), TurboQuantSplit(), [4])
    price = setting.storage(128).effective_bits
    assert _cost(setting, LAYERS, 32).cache_bits == pytest.approx(price + 1 / 32)
    assert _cost(setting, LAYERS, 4096).cache_bits == pytest.approx(price + 1 / 4096)
    # A map for the prompt and one for each block.
    both = _cost(setting, LAYERS, 1024, [65], CodingRule("both", 32))
    assert both.cache_bits == pytest.approx((1088 * price + 3 + 16) / 1089)


@dataclass(frozen=True)
class Published:
    """Four levels with two float16 per 32 values (KIVI's 2 bits), and a price once a sequence."""

    once: float = 0

    def coded_bits(self, tokens, shape):
        return 3 * tokens * shape.values

    def sequence_bits(self, shape):
        return self.once


@pytest.mark.parametrize(
    ("tokens", "keys", "values"), [(1000, 4.352, 4.664), (4000, 3.104, 3.416), (32000, 3.0, 3.052)]
)
def test_windows_are_a_matter_of_what_was_stored(tokens, keys, values):
    recent = tokens % 128
    held = Tokens.of([tokens - recent], open=recent), Tokens.of([tokens - 128], kept=128)
    found = cost(lambda layer, side: Published(), Stored.of(LAYERS, *held))
    assert found.key_cache_bits == pytest.approx(keys, abs=5e-4)
    assert found.value_cache_bits == pytest.approx(values, abs=5e-4)


def test_what_is_kept_once_a_sequence_counts_once_and_only_with_codes():
    once = Published(once=4096 * 10)
    held = Tokens.of([100, 100], kept=10)
    found = cost(lambda layer, side: once, Stored.of(LAYERS, held, Tokens(kept=210)))
    assert found.key_cache_bits == pytest.approx((200 * 3 + 10 * 16 + 40) / 210)
    assert found.value_cache_bits == 16


def test_layers_may_be_priced_each_on_its_own():
    held = Tokens.of([64])
    found = cost(lambda layer, side: Published() if layer else None, Stored.of(LAYERS, held, held))
    assert found.cache_bits == pytest.approx((16 + 3 * 3) / 4)


def test_an_empty_cache_has_no_bits():
    found = cost(lambda layer, side: None, Stored.of(LAYERS, Tokens(), Tokens()))
    assert (found.cache_bits, found.nbytes, found.compression) == (0, 0, math.inf)


@given(
    st.integers(1, 400),
    st.lists(st.integers(0, 70), max_size=4),
    st.sampled_from(["prompt", "generated", "both"]),
)
def test_no_token_is_lost_or_counted_twice(prompt, tails, parts):
    for setting in (AFFINE5, PRUNED):
        for held in CodingRule(parts, 16).stored(setting, prompt, tails):
            assert held.total == prompt + sum(tails)
    assert joined([Tokens.of([3, 2, 3]), Tokens(kept=1)]) == Tokens(((2, 1), (3, 2)), kept=1)


# What rows held


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    "rule", [PREFILL, CodingRule("generated", 4), CodingRule("both", 4)], ids=lambda r: r.parts
)
@pytest.mark.parametrize("turns", [1, 3])
def test_rows_hold_what_the_rule_says(tiny, rule, turns):
    request = some_request(length=40, new=12, turns=turns)
    full_attention = len(tiny.shape.quantized_layers) == tiny.shape.layers
    pruned = Pruned(0.25).settings(Affine(), Affine()) if full_attention else []
    one_side = uniform_settings(TurboQuant(), TurboQuant(), [4], value_levels="full")
    settings = [FULL, *GRID, *one_side, *pruned]
    by_turn = Engine(tiny).converse(request, settings, rule)
    for number, outcomes in enumerate(by_turn):
        # An answer of twelve tokens at its limit feeds eleven back, and the last one with the next question.
        tails = [12, *(1 + len(turn.input_ids) + 11 for turn in request.turns[1 : number + 1])]
        for outcome in outcomes:
            planned = rule.stored(outcome.setting, 39, tails)
            assert outcome.stored == Stored.of(tiny.shape.cache, *planned), outcome.setting.name
    bits = {o.setting.name: o.setting.cost(o.stored).cache_bits for o in by_turn[-1]}
    assert bits["full"] == 16 and bits["affine-L2"] < bits["affine-L16"] < 16
