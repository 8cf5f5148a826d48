"""Deletion by layer and head: budgets, bits, names, and what is refused."""

import math

import pytest
import torch

from semkv_bench.errors import MissingError, UsageError
from semkv_bench.grid.cost import LayerShape, SideShape, Stored
from semkv_bench.protocols import Prefill
from semkv_bench.quantizers import Affine
from semkv_bench.quantizers.keep import Keep
from semkv_bench.settings import BUDGETS, Evict, Evictions, Pruned, TwoLevelMixes, budget
from semkv_bench.settings.budgets import Pyramid
from semkv_bench.tasks import Example

CACHE = [LayerShape(SideShape(2, 64), SideShape(2, 64))] * 3
SCORES = torch.rand(3, 2, 50, generator=torch.Generator().manual_seed(0))


def _shares(label, scores=SCORES, count=10):
    return budget(label).kept(scores, count).sum(-1)


def test_every_head_keeps_as_many():
    assert (_shares("head") == 10).all()
    assert torch.equal(
        budget("head").kept(SCORES, 10).nonzero()[:10, 2], SCORES[0, 0].topk(10).indices.sort().values
    )


def test_heads_compete_within_their_layer_and_keep_a_safe_part():
    scores = torch.stack([SCORES[:, 0], SCORES[:, 1] + 10], dim=1)  # the second head outbids the first
    assert _shares("adakv", scores).tolist() == [[2, 18]] * 3
    assert _shares("adakv-0.5", scores).tolist() == [[5, 15]] * 3
    assert _shares("adakv-1", scores).tolist() == [[10, 10]] * 3


def test_layers_compete_and_no_head_is_left_empty():
    scores = SCORES + torch.tensor([0.0, 10, 20])[:, None, None]
    kept = _shares("global", scores, 20)
    assert kept.sum() == 3 * 2 * 20 and kept[0].tolist() == [1, 1] and kept[2].tolist() == [50, 50]


def test_the_pyramid_falls_in_a_line_and_keeps_the_mean():
    assert Pyramid().counts(5, 100, 20) == [39, 30, 20, 10, 1]
    assert Pyramid().counts(5, 100, 20, always=16) == [24, 22, 20, 18, 16]
    assert Pyramid().counts(3, 100, 75) == [100, 75, 50]  # no layer keeps more than there is
    assert _shares("pyramid")[:, 0].tolist() == [19, 10, 1] and _shares("pyramid-1").eq(10).all()


def test_chunks_stay_or_go_whole_and_in_all_heads():
    kept = budget("chunk-7").kept(SCORES, 20)
    assert torch.equal(kept[:, 0], kept[:, 1])
    assert kept[..., :49].unflatten(-1, (7, 7)).float().mean(-1).unique().tolist() == [0.0, 1.0]
    best = SCORES[0].sum(0)[:49].view(7, 7).mean(-1).argmax()
    assert kept[0, 0, best * 7]


def test_a_threshold_finds_out_how_many_stay():
    assert torch.equal(budget("threshold-0.9").kept(SCORES, 50), SCORES >= 0.9)
    assert _shares("threshold-2").eq(1).all()


def test_layers_share_by_how_their_attention_spreads_and_shifts():
    evidence = [torch.ones(3, 2, 50), torch.tensor([1.0, 2, 3])[:, None, None].expand(3, 2, 50)]
    assert budget("cake").kept(SCORES, 10, evidence).sum(-1).tolist() == [[6, 6], [10, 10], [14, 14]]
    # The square of the variance; a layer that has all it can have leaves the rest to the others.
    assert budget("cake-1-0.5").kept(SCORES, 30, evidence).sum(-1)[:, 0].tolist() == [9, 31, 50]
    must = SCORES.clone()
    must[..., -8:] = math.inf
    assert budget("cake").kept(must, 10, evidence).sum(-1)[:, 0].tolist() == [9, 10, 11]
    assert budget("cake").evidence("snapkv-16") == ("window_entropy-16", "window_variance-16")
    assert budget("cake").evidence("knorm") == ("window_entropy", "window_variance")


def test_marked_heads_keep_all_and_the_mean_is_what_was_asked():
    marked = torch.tensor([[0.9, 0.1], [0.5, 0.2], [0.3, 0.9]])
    kept = budget("profile-5").kept(SCORES, 20, [marked]).sum(-1)
    assert kept.tolist() == [[50, 5], [5, 5], [5, 50]]
    assert budget("profile-5").kept(SCORES, 21, [marked]).sum(-1).tolist() == [[50, 5], [11, 5], [5, 50]]
    with pytest.raises(UsageError, match="fewer than the 64 of a head that is not marked"):
        budget("profile").check(100, 63)
    with pytest.raises(UsageError, match="25 tokens must stay in every head, more than 8"):
        Evict("h2o", "profile-8", keep=0.5, heads=((0.9, 0.1),)).check(100)


