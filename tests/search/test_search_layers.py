"""Levels by layer and side: what they cost, how they are named and read back."""

import pytest
from omegaconf import OmegaConf

from semkv_bench.errors import MissingError, UsageError
from semkv_bench.grid.cost import LayerShape, SideShape
from semkv_bench.quantizers import Affine, Layers, Method, Pair, read_quantizer
from semkv_bench.search.layers import PAIRS, Cache
from semkv_bench.search.nodes import layered, yaml_text
from semkv_bench.settings import uniform_settings

SIDE = SideShape(2, 64)
SHAPES = [LayerShape(SIDE, SIDE)] * 4
LEVELS = (256, 16, 8, 5, 4, 2)
AFFINE = OmegaConf.create({"_target_": "semkv_bench.quantizers.Affine"})
KIVI = OmegaConf.create(
    {
        "_target_": "semkv_bench.quantizers.Method",
        "name": "kivi",
        "keys": {
            "group": {"axis": "channel", "tokens": 32},
            "keep": {"block": 128},
            "layers": {"skip_first": 1},
        },
        "values": {
            "group": {"axis": "token", "channels": 32},
            "keep": {"recent": 128},
            "layers": {"skip_first": 1},
        },
    }
)


def _cache(node=AFFINE, tokens=300):
    from semkv_bench.config.compose import build

    made = build(node, "quantizer")
    return Cache.of(made.of_side("keys"), made.for_values(), LEVELS, SHAPES, tokens)


def _losses(cache):
    """Keys of the first layer are a thousand times as sensitive as all else."""
    return {
        (part, n): (1000 if part == (0, "keys") else 1) / n**2 for part in cache.parts for n in cache.grid
    }


def _setting(node):
    from semkv_bench.config.compose import build

    made = build(OmegaConf.create(node), "quantizer")
    (setting,) = uniform_settings(made.of_side("keys"), made.for_values(), [16, 4])
    return setting


@pytest.mark.parametrize("target", [2.6, 3.0, 4.1])
def test_bits_of_what_was_chosen_are_those_that_the_setting_costs(target):
    cache = _cache()
    chosen = cache.least_loss(_losses(cache), target)
    setting = _setting(layered(AFFINE, None, chosen, "mine"))
    cost = setting.planned(SHAPES, 300).cache_bits
    assert cost == pytest.approx(cache.cache_bits(chosen), abs=1e-12)
    assert target - 0.7 < cost <= target
    # With nothing kept in 16 bits, the price of a coded value is that of the cache.
    assert setting.storage_in(SHAPES).effective_bits == pytest.approx(cost, abs=1e-12)
    assert chosen[0, "keys"] == max(chosen.values()) > min(chosen.values())


def test_bits_of_a_method_with_windows_and_a_skipped_layer():
    cache = _cache(KIVI)
    assert {layer for layer, _ in cache.parts} == {1, 2, 3}
    losses = {(part, n): 1 / n for part in cache.parts for n in cache.grid}
    chosen = cache.least_loss(losses, 9.5)
    node = layered(KIVI, None, chosen, "mine")
    setting = _setting(node)
    assert setting.planned(SHAPES, 300).cache_bits == pytest.approx(cache.cache_bits(chosen), abs=1e-12)
    assert 9 < cache.cache_bits(chosen) <= 9.5
    # The price of a coded value is that of the layers which are coded.
    prices = [
        getattr(setting, side).at(layer, 4).storage(64, 2).effective_bits for layer, side in cache.parts
    ]
    assert setting.storage_in(SHAPES).effective_bits == pytest.approx(sum(prices) / len(prices))
    assert node["_target_"] == "semkv_bench.quantizers.Method" and node["keys"]["layers"]["skip_first"] == 1


def test_evenly_spread_levels_and_pairs_keep_the_budget():
    cache = _cache()
    even = cache.evenly(2.7)
    assert set(even.values()) == {4, 5} and 2.6 < cache.cache_bits(even) <= 2.7
    assert set(cache.evenly(cache.uniform_bits(5)).values()) == {5}
    pairs = cache.by_pairs(_losses(cache), 3.6)
    assert {(pairs[i, "keys"], pairs[i, "values"]) for i in range(4)} <= set(PAIRS.values())
    assert cache.cache_bits(pairs) <= 3.6 and pairs[0, "keys"] == 256
    assert cache.by_pairs(_losses(cache), 2.4) is None
    assert cache.cache_bits(cache.one_pair("K8V4")) == 6.5


@pytest.mark.parametrize(
    ("target", "told"),
    [(1.4, "below 1.500, what a cache of 300 tokens takes"), (8.5, "there is nothing to choose")],
)
def test_a_budget_without_a_choice_is_refused(target, told):
    with pytest.raises(UsageError, match=told):
        _cache().budget(target)


@pytest.mark.parametrize(
    "quantizer",
    [Affine(layers=Layers(levels={0: 16})), Method("q", keys={"levels": 16}, values={"levels": 16}).keys],
)
def test_a_quantizer_that_has_its_levels_is_refused(quantizer):
    with pytest.raises(UsageError, match="has them already"):
        Cache.of(quantizer, quantizer, LEVELS, SHAPES, 300)


@pytest.mark.parametrize("node", [AFFINE, KIVI])
def test_a_file_is_read_back_as_one_setting_of_its_own_name(node, tmp_path):
    cache = _cache(node)
    chosen = cache.least_loss(
        {(part, n): 1 / n for part in cache.parts for n in cache.grid}, 9.7 if node is KIVI else 3
    )
    file = tmp_path / "found.yaml"
    file.write_text(yaml_text(layered(node, None, chosen, "found-3"), "What was found."))
    made = read_quantizer(file)
    settings = uniform_settings(made.of_side("keys"), made.for_values(), [16, 8, 4])
    assert [s.name for s in settings] == ["affine[found-3]" if node is AFFINE else settings[0].name]
    assert settings[0].name.endswith("found-3]")
    for (layer, side), levels in chosen.items():
        assert getattr(settings[0], side).at(layer, 4).allocation.count == levels
    assert settings[0].describe()["levels"] is None


def test_a_value_quantizer_has_levels_of_its_own():
    turbo = OmegaConf.create({"_target_": "semkv_bench.quantizers.TurboQuant"})
    chosen = {(layer, side): 8 if side == "keys" else 4 for layer in range(4) for side in ("keys", "values")}
    setting = _setting(layered(AFFINE, turbo, chosen, "two"))
    assert (setting.keys.quantizer.name, setting.values.quantizer.name) == ("affine", "turboquant")
    assert (setting.keys.at(2, 4).allocation.count, setting.values.at(2, 4).allocation.count) == (8, 4)


def test_levels_of_a_layer_that_the_model_lacks_are_refused():
    one = Affine(layers=Layers(levels={4: 16}, others=8))
    (setting,) = uniform_settings(one, one, [8])
    with pytest.raises(UsageError, match="layer 4, and this model's last layer is 3"):
        setting.check_in(SHAPES)


def test_files_that_hold_no_quantizer_are_refused(tmp_path):
    with pytest.raises(MissingError, match="cannot be read"):
        read_quantizer(tmp_path / "none.yaml")
    (tmp_path / "other.yaml").write_text("_target_: semkv_bench.quantizers.Layers\n")
    with pytest.raises(UsageError, match="makes no quantizer"):
        read_quantizer(tmp_path / "other.yaml")
    with pytest.raises(UsageError, match="keys of a pair"):
        Pair(1, Affine())
