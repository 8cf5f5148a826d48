"""Tokens are coded once, in blocks, whatever the calls: by the sweep and by the packed cache alike."""

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from requested import GRID, MIXED, greedy, some_ids, some_request
from transformers import LlamaConfig

from semkv_bench import SemKVCache
from semkv_bench.engine.coding import RowCoder
from semkv_bench.engine.engine import Engine, Request, Turn
from semkv_bench.engine.rows import RowCache
from semkv_bench.protocols.rule import PREFILL, CodingRule, coder_seed
from semkv_bench.quantizers import Affine, TurboQuant
from semkv_bench.quantizers.affine import AffineCoder
from semkv_bench.settings.sets import TwoLevelMixes
from semkv_bench.settings.setting import FULL

# What is coded, and how often


def _offline(setting, states, sizes, index, side):
    """What coding each stretch of ``states`` [heads, tokens, head_dim] once gives."""
    coded, start, parts = (setting.keys, setting.values)[side], 0, []
    coder = coded.quantizer.coder(states[side].shape[-1], coder_seed(5, index, side))
    for size in sizes:
        keys, values = (x[:, start : start + size] for x in states)
        norms = {"key_norm": keys.norm(dim=-1).mean(0), "value_norm": values.norm(dim=-1).mean(0)}
        levels = coded.allocation.levels(size, norms.get(coded.allocation.metric)).expand(size)
        parts.append(coder.encode((keys, values)[side], levels))
        start += size
    return coder, parts, start


CODED = [GRID[1], *TwoLevelMixes(6, 2, 0.25, "value_norm", "layer").settings(Affine(), TurboQuant())]
CHUNKS = st.lists(st.integers(1, 9), min_size=1, max_size=12)


@hypothesis_settings(max_examples=25, deadline=None)
@given(chunks=CHUNKS, block=st.sampled_from([4, 8, 16]), number=st.integers(0, 1))
def test_rows_equal_offline_coding_whatever_the_calls(chunks, block, number):
    rows, rule, setting = (
        RowCache(LlamaConfig(num_hidden_layers=1)),
        CodingRule("generated", block),
        CODED[number],
    )
    rows.reserve(2, 200)
    coding = RowCoder(rows, [FULL, setting], rule, [0], [1, 2, 3], seed=5)
    states = torch.randn(2, 2, 2, sum(chunks), 16, generator=torch.Generator().manual_seed(sum(chunks)))
    done = 0
    for size in chunks:
        coding.close()
        rows.update(*states[..., done : done + size, :], 0)
        done += size
    sizes = rule.pieces(rule.due(sum(chunks[:-1])))
    for side in range(2):
        stored = rows.layers[0].stored()[side]
        assert torch.equal(stored[0], states[side, 0])
        coder, parts, coded = _offline(setting, states[:, 1], sizes, 0, side)
        for start, part in zip(range(0, coded, block), parts, strict=True):
            assert torch.equal(stored[1, :, start : start + block], coder.decode(part, torch.float32))
        assert torch.equal(stored[1, :, coded:], states[side, 1, :, coded:])
        assert rows.rows[1].coded == (coded, coded) and coded == sum(sizes)


@hypothesis_settings(max_examples=25, deadline=None)
@given(chunks=CHUNKS, block=st.sampled_from([4, 6, 16]), number=st.integers(0, 1), prompt=st.integers(2, 7))
def test_the_packed_cache_equals_offline_coding_whatever_the_calls(chunks, block, number, prompt):
    setting, rule = CODED[number], CodingRule("generated", block)
    config = LlamaConfig(num_hidden_layers=1, num_key_value_heads=2, head_dim=16)
    cache = SemKVCache(config, setting, parts="generated", block=block, seed=5)
    total = prompt + sum(chunks)
    states = torch.randn(2, 1, 2, total, 16, generator=torch.Generator().manual_seed(total))
    done = 0
    for size in [prompt, *chunks]:
        given_back = cache.update(*states[..., done : done + size, :], 0)
        done += size
    sizes = rule.pieces(rule.due(total - chunks[-1] - (prompt - 1)))
    for side, (packed, back) in enumerate(zip(cache.layers[0].sides, given_back, strict=True)):
        tail = states[:, 0, :, prompt - 1 :]
        coder, parts, coded = _offline(setting, tail, sizes, 0, side)
        pieces = packed.rows[0]
        if parts:
            codes = torch.cat([p.streams[0].codes() for p in pieces], dim=1)
            assert torch.equal(codes, torch.cat([part.codes for part in parts], dim=1))
            metadata = torch.cat([part.metadata for part in parts], dim=1)
            assert torch.equal(torch.cat([p.by_token[0] for p in pieces], dim=1), metadata)
            decoded = torch.cat([coder.decode(part, torch.float32) for part in parts], dim=1)
            # The last bit of a rotation back hangs on how many vectors are rotated at once.
            tolerance = {"rtol": 1e-6, "atol": 1e-6} if coder.turns else {"rtol": 0, "atol": 0}
            torch.testing.assert_close(back[0, :, prompt - 1 : prompt - 1 + coded], decoded, **tolerance)
        assert torch.equal(back[0, :, : prompt - 1], states[side, 0, :, : prompt - 1])
        assert torch.equal(back[0, :, prompt - 1 + coded :], tail[side, :, coded:])


