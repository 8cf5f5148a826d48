"""Reading less: what a summary picks is what attention sees, all of it is stored, and both are priced apart."""

import pytest
import torch
from requested import GRID, some_ids, some_request
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from semkv_bench.engine.engine import Engine
from semkv_bench.engine.options import EngineOptions
from semkv_bench.errors import UsageError
from semkv_bench.grid.cost import LayerShape, SideShape, Tokens
from semkv_bench.protocols import MultiTurn, Prefill
from semkv_bench.quantizers import Affine
from semkv_bench.quantizers.keep import Keep
from semkv_bench.settings import BlockReads, Evictions, Reading
from semkv_bench.settings.setting import FULL
from semkv_bench.tasks import Example

KEYS = torch.randn(2, 11, 16, generator=torch.Generator().manual_seed(0))
QUERIES = torch.randn(4, 3, 16, generator=torch.Generator().manual_seed(1))


def _reads(**options):
    return BlockReads(**options).settings(Affine(), Affine())


def test_a_summary_holds_the_ends_of_a_block_channel_by_channel_or_its_mean():
    low, high = Reading(0.5, 4).summary(KEYS)
    assert low.shape == (2, 3, 16)
    torch.testing.assert_close(low[:, 1], KEYS[:, 4:8].amin(1))
    torch.testing.assert_close(high[:, 2], KEYS[:, 8:].amax(1))  # the last block is short
    (mean,) = Reading(0.5, 4, "mean").summary(KEYS)
    torch.testing.assert_close(mean[:, 2], KEYS[:, 8:].mean(1))


def test_ends_bound_every_product_within_their_block():
    reading = Reading(0.4, 4)
    chosen = reading.chosen(QUERIES, reading.summary(KEYS), 11)
    assert chosen.shape == (2, 3, 3) and (chosen.sum(-1) == 1).all()
    low, high = reading.summary(KEYS)
    for head, query in ((0, 0), (1, 2)):
        bounds = []
        for block in range(3):
            ends = torch.stack([low[head, block], high[head, block]])
            group = QUERIES[2 * head : 2 * head + 2, query]
            bounds.append((group[:, None] * ends).amax(1).sum(-1).mean())
            inside = KEYS[head, 4 * block : 4 * block + 4] @ group.T
            assert (inside.mean(-1) <= bounds[-1] + 1e-5).all()
        assert chosen[head, query].int().argmax() == torch.stack(bounds).argmax()


