"""A prompt's tokens are ranked once for all that ranks them alike."""

from collections import Counter

import pytest
import torch

from semkv_bench.engine.engine import Engine, Request
from semkv_bench.protocols import rule
from semkv_bench.protocols.rule import Ranks
from semkv_bench.quantizers import Affine
from semkv_bench.settings.allocation import PER_LAYER, SHARED, Prune, TwoLevel, Uniform
from semkv_bench.settings.sets import TwoLevelMixes, uniform_settings
from semkv_bench.settings.setting import FULL

LAYERS, TOKENS = 4, 30
CPU = torch.device("cpu")


class Scores:
    """A metric's scores, which count how often they are asked for."""

    def __init__(self):
        self.asked = Counter()

    def __call__(self, label):
        self.asked[label] += 1
        rows = 1 if label == "recency" else LAYERS
        return torch.rand(rows, TOKENS, generator=torch.Generator().manual_seed(len(label)))


def by_hand(scores, allocation, place, here):
    """Levels as the definition says, every time anew."""
    if allocation.metric is None:
        return allocation.levels(len(here), None)
    found = scores(allocation.metric)
    own = rule.shared(found) if allocation.scope == SHARED else found[place if len(found) > 1 else 0]
    return allocation.levels(len(here), own[here.start : here.stop])


def test_levels_are_those_of_the_definition_in_any_order():
    allocations = [
        make(metric=metric, scope=scope)
        for metric in ("key_norm", "value_norm", "recency")
        for scope in (SHARED, PER_LAYER)
        for make in (
            lambda **of: TwoLevel(8, 4, 0.25, **of),
            lambda **of: TwoLevel(6, 5, 0.5, **of),
            lambda **of: Prune(0.5, **of),
        )
    ]
    allocations.append(Uniform(5))
    ranks, scores = Ranks(Scores()), Scores()
    generator = torch.Generator().manual_seed(0)
    for _ in range(400):
        allocation = allocations[torch.randint(len(allocations), (), generator=generator)]
        place = int(torch.randint(LAYERS, (), generator=generator))
        here = (range(TOKENS), range(4, 20))[int(torch.randint(2, (), generator=generator))]
        expected = by_hand(scores, allocation, place, here)
        assert ranks.levels(allocation, place, here).equal(expected)
        two = ranks.stacked([allocation, Uniform(3)], place, here, CPU)
        assert two[0].equal(expected.expand(two.shape[1])) and (two[1] == 3).all()


@pytest.mark.parametrize("settings", [1, 12])
def test_what_all_layers_share_is_ranked_once(settings):
    scores = Scores()
    ranks = Ranks(scores)
    allocations = [TwoLevel(8, 4, (number + 1) / 20) for number in range(settings)]
    for place in range(LAYERS):
        for _ in ("keys", "values"):
            ranks.stacked(allocations, place, range(TOKENS), CPU)
    assert scores.asked == {"key_norm": 1}


def test_what_a_layer_ranks_by_itself_is_forgotten_with_the_layer():
    ranks = Ranks(Scores())
    for place in range(LAYERS):
        for share in (0.25, 0.5):
            ranks.levels(TwoLevel(8, 4, share, scope=PER_LAYER), place, range(TOKENS))
        assert len(ranks._own) == 3 and not ranks._shared  # one importance, two sets of levels


def test_a_sweep_ranks_a_metric_once_a_prompt(tiny_llama, monkeypatch):
    ranked = []
    original = rule.shared
    monkeypatch.setattr(rule, "shared", lambda scores: ranked.append(1) or original(scores))
    mixes = TwoLevelMixes([8, 6], [4, 3], [0.25, 0.5], ["key_norm", "value_norm"], ["shared"])
    settings = [FULL, *uniform_settings(Affine(), Affine(), [4]), *mixes.settings(Affine(), Affine())]
    assert len(settings) > 8
    ids = torch.randint(3, 97, (24,), generator=torch.Generator().manual_seed(0)).tolist()
    Engine(tiny_llama).run(Request(ids, [5], 3, frozenset()), settings)
    assert len(ranked) == 2
