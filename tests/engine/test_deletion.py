"""Deletion by mask: what is hidden is as if it were not there, and what is not hidden does not notice."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from requested import GRID, some_ids, some_request
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from semkv_bench.engine.attention import grouped_attention, row_attention
from semkv_bench.engine.engine import Engine
from semkv_bench.engine.options import EngineOptions
from semkv_bench.engine.prefill import prefill
from semkv_bench.engine.rows import RowCache
from semkv_bench.errors import SemkvError
from semkv_bench.importance import metric
from semkv_bench.importance.hooks import watch_attention
from semkv_bench.protocols.rule import PREFILL, CodingRule
from semkv_bench.quantizers import Affine
from semkv_bench.settings import Evictions
from semkv_bench.settings.sets import Pruned
from semkv_bench.settings.setting import FULL

LENGTH, KEPT = 40, 25


def _kept(loaded, layer):
    """Tokens that each key-value head of a layer keeps, [heads, KEPT], in order; other ones in every head and layer."""
    chance = torch.Generator().manual_seed(layer)
    order = torch.rand(loaded.shape.kv_heads, LENGTH, generator=chance).argsort(dim=-1)
    return order[:, :KEPT].sort(dim=-1).values


def _gathered(loaded, new):
    """Logits [new, vocabulary] over a plain cache of the kept tokens, at the positions that they had."""
    cache = DynamicCache(config=loaded.model.config)
    loaded.model(torch.tensor([some_ids(LENGTH)]), use_cache=True, **{loaded.cache_keyword: cache})
    for index, layer in enumerate(cache.layers):
        if index in loaded.shape.quantized_layers:
            kept = _kept(loaded, index)[None, :, :, None].expand(-1, -1, -1, layer.keys.shape[-1])
            layer.keys, layer.values = layer.keys.gather(2, kept), layer.values.gather(2, kept)
    positions = torch.arange(LENGTH, LENGTH + len(new))[None]
    given = {"position_ids": positions, "use_cache": True, loaded.cache_keyword: cache}
    return loaded.model(torch.tensor([new]), **given).logits[0]


def _rows(loaded, prompt, deleted=True):
    rows = RowCache(loaded.model.config)
    rows.reserve(3, LENGTH + 8)
    for index, (source, layer) in enumerate(zip(prompt.layers, rows.layers, strict=True)):
        for view, states in zip(layer.take(LENGTH, like=source.stored()), source.stored(), strict=True):
            view.copy_(states.expand_as(view))
        if deleted and index in loaded.shape.quantized_layers:
            gone = torch.ones(loaded.shape.kv_heads, LENGTH, dtype=torch.bool)
            layer.delete(1, slice(0, LENGTH), gone.scatter(1, _kept(loaded, index), False))
    return rows


@torch.inference_mode()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("new", [1, 4])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.float64, 1e-6)])
def test_a_hidden_token_is_as_good_as_gone(tiny, new, attention, dtype, close):
    loaded = replace(tiny, model=deepcopy(tiny.model).to(dtype))
    loaded.model.set_attn_implementation(attention)  # eager takes its softmax in float32
    prompt = prefill(loaded, some_ids(LENGTH)).cache
    asked = some_ids(new, seed=7)
    logits = {}
    for deleted in (True, False):
        rows = _rows(loaded, prompt, deleted)
        with row_attention(loaded, rows):
            given = {"use_cache": True, loaded.cache_keyword: rows}
            logits[deleted] = loaded.model(torch.tensor([asked] * 3), **given).logits
    assert loaded.model.config._attn_implementation == attention
    tolerance = {"atol": close * logits[False].abs().max().item(), "rtol": 0}
    if loaded.shape.layers == len(loaded.shape.quantized_layers):
        torch.testing.assert_close(logits[True][1], _gathered(loaded, asked), **tolerance)
    # The rows beside it do not notice, and it is not what it was.
    torch.testing.assert_close(logits[True][[0, 2]], logits[False][[0, 2]], **tolerance)
    assert (logits[True][1] - logits[False][1]).abs().max() > 1e-4


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("rule", [PREFILL, CodingRule("both", 4), CodingRule("generated", 4)], ids=str)
def test_pruned_rows_share_one_batch_with_all_others(tiny_llama, rule):
    pruned = Pruned([0.75, 0.5, 0.25], ["value_norm", "attention_received"], ["shared", "layer"])
    settings = [FULL, GRID[0], *pruned.settings(Affine(), Affine()), GRID[1]]
    request = some_request(turns=2, new=9)
    together = Engine(tiny_llama).converse(request, settings, rule)
    alone = Engine(tiny_llama, EngineOptions(max_rows=1)).converse(request, settings, rule)
    for turn, single in zip(together, alone, strict=True):
        assert {outcome.batch_rows for outcome in turn} == {len(settings)}
        for mine, other in zip(turn, single, strict=True):
            assert mine.tokens == other.tokens, mine.setting.name
            assert mine.stored == other.stored
            assert (mine.kl is None) == (other.kl is None)
            assert mine.kl is None or mine.kl == pytest.approx(other.kl, rel=0.01, abs=1e-6)


def _evicted(labels, budgets, levels=None):
    options = {"keep": [0.5, 0.25], "question": ["seen", "unseen"], "levels": levels}
    return Evictions(labels, budgets, **options).settings(Affine(), Affine())


def test_evicted_rows_answer_alike_alone_and_together_and_full_does_not_move(tiny_llama):
    budgets = ["adakv", "pyramid", "global", "cake"]
    settings = [FULL, *_evicted(["snapkv-4", "surprisal"], budgets, [None, 16])]
    request = some_request(new=5, context=35)
    together = Engine(tiny_llama).run(request, settings)
    alone = Engine(tiny_llama, EngineOptions(max_rows=1)).run(request, settings)
    assert together[0].kl == 0 and {outcome.batch_rows for outcome in together} == {len(settings)}
    for mine, other in zip(together, alone, strict=True):
        assert mine.tokens == other.tokens and mine.stored == other.stored, mine.setting.name
        assert mine.kl == pytest.approx(other.kl, rel=0.01, abs=1e-6)


@torch.inference_mode()
def test_renumbered_tokens_stand_where_a_cache_of_them_alone_has_them(tiny_llama):
    """Four sinks and the newest, turned to positions 0, 1, 2..; what follows comes right behind them."""
    true, renumbered = Evictions("streaming", "head", 0.25, positions=[True, "renumbered"]).settings(
        Affine(), Affine()
    )
    request = some_request(length=41, reference_ids=[5, 9, 7], new=4)
    answered = Engine(tiny_llama).answer(request, [FULL, true, renumbered])
    ids = torch.tensor([request.input_ids])
    kept = [*range(4), *range(34, 40)]
    cache = DynamicCache(config=tiny_llama.model.config)
    tiny_llama.model(ids[:, :-1], use_cache=True, **{tiny_llama.cache_keyword: cache})
    forced = torch.tensor([[request.input_ids[-1], 5, 9]])
    full = tiny_llama.model(torch.cat([ids, forced[:, 1:]], 1), use_cache=False).logits[0, 40:]
    plain = {}
    handles = [
        layer.self_attn.k_proj.register_forward_hook(lambda m, a, out, i=i: plain.update({i: out}))
        for i, layer in enumerate(tiny_llama.decoder.layers)
    ]
    tiny_llama.model(ids[:, :-1], use_cache=False)
    for handle in handles:
        handle.remove()
    cosine, sine = tiny_llama.decoder.rotary_emb(ids.float(), torch.arange(10)[None])
    for index, layer in enumerate(cache.layers):
        keys = plain[index].unflatten(-1, (2, 16)).transpose(1, 2)[:, :, kept]
        layer.keys, layer.values = apply_rotary_pos_emb(keys, keys, cosine, sine)[0], layer.values[:, :, kept]
    given = {"position_ids": torch.arange(10, 13)[None], "use_cache": True, tiny_llama.cache_keyword: cache}
    alone = tiny_llama.model(forced, **given).logits[0]
    divergence = torch.nn.functional.kl_div(
        alone.log_softmax(-1), full.log_softmax(-1), log_target=True, reduction="sum"
    )
    assert answered.turns[0][2].kl == pytest.approx(divergence.item() / 3, rel=1e-3)
    assert answered.turns[0][1].kl != pytest.approx(answered.turns[0][2].kl, rel=0.05)
    # Alone and together, and beside rows that keep their positions.
    single = Engine(tiny_llama, EngineOptions(max_rows=1)).run(request, [FULL, true, renumbered])
    for mine, other in zip(answered.turns[0], single, strict=True):
        assert mine.tokens == other.tokens and mine.kl == pytest.approx(other.kl, rel=0.01, abs=1e-6)


@torch.inference_mode()
def test_a_replay_leaves_no_trace_and_sees_the_scored_tokens_alone(tiny_llama):
    loaded = replace(tiny_llama, tokenizer=Repeating())
    ids = some_ids(40)
    engine = Engine(loaded)
    found = engine.prefill(ids, ["kvzip", "kvzip-16", "h2o"], 0, ["kvzip"], 25)
    plain = Engine(loaded).prefill(ids, ["h2o"])
    for mine, other in zip(found.cache.layers, plain.cache.layers, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine.stored(), other.stored(), strict=True))
    alone = Engine(loaded).prefill(ids[:25], ["kvzip"]).scores["kvzip"]
    torch.testing.assert_close(found.unseen["kvzip"], alone, atol=1e-5, rtol=1e-4)
    assert found.scores["kvzip"].shape == found.scores["kvzip-16"].shape == (3, 2, 40)
    # The first chunk is repeated by the same order, and looks at nothing behind it.
    weights = []

    def hear(layer, call):
        # Queries of the order and the repeated tokens; keys of the prompt, then their own.
        scores = call.queries.unflatten(0, (2, -1)) @ call.keys.unsqueeze(1).transpose(2, 3) * call.scaling
        later = torch.ones(44, 44, dtype=torch.bool).triu(1)
        scores[..., 40:] = scores[..., 40:].masked_fill(later, -torch.inf)
        weights.append(scores.softmax(-1)[..., :40].amax((1, 2)))

    again = plain.cache.beginning(40, 44)
    with watch_attention(loaded, hear):
        asked = torch.tensor([[5, 9, 11, 4, *ids]])
        loaded.decoder(input_ids=asked, use_cache=True, **{loaded.cache_keyword: again})
    torch.testing.assert_close(found.scores["kvzip"], torch.stack(weights), atol=1e-5, rtol=1e-4)


@torch.inference_mode()
def test_scores_that_are_no_numbers_are_refused(tiny_llama):
    loaded = replace(tiny_llama, model=deepcopy(tiny_llama.model), tokenizer=Repeating())
    loaded.model.model.layers[1].self_attn.q_proj.weight[:] = float("nan")
    for label in ("kvzip", "snapkv-4"):
        with pytest.raises(SemkvError, match=f"{label} is NaN or infinite"):
            Engine(loaded).prefill(some_ids(40), [label])


class Repeating:
    """A tokenizer whose order to repeat is three tokens, and one more."""

    eos_token_id = 2

    def encode(self, text, add_special_tokens):
        return [5, 9, 11] if "Repeat" in text else [4]

    def decode(self, ids, skip_special_tokens):
        return " ".join(map(str, ids))


def test_generated_tokens_go_by_attention_less_redundancy(tiny_llama):
    """Each block of four loses the two whose score is least, by its own attention and keys."""
    (setting,) = Pruned(0.5, "r_kv", "layer").settings(Affine(), Affine())
    request = some_request(new=14)
    outcome = Engine(tiny_llama).run(request, [FULL, setting], CodingRule("generated", 4))[1]
    held = outcome.stored.sides[0].tokens
    assert held.deleted == 2 * ((len(outcome.tokens)) // 4) and held.deleted >= 4
    # The same block scored by hand.
    keys, received = torch.randn(1, 2, 6, 16), torch.rand(1, 6)
    scores = metric("r_kv").with_keys(received, list(keys))
    apart = torch.eye(16)[:6].expand(2, 6, 16)  # none like another: attention alone decides
    assert scores.shape == (1, 6)
    assert metric("r_kv").with_keys(received, [apart]).argsort().equal(received.argsort())
    # Even attention: the first of three that are alike goes before the two others.
    twins = apart.clone()
    twins[:, [1, 3]] = twins[:, :1]
    assert metric("r_kv").with_keys(torch.ones(1, 6), [twins]).argmin() == 0


@torch.inference_mode()
def test_an_evicted_row_is_a_gathered_cache_at_the_positions_it_had(tiny_llama):
    """Each head of each layer attends to its own tokens, which a plain cache of these shows too."""
    (setting,) = Evictions("h2o_mean", "head", 0.25).settings(Affine(), Affine())
    request = some_request(length=41, reference_ids=[5], new=1)
    answered = Engine(tiny_llama).answer(request, [FULL, setting])
    scores = answered.prefilled.scores["h2o_mean"]
    cache = DynamicCache(config=tiny_llama.model.config)
    asked = {"use_cache": True, tiny_llama.cache_keyword: cache}
    tiny_llama.model(torch.tensor([request.input_ids[:-1]]), **asked)
    full = tiny_llama.model(torch.tensor([request.input_ids]), use_cache=False).logits[0, -1]
    for layer, own in zip(cache.layers, scores, strict=True):
        kept = own.topk(10).indices.sort().values[None, :, :, None].expand(-1, -1, -1, 16)
        layer.keys, layer.values = layer.keys.gather(2, kept), layer.values.gather(2, kept)
    last = {"position_ids": torch.tensor([[40]]), **asked}
    gone = tiny_llama.model(torch.tensor([request.input_ids[-1:]]), **last).logits[0, -1]
    divergence = torch.nn.functional.kl_div(
        gone.log_softmax(-1), full.log_softmax(-1), log_target=True, reduction="sum"
    )
    assert answered.turns[0][1].kl == pytest.approx(divergence.item(), rel=1e-3)
    assert divergence > 1e-3


def test_what_is_kept_is_counted_and_priced(tiny_llama):
    """Bits come from the measured share: the question that was not scored stays, and counts."""
    seen, unseen = _evicted("key_norm", "head")[::2]
    both = _evicted("key_norm", "head", 16)[2]
    engine, request = Engine(tiny_llama), some_request(length=41, new=4, context=30)
    for setting, kept in ((seen, 20), (unseen, 15 + 10)):
        outcome = engine.run(request, [FULL, setting])[1]
        held = outcome.stored.sides[0].tokens
        assert held.deleted == 40 - kept and held.kept == held.total - held.deleted
        assert setting.cost(outcome.stored).cache_bits == pytest.approx(16 * held.kept / held.total)
    outcome = engine.run(request, [FULL, both])[1]
    held = outcome.stored.sides[0].tokens
    assert held.coded_tokens == 25 and held.deleted == 15 and held.kept == held.total - 40
    price = Affine().storage(16, 16).effective_bits
    assert both.cost(outcome.stored).cache_bits == pytest.approx((25 * price + 16 * held.kept) / held.total)
    assert outcome.reads > 0


def test_uneven_heads_are_counted_as_a_mean(tiny_llama):
    for setting in _evicted(["snapkv-4"], ["adakv", "global", "pyramid"]):
        outcome = Engine(tiny_llama).run(some_request(new=3, context=39), [FULL, setting])[1]
        kept = round(setting.prune.keep * 39)
        assert outcome.stored.sides[0].tokens.deleted == pytest.approx(39 - kept, abs=0.5)


def test_full_does_not_move_where_others_are_pruned(tiny_llama):
    settings = [FULL, *Pruned([0.5, 0.25], "key_norm").settings(Affine(), Affine())]
    request = some_request(new=9)
    engine = Engine(tiny_llama)
    outcome = engine.run(request, settings)[0]
    apart = Engine(tiny_llama).run(request, [FULL, FULL, FULL])[0]
    assert outcome.tokens == apart.tokens and outcome.kl == 0


@pytest.mark.parametrize("heads", [1, 3])
def test_queries_of_a_group_share_their_keys(heads):
    chance = torch.Generator().manual_seed(heads)
    rows, kv_heads, new, places = 2, 3, 4, 11
    query = torch.randn(rows, heads * kv_heads, new, 8, generator=chance)
    keys, values = torch.randn(2, rows, kv_heads, places, 8, generator=chance)
    for seen in (
        None,
        torch.rand(rows, kv_heads, new, places, generator=chance) > 0.3,
        torch.rand(1, 1, new, places, generator=chance) > 0.3,
    ):
        repeated = (x.repeat_interleave(heads, dim=1) for x in (keys, values))
        mask = None if seen is None else seen.expand(rows, seen.shape[1], -1, -1)
        if mask is not None and mask.shape[1] > 1:
            mask = mask.repeat_interleave(heads, dim=1)
        expected = torch.nn.functional.scaled_dot_product_attention(query, *repeated, attn_mask=mask)
        found = grouped_attention(query, keys, values, seen, None)
        torch.testing.assert_close(found, expected.transpose(1, 2))