@torch.inference_mode()
@pytest.mark.parametrize("by", ["minmax", "mean"])
def test_a_row_attends_to_what_it_reads_and_to_nothing_else(tiny_llama, by):
    """The first layer's blocks, chosen by hand for the fed token, are those of a plain attention over them."""
    (setting,) = _reads(block=8, keep=0.4, by=by)
    request = some_request(length=41, reference_ids=[5], new=3)
    seen = {}

    def hear(module, args, kwargs, output):
        if len(output[0]) == 2:  # the prompt's own pass has one row
            seen.setdefault(module.layer_idx, output[0][1, 0].clone())

    engine = Engine(tiny_llama)
    engine.answer(request, [FULL, setting])  # tries out what the model takes, in two rows
    handle = tiny_llama.decoder.layers[0].self_attn.register_forward_hook(hear, with_kwargs=True)
    prefilled = engine.prefill(request.input_ids[:-1])
    engine.answer(request, [FULL, setting])
    handle.remove()
    layer = tiny_llama.decoder.layers[0]
    hidden = layer.input_layernorm(tiny_llama.decoder.embed_tokens(torch.tensor([request.input_ids])))
    cosine, sine = tiny_llama.decoder.rotary_emb(hidden, torch.arange(41)[None])
    attention = layer.self_attn
    shape = lambda x, heads: x.unflatten(-1, (heads, 16)).transpose(1, 2)  # noqa: E731
    queries, keys = apply_rotary_pos_emb(
        shape(attention.q_proj(hidden), 4), shape(attention.k_proj(hidden), 2), cosine, sine
    )
    values = shape(attention.v_proj(hidden), 2)
    stored = prefilled.cache.layers[0].stored()[0][0]
    torch.testing.assert_close(stored, keys[0, :, :40], atol=1e-5, rtol=1e-4)
    chosen = setting.read.chosen(queries[0, :, -1:], setting.read.summary(stored), 40)[:, 0]
    assert chosen.sum() == 4  # two of five blocks in each head
    places = torch.cat([chosen.repeat_interleave(8, -1), torch.ones(2, 1, dtype=torch.bool)], -1)
    outs = []
    for head in range(4):
        own = places[head // 2]
        weights = (queries[0, head, -1] @ keys[0, head // 2, own].T / 4).softmax(-1)
        outs.append(weights @ values[0, head // 2, own])
    torch.testing.assert_close(seen[0], attention.o_proj(torch.cat(outs)), atol=1e-4, rtol=1e-3)


def test_rows_that_read_less_share_a_batch_and_full_does_not_move(tiny_llama):
    settings = [
        FULL,
        *_reads(block=8, keep=[0.5, 0.25], by=["minmax", "mean"], levels=[None, 16]),
        *Evictions("h2o_mean", "adakv", 0.5).settings(Affine(), Affine()),
        GRID[0],
    ]
    request = some_request(new=6)
    together = Engine(tiny_llama).run(request, settings)
    alone = Engine(tiny_llama, EngineOptions(max_rows=1)).run(request, settings)
    for mine, other in zip(together, alone, strict=True):
        assert mine.tokens == other.tokens, mine.setting.name
        assert mine.kl == pytest.approx(other.kl, rel=0.01, abs=1e-6)
        assert mine.read_share == other.read_share
    assert together[0].kl == 0 and together[0].read_share is None
    half, quarter = (outcome for outcome in together[1:3])
    # Two of five blocks of eight, and one: 39 tokens, the last block is short.
    assert half.read_share == pytest.approx(2 / 5, abs=0.03)
    assert quarter.read_share == pytest.approx(1 / 5, abs=0.03)
    assert half.kl > 0 and half.stored.by_state == together[0].stored.by_state


def test_what_is_read_is_priced_apart_from_what_is_stored(tiny_llama):
    plain, both = _reads(block=8, keep=0.25, levels=[None, 16])
    cache = [LayerShape(SideShape(2, 64), SideShape(2, 64))] * 3
    stored = plain.holding(cache, (Tokens(kept=120),) * 2, 100)
    summaries = 2 * 13 * 16 * 64 * 2 * 3  # two vectors of thirteen blocks, in every head and layer
    values = 2 * 120 * 64 * 2 * 3
    assert plain.cost(stored).cache_bits == pytest.approx(16 + summaries / values)
    read = 0.25 * 16 * values * 100 / 120 + summaries + 16 * values * 20 / 120
    assert plain.read_bits(stored, 0.25) == pytest.approx(read / values)
    assert plain.read_bits(stored, 1.0) == pytest.approx(plain.cost(stored).cache_bits)
    stored = both.holding(cache, (Tokens.of([100], kept=20),) * 2, 100)
    price = Affine().storage(16, 64).effective_bits
    read = 0.25 * price * values * 100 / 120 + summaries + 16 * values * 20 / 120
    assert both.read_bits(stored, 0.25) == pytest.approx(read / values)
    assert both.cost(stored).cache_bits == pytest.approx((price * 100 + 16 * 20) / 120 + summaries / values)


def test_names_and_fields():
    plain, both = _reads(keep=0.25, levels=[None, 16])
    assert (plain.name, both.name) == ("read@0.25:minmax:32", "affine-L16-read@0.25:minmax:32")
    assert (
        both.describe() | {"kind": "read", "levels": 16, "keep": 0.25, "metric": "minmax"} == both.describe()
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"keep": 0}, "reads nothing"),
        ({"keep": 1.5}, "read.keep"),
        ({"keep": []}, "an empty list in read"),
        ({"block": 0}, "read.block"),
        ({"by": "max"}, "choose from minmax, mean"),
        ({"levels": 1}, "levels must be whole numbers"),
    ],
)
def test_what_cannot_be_read_is_refused(options, said):
    with pytest.raises(UsageError, match=said):
        _reads(**options)


def test_prompts_too_short_protocols_and_quantizers_that_do_not_fit_are_refused():
    (setting,) = _reads()
    example = Example("t", "1", 0, tuple(some_ids(33)), ("a",), 4)
    with pytest.raises(UsageError, match="reads all 1 blocks of a prompt of 32 tokens"):
        Prefill().check_reads([setting], [example])
    with pytest.raises(UsageError, match="use protocol=prefill"):
        MultiTurn().check_reads([setting], [example])
    with pytest.raises(UsageError, match="codes each token by itself"):
        BlockReads(levels=8).settings(Affine(keep=Keep(recent=8)), Affine())


def test_ties_and_a_single_block():
    reading = Reading(0.5, 4)
    chosen = reading.chosen(torch.zeros(2, 1, 16), reading.summary(torch.ones(1, 16, 16)), 16)
    assert chosen[0, 0].tolist() == [True, True, False, False]
    assert Reading(0.01, 4).kept(16) == 1
