import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

from semkv_bench.engine.decode import fill
from semkv_bench.engine.engine import Engine, Request
from semkv_bench.errors import UsageError
from semkv_bench.grid.levels import FULL_PRECISION
from semkv_bench.quantizers import Affine, TurboQuant
from semkv_bench.quantizers.turboquant_prod import TurboQuantProd
from semkv_bench.settings.allocation import Prune, TwoLevel, Uniform, top_tokens
from semkv_bench.settings.sets import Pruned, TwoLevelMixes, uniform_settings
from semkv_bench.settings.setting import FULL, Coded, Setting

METRICS = ["key_norm", "value_norm", "surprisal", "attention_received", "random", "recency"]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.floats(0, 1))
def test_exactly_the_rounded_share_and_ties_by_position(scores, fraction):
    importance = torch.tensor(scores, dtype=torch.float32)
    mask = top_tokens(importance, fraction)
    assert mask.sum() == round(fraction * len(scores))
    ranking = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    assert set(mask.nonzero().flatten().tolist()) == set(ranking[: int(mask.sum())])


def test_levels_of_a_two_level_allocation():
    levels = TwoLevel(6, 5, 0.5).levels(4, torch.tensor([0.1, 0.9, 0.9, 0.2]))
    assert levels.tolist() == [5, 6, 6, 5]
    assert Uniform(5).levels(4).tolist() == [5]
    with pytest.raises(ValueError, match="importance of 3"):
        TwoLevel(6, 5, 0.5).levels(3)


def test_storage_of_allocations():
    assert TwoLevel(6, 5, 0.25).storage(Affine(), 128).effective_bits == pytest.approx(2.65)
    assert TwoLevel(4, 3, 0.75).storage(TurboQuant(), 128).effective_bits == pytest.approx(2.025)
    assert Prune(0.25).storage(None, 128).effective_bits == 4.0
    assert Prune(1.0).storage(None, 128) == FULL_PRECISION


def test_the_layout_for_attention_has_bits_of_its_own():
    """25 % at six levels and 75 % at five: 2.667 bits beside 2.650; none where no kernel attends to codes."""
    mixed, uniform = TwoLevel(6, 5, 0.25), Uniform(5)
    for allocation, quantizer, bits in (
        (mixed, Affine(), 2 + 2 / 3),
        (uniform, Affine(), 7 / 3 + 0.25),
        (Uniform(100), TurboQuant(), 7.125),
    ):
        side = Coded(quantizer, allocation)
        setting = Setting("one", "mixed", keys=side, values=side)
        assert setting.aligns and setting.aligned_storage(128).effective_bits == pytest.approx(bits)
    coded = Coded(Affine(), uniform)
    for other in (None, Coded(TurboQuant(norm_correction=True), uniform), Coded(TurboQuantProd(), uniform)):
        assert not Setting("none", "mixed", keys=coded, values=other).aligns


@pytest.mark.parametrize(
    "bad",
    [
        {"high": 5, "low": 5, "fraction": 0.5},
        {"high": 6, "low": 1, "fraction": 0.5},
        {"high": 6, "low": 5, "fraction": -0.1},
        {"high": 6, "low": 5, "fraction": 0.5, "metric": "charm"},
        {"high": 6, "low": 5, "fraction": 0.5, "scope": "head"},
    ],
)
def test_bad_allocations_are_refused(bad):
    with pytest.raises(UsageError):
        TwoLevel(**bad)