def test_a_profile_is_read_from_a_file_and_named_by_what_it_holds(tmp_path):
    path = tmp_path / "heads.tsv"
    path.write_text("0.9\t0.1\n0.5\t0.2\n")
    (made,) = _settings(score="streaming", budget="profile-8", keep=0.5, profile=str(path))
    assert made.prune.heads == ((0.9, 0.1), (0.5, 0.2))
    made.prune.check_shape(2, 2)
    with pytest.raises(UsageError, match="2 lines of 2 numbers; this model has 3 layers of 2"):
        made.prune.check_shape(3, 2)
    path.write_text("0.9, 0.2\n0.5, 0.2\n")
    (other,) = _settings(score="streaming", budget="profile-8", keep=0.5, profile=str(path))
    assert made.name.startswith("evict@0.5:streaming:profile-8/") and made.name != other.name
    for text in ("", "a b\n", "1 2\n3\n", "nan 1\n"):
        path.write_text(text)
        with pytest.raises(UsageError, match="a line for each layer"):
            _settings(budget="profile", keep=0.5, profile=str(path))
    with pytest.raises(MissingError, match=r"allocation\.profile"):
        _settings(budget="profile", keep=0.5, profile=str(tmp_path / "none"))


@pytest.mark.parametrize("label", ["head", "adakv", "pyramid", "global", "chunk-5", "threshold-0.5"])
def test_what_must_stay_does_and_ties_go_to_the_earlier(label):
    scores = torch.ones(2, 2, 40)
    scores[..., 30:35] = math.inf
    kept = budget(label).kept(scores, 12)
    assert kept[..., 30:35].all() and kept.any(-1).all()
    if label != "threshold-0.5":
        left = kept[..., :30].int()
        assert (left[..., :-1] >= left[..., 1:]).all()


@pytest.mark.parametrize("label", [name for name in BUDGETS if name not in ("threshold", "cake", "profile")])
@pytest.mark.parametrize("count", [1, 13, 50])
def test_budgets_keep_what_they_are_told(label, count):
    label = "chunk-5" if label == "chunk" else label
    mean = _shares(label, count=count).float().mean().item()
    assert mean == pytest.approx(count, abs=5 if label == "chunk-5" else 0.5)
    assert (_shares(label, count=count) >= 1).all()


def _settings(**options):
    return Evictions(**options).settings(Affine(), Affine())


def test_one_setting_an_entry_with_the_question_in_its_name():
    made = _settings(score=["snapkv-16", "surprisal"], budget=["head", "adakv"], question=["seen", "unseen"])
    assert len(made) == len({each.name for each in made}) == 2 * 2 * 2 * 4
    assert made[0].name == "evict@0.75:snapkv-16:head:seen"
    assert made[0].scored == {"seen": {"snapkv-16"}, "unseen": set()}
    assert _settings(tokens=[64, 32])[1].name == "evict@32t:snapkv:head:seen"
    assert _settings(budget="threshold-0.01")[0].name == "evict@any:snapkv:threshold-0.01:seen"
    assert (
        made[0].describe() | {"keep": 0.75, "metric": "snapkv-16", "scope": "head:seen"} == made[0].describe()
    )


def test_bits_follow_what_stays():
    plain, both = (_settings(keep=0.25, levels=levels)[0] for levels in (None, 16))
    assert plain.storage_in(CACHE).effective_bits == 4
    assert plain.planned(CACHE, 400).cache_bits == 4
    at_16 = Affine().storage(16, 64).effective_bits
    assert both.name == "affine-L16-evict@0.25:snapkv:head:seen" and both.describe()["levels"] == 16
    assert both.storage_in(CACHE).effective_bits == pytest.approx(at_16 / 4)
    assert both.planned(CACHE, 400).cache_bits == pytest.approx(at_16 / 4)