def _single_steps_of_rows(states):
    rows = RowCache(LlamaConfig(num_hidden_layers=1))
    rows.reserve(1, 20)
    coding = RowCoder(rows, [GRID[2]], CodingRule("both", 4), [0], [1], seed=0)
    for step in range(12):
        coding.close()
        back = rows.update(*states[..., step : step + 1, :], 0)
    return back


def _single_steps_of_the_packed_cache(states):
    config = LlamaConfig(num_hidden_layers=1, num_key_value_heads=2, head_dim=16)
    cache = SemKVCache(config, GRID[2], parts="both", block=4)
    for step in range(12):
        back = cache.update(*states[..., step : step + 1, :], 0)
    return back


@pytest.mark.parametrize("steps", [_single_steps_of_rows, _single_steps_of_the_packed_cache])
def test_twelve_steps_at_block_four_leave_eight_coded_and_four_untouched(steps):
    states = torch.randn(2, 1, 2, 12, 16, generator=torch.Generator().manual_seed(0))
    for back, given_in in zip(steps(states), states, strict=True):
        changed = (back[0] != given_in[0]).any(-1).any(0).tolist()
        assert changed == [True] * 8 + [False] * 4


@pytest.fixture
def coded_tokens(monkeypatch):
    """Counts the tokens that affine coders are handed, by the coder's place in the model."""
    counts = []
    for name in ("encode", "code_row"):
        original = getattr(AffineCoder, name)

        def counted(self, x, levels, *rest, original=original, **more):
            rows = 1 if isinstance(levels, int) or levels.dim() == 1 else len(levels)
            counts.append(x.shape[1] * rows)
            return original(self, x, levels, *rest, **more)

        monkeypatch.setattr(AffineCoder, name, counted)
    return counts


@pytest.mark.parametrize("parts", ["prompt", "generated", "both"])
def test_every_token_is_coded_once_and_none_twice(tiny_llama, coded_tokens, parts):
    """Two turns without a forced answer: prompt and tail, keys and values, three layers, each token once."""
    request, rule = some_request(turns=2, new=9, reference_ids=[]), CodingRule(parts, 4)
    request = Request(**{**vars(request), "follow_ups": (Turn(some_ids(13), [], 9, frozenset()),)})
    turns = Engine(tiny_llama).converse(request, [FULL, *GRID[:2]], rule)
    prompt, first = (
        39,
        1 + 8,
    )  # the prompt's last token and the answer but its last, which the next turn feeds
    second = 1 + 13 + 8
    coded = {
        "prompt": prompt,
        "generated": first + rule.due(second - 1),
        "both": prompt + first + rule.due(second - 1),
    }
    assert sum(coded_tokens) == 2 * 2 * 3 * coded[parts]
    for outcome in turns[1][1:]:
        assert outcome.coded_share == pytest.approx(coded[parts] / (prompt + first + second))
    assert turns[1][0].coded_share == 0


def test_the_packed_cache_codes_every_token_once(tiny_llama, coded_tokens):
    ids = torch.tensor([some_ids(40)])
    cache = SemKVCache(tiny_llama.model.config, GRID[1], parts="both", block=4)
    greedy(tiny_llama, cache, ids, 20)
    cache.end_turn()
    assert sum(coded_tokens) == 2 * 3 * (40 + 19) and cache.layers[0].coded == 59
    assert sum(p.tokens for p in cache.layers[0].sides[0].rows[0]) == 59


def test_coding_the_prompt_alone_is_the_prefill_protocol(tiny):
    settings = [FULL, *GRID, *MIXED[:2]]
    before = Engine(tiny).converse(some_request(), settings, PREFILL)
    assert Engine(tiny).converse(some_request(), settings, CodingRule("prompt", 4)) == before
