"""A cache that knows the prompt's ids draws by chance what a sweep draws."""

import pytest
import torch
from packed_caches import AFFINE, L3, greedy, mixes, some_ids, swept

from semkv_bench import SemKVCache
from semkv_bench.engine.engine import Engine, Request
from semkv_bench.errors import UsageError
from semkv_bench.protocols.rule import CodingRule
from semkv_bench.settings.setting import FULL

RANDOM = mixes("random", ["shared", "layer"], 8, 2, 0.5, AFFINE)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(("seed", "attention"), [(0, "dequantize"), (3, "packed")])
def test_generate_gives_the_tokens_of_the_sweep(tiny, seed, attention):
    ids = some_ids(24 + seed, seed)
    differs = []
    for setting, expected in zip(RANDOM, swept(tiny, ids, RANDOM, seed=seed), strict=True):
        options = {"seed": seed, "attention": attention}
        known = SemKVCache(tiny.model.config, setting, prompt_ids=ids, **options)
        assert greedy(tiny, known, ids) == [expected], setting.name
        prefilled = SemKVCache(tiny.model.config, setting, **options)
        prefilled.prefill(tiny.model, ids)
        assert greedy(tiny, prefilled, ids) == [expected], setting.name
        unknown = SemKVCache(tiny.model.config, setting, **options)
        greedy(tiny, unknown, ids)
        differs.append(not torch.equal(_levels(known), _levels(unknown)))
    assert all(differs)  # ids decide, or this would test nothing


def _levels(cache, row=0):
    """Level counts of the tokens of a row in the order of its text."""
    layout = cache.plan.layers[0].sides[0].rows[row][0].layouts[0]
    return layout.unsort(layout.levels()[None])[0]


def test_blocks_of_generated_tokens_are_drawn_as_in_the_sweep(tiny):
    ids, rule = some_ids(45), CodingRule("both", 4)
    request = Request(ids[0].tolist(), [5], 14, frozenset(), seed=2)
    outcomes = Engine(tiny).run(request, [FULL, *RANDOM], rule)
    for setting, outcome in zip(RANDOM, outcomes[1:], strict=True):
        cache = SemKVCache(
            tiny.model.config, setting, seed=2, parts="both", block=4, prompt_ids=ids[0].tolist()
        )
        assert greedy(tiny, cache, ids, new=14) == [outcome.tokens], setting.name


def test_rows_with_padding_draw_as_each_alone(tiny):
    """A padded row computes what it computes alone up to rounding, so what is compared is what is drawn."""
    short, long = some_ids(20, 1), some_ids(31, 2)
    padding = long.shape[1] - short.shape[1]
    ids = torch.cat([torch.cat([torch.zeros(1, padding, dtype=torch.long), short], 1), long])
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    cache = SemKVCache(tiny.model.config, RANDOM[0], prompt_ids=ids)
    greedy(tiny, cache, ids, mask)
    found = [_levels(cache, row) for row in range(2)]
    for row, prompt in enumerate((short, long)):
        alone = SemKVCache(tiny.model.config, RANDOM[0], prompt_ids=prompt)
        greedy(tiny, alone, prompt)
        assert found[row].equal(_levels(alone))


def test_beams_keep_the_draws_of_their_prompts(tiny_llama):
    cache = SemKVCache(tiny_llama.model.config, RANDOM[0], prompt_ids=[[1, 2, 3], [4, 5, 6]])
    cache.plan.ranking.select([1, 1, 0])
    assert cache.plan.ranking.prompts == [[4, 5, 6], [4, 5, 6], [1, 2, 3]]
    cache.reset()
    assert cache.plan.ranking.prompts is None


def test_ids_of_another_prompt_are_refused(tiny_llama):
    ids = some_ids(20)
    cache = SemKVCache(tiny_llama.model.config, RANDOM[0], prompt_ids=some_ids(19))
    with pytest.raises(UsageError, match="prompt_ids has 19 tokens in row 0, the prompt that came 20"):
        greedy(tiny_llama, cache, ids)
    cache = SemKVCache(tiny_llama.model.config, RANDOM[0], prompt_ids=torch.cat([ids, ids]))
    with pytest.raises(UsageError, match="prompt_ids has 2 rows"):
        greedy(tiny_llama, cache, torch.cat([ids, ids, ids]))


@pytest.mark.parametrize("bad", [[[1, 2], [3]], [1.5, 2.0], "text", [], [[[1]]], [True, False]])
def test_what_is_no_token_ids_is_refused(tiny_llama, bad):
    with pytest.raises(UsageError, match="prompt_ids must be the prompt's token ids"):
        SemKVCache(tiny_llama.model.config, L3, prompt_ids=bad)