def test_uneven_heads_need_an_index():
    even, uneven = (_settings(keep=0.5, budget=name)[0] for name in ("head", "adakv"))
    held = Stored.of(CACHE, *even.stored(100))
    extra = 3 * 32 * (2 + 1)
    assert uneven.cost(held).key_bits - even.cost(held).key_bits == extra
    assert uneven.cost(held).value_bits == even.cost(held).value_bits


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"keep": 0}, "must be a share above 0"),
        ({"keep": 1.5}, "at most 1"),
        ({"keep": "most"}, "must be a share"),
        ({"keep": True}, "must be a share"),
        ({"keep": []}, "an empty list"),
        ({"keep": 0.5, "tokens": 4}, "give one"),
        ({"tokens": 0}, "whole number of at least 1"),
        ({"tokens": 2.5}, "whole number of at least 1"),
        ({"budget": "pyramids"}, "did you mean pyramid"),
        ({"budget": "chunk-0"}, "whole number of at least 1"),
        ({"budget": "chunk-2.5"}, "whole number of at least 1"),
        ({"budget": "adakv-2"}, "from 0 to 1"),
        ({"budget": "adakv-x"}, "is not a number"),
        ({"budget": "head-3"}, "has no option"),
        ({"budget": "threshold"}, "needs its score"),
        ({"budget": "threshold-0.1", "keep": 0.5}, "leave allocation.keep null"),
        ({"budget": "cake-1"}, "needs both numbers"),
        ({"budget": "cake-0-1"}, "above 0"),
        ({"budget": "chunk-5-6"}, "takes one number"),
        ({"budget": "profile"}, "needs allocation.profile=FILE"),
        ({"positions": "renumbered"}, "use allocation.score=streaming"),
        ({"positions": False}, "choose from true, renumbered"),
        ({"question": "maybe"}, "choose from seen, unseen"),
        ({"score": "snapvk"}, "did you mean snapkv"),
        ({"score": "snapkv-16-4"}, "must be odd"),
        ({"score": "snapkv-0"}, "at least 1"),
        ({"levels": 1}, "levels must be whole numbers"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(options, said):
    with pytest.raises(UsageError, match=said) as refused:
        _settings(**options)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("keep", [Keep(recent=8), Keep(sinks=4), Keep(block=32)])
def test_a_quantizer_that_leaves_tokens_in_16_bits_is_refused(keep):
    with pytest.raises(UsageError, match="codes each token by itself"):
        Evictions(keep=0.5, levels=8).settings(Affine(keep=keep), Affine())


@pytest.mark.parametrize(
    ("evict", "tokens", "said"),
    [
        (Evict("snapkv", keep=0.5), 64, "needs prompts of at least 65 tokens"),
        (Evict("snapkv", keep=0.25), 200, "50 of 200 tokens are to stay, but snapkv always keeps 64"),
        (Evict("lagkv", keep=0.9), 200, "needs prompts of at least 260"),
        (Evict("key_norm", tokens=200), 200, "deletes nothing of a prompt of 200 tokens"),
        (Evict("key_norm", keep=0.99), 40, "deletes nothing of a prompt of 40 tokens: lower allocation.keep"),
        (Evict("key_norm", "chunk-30", keep=0.5), 59, "hold fewer than two"),
        (Evict("key_norm", "chunk", keep=0.9), 50, "deletes no whole chunk of 20 tokens where 45 of 50"),
        (Evict("streaming", tokens=3), 100, "always keeps 4"),
    ],
)
def test_a_method_that_would_do_nothing_is_refused(evict, tokens, said):
    with pytest.raises(UsageError, match=said):
        evict.check(tokens)


def test_mixes_and_deletions_of_whole_tokens_need_prompts_that_their_metric_can_rank():
    example = Example("t", "1", 0, tuple(range(3, 43)), ("a",), 4)
    for setting in (
        *TwoLevelMixes(8, 4, 0.5, "snapkv").settings(Affine(), Affine()),
        *Pruned(0.5, "lagkv").settings(Affine(), Affine()),
    ):
        with pytest.raises(UsageError, match=r"needs prompts of at least .* tokens to rank, and one has 39"):
            Prefill().check_evictions([setting], [example])


def test_published_pairs_stand_in_one_list():
    made = _settings(score=["snapkv-16", "kvzip/global", "fastgen/threshold-0.05"], keep=[0.5, 0.25])
    assert [each.name for each in made] == [
        "evict@0.5:snapkv-16:head:seen",
        "evict@0.25:snapkv-16:head:seen",
        "evict@0.5:kvzip:global:seen",
        "evict@0.25:kvzip:global:seen",
        "evict@any:fastgen:threshold-0.05:seen",
    ]
    # What names its own budget is crossed with no other.
    assert len(_settings(score=["snapkv", "kvzip/global"], budget=["head", "adakv"], keep=0.5)) == 3
    with pytest.raises(UsageError, match=r"no allocation\.budget 'globe'"):
        _settings(score="kvzip/globe")


def test_retention_by_the_same_score_stands_beside_deletion():
    made = _settings(score=["snapkv-16", "kvzip/global"], keep=0.25, retain=["16/4@0.25", "8/4@.5"])
    assert [each.name for each in made[2:]] == [
        "affine-L16/4@0.25:snapkv-16:layer",
        "affine-L8/4@0.5:snapkv-16:layer",
        "affine-L16/4@0.25:kvzip:layer",
        "affine-L8/4@0.5:kvzip:layer",
    ]
    for text in ("16/4", "16@0.5", "16/4@2", "a/b@0.5"):
        with pytest.raises(UsageError, match="spelled HIGH/LOW@SHARE"):
            _settings(retain=text)


def test_one_token_stays_at_least():
    assert Evict("key_norm", keep=0.001).kept(40) == 1
    pruned = Pruned(0.001).settings(Affine(), Affine())[0].prune
    assert pruned.kept(40) == 1 and pruned.levels(40, torch.arange(40.0)).sum() == 1