def _request(tiny, new=8) -> Request:
    ids = torch.randint(3, 97, (41,), generator=torch.Generator().manual_seed(3)).tolist()
    return Request(ids, [5, 6, 7], new, frozenset({2}))


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("scope", ["shared", "layer"])
def test_fractions_0_and_1_are_the_uniform_settings(tiny, metric, scope):
    uniform = uniform_settings(Affine(), Affine(), [6, 3])
    mixes = TwoLevelMixes(6, 3, [1.0, 0.0], metric, scope).settings(Affine(), Affine())
    outcomes = Engine(tiny).run(_request(tiny), [FULL, *uniform, *mixes])
    for plain, mixed in zip(outcomes[1:3], outcomes[3:], strict=True):
        assert (plain.tokens, plain.ended, plain.reads) == (mixed.tokens, mixed.ended, mixed.reads)
        assert plain.kl == pytest.approx(mixed.kl, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("scope", ["shared", "layer"])
def test_mixed_rows_hold_each_token_at_its_own_levels(tiny_llama, scope):
    engine, request = Engine(tiny_llama), _request(tiny_llama)
    settings = [
        FULL,
        *uniform_settings(Affine(), Affine(), [6, 3]),
        *TwoLevelMixes(6, 3, 0.3, "key_norm", scope, value_metric="value_norm").settings(Affine(), Affine()),
    ]
    prefilled = engine.answer(request, settings).prefilled
    fill(tiny_llama, prefilled, settings, engine.rows, room=1)
    high_tokens = set()
    for layer in engine.rows.layers:
        for stored in layer.stored():
            _, high, low, mixed = stored
            is_high = (mixed == high).all(-1).all(0)
            is_low = (mixed == low).all(-1).all(0)
            assert (is_high | is_low).all() and is_high.sum() == round(0.3 * 40)
            high_tokens.add(tuple(is_high.tolist()))
    # Keys and values are ranked apart; in every layer anew only where that was asked for.
    assert len(high_tokens) == 2 if scope == "shared" else len(high_tokens) > 2


def test_pruning_nothing_is_full(tiny_llama):
    outcomes = Engine(tiny_llama).run(
        _request(tiny_llama), [FULL, *Pruned(1.0, "key_norm").settings(Affine(), Affine())]
    )
    full, pruned = outcomes
    assert pruned.tokens == full.tokens and pruned.kl == pytest.approx(0, abs=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("scope", ["shared", "layer"])
def test_kept_tokens_keep_their_positions(tiny_llama, scope):
    """A pruned row answers like a plain forward over a cache of the kept tokens with the true position ids."""
    request = _request(tiny_llama, new=5)
    setting = Pruned(0.5, "key_norm", scope).settings(Affine(), Affine())[0]
    engine = Engine(tiny_llama)
    answered = engine.answer(request, [FULL, setting])
    outcome = answered.turns[0][1]
    model, keyword = tiny_llama.model, tiny_llama.cache_keyword
    plain, reference = DynamicCache(config=model.config), DynamicCache(config=model.config)
    model(input_ids=torch.tensor([request.input_ids[:-1]]), use_cache=True, **{keyword: plain})
    for index, layer in enumerate(plain.layers):
        kept = top_tokens(answered.prefilled.ranks.importance(setting.prune, index), 0.5)
        assert kept.sum() == 20
        reference.update(layer.keys[:, :, kept], layer.values[:, :, kept], index)
    tokens, position = [request.input_ids[-1]], 40
    for _ in range(5):
        ids, positions = torch.tensor([[tokens[-1]]]), torch.tensor([[position]])
        logits = model(input_ids=ids, position_ids=positions, use_cache=True, **{keyword: reference}).logits
        tokens.append(logits[0, -1].argmax().item())
        position += 1
    answer = tokens[1:]
    assert outcome.tokens == (answer[: answer.index(2)] if 2 in answer else answer)


def test_mixed_pruned_and_uniform_settings_ride_together(tiny_llama):
    settings = [
        FULL,
        *uniform_settings(Affine(), Affine(), [4]),
        *Pruned([0.5, 0.25], ["key_norm", "random"]).settings(Affine(), Affine()),
        *TwoLevelMixes(4, 3, 0.5, "random").settings(Affine(), Affine()),
    ]
    outcomes = Engine(tiny_llama).run(_request(tiny_llama), settings)
    assert [o.setting for o in outcomes] == settings
    assert all(o.tokens or o.ended for o in outcomes)
