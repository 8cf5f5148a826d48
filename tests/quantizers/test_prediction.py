"""Keys and values predicted from the layer below, and what is left coded: AQUA-KV."""

import pytest
import torch
from fitted import rotary
from test_methods import method
from transformers import LlamaConfig

from semkv_bench.engine.calibration import Seen
from semkv_bench.engine.coding import RowCoder
from semkv_bench.engine.rows import RowCache
from semkv_bench.errors import SemkvError
from semkv_bench.protocols.rule import CodingRule, Ranks
from semkv_bench.quantizers import Predict, VectorCode
from semkv_bench.quantizers.calibration import write
from semkv_bench.quantizers.parts import Place
from semkv_bench.settings.sets import uniform_settings
from semkv_bench.settings.setting import FULL
from semkv_bench.sweep.calibrate import fit_layers

HEADS, HEAD_DIM, TOKENS = 2, 32, 300
TURN = rotary(HEAD_DIM)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mixed(parts, seed, noise=0.05):
    """[heads, tokens, head_dim] that are a linear image of the parts, nearly."""
    lines = torch.cat([part.transpose(0, 1).flatten(1) for part in parts], 1)
    weights = normal(lines.shape[1], HEADS * HEAD_DIM, seed=seed) / lines.shape[1] ** 0.5
    image = (lines @ weights + 3).unflatten(1, (HEADS, HEAD_DIM)).transpose(0, 1)
    return image + noise * normal(*image.shape, seed=seed + 1)


def layers(tokens, seed):
    """Keys before the embedding and values of two layers, the second nearly a function of the first."""
    keys, values = normal(HEADS, tokens, HEAD_DIM, seed=seed), normal(HEADS, tokens, HEAD_DIM, seed=seed + 1)
    above = mixed([keys], 10)
    return [(keys, values), (above, mixed([above, values], 20))]


@pytest.fixture(scope="module")
def sides(tmp_path_factory):
    """The method fitted to these two layers; the lower one is coded too."""
    path, made = tmp_path_factory.mktemp("fitted") / "aquakv.safetensors", method("aquakv")
    names = ("keys", "values")
    given = {
        (layer, side): [pair[number]]
        for layer, pair in enumerate(layers(2000, 1))
        for number, side in enumerate(names)
    }
    whole = {side: {"layers": {"skip_first": 0}} for side in names}
    coded = method("aquakv", calibration=str(path), **whole)
    write(path, {}, fit_layers([coded.keys, coded.values], Seen(given), [0, 1]))
    assert made.keys.layers.skip_first == 1
    return coded.keys, coded.values


def test_what_the_layer_below_tells_is_not_coded(sides):
    """The second layer, of which a twentieth is new, comes back at two bits as it would at six."""
    (below, _), (keys, _) = layers(TOKENS, 50)
    coder = sides[0].coder(HEAD_DIM).at(Place(1, "keys", TURN))
    turned = TURN.apply(keys.double(), torch.arange(TOKENS)).float()
    missed = {
        name: (coder.beside(told).quantize_dequantize(turned, torch.tensor([[4]]))[0] - turned)
        .square()
        .mean()
        for name, told in (("true", [below]), ("false", [normal(*below.shape, seed=9)]))
    }
    assert missed["true"] < 0.01 < missed["false"]


def _rows(settings, states, rule=CodingRule("prompt"), tail=0):
    """What rows hold of a prompt of two layers, keys turned."""
    config = LlamaConfig(num_hidden_layers=2)
    prompt, rows = RowCache(config), RowCache(config)
    prompt.reserve(1, TOKENS)
    length = TOKENS - tail
    for layer, pair in enumerate(states):
        prompt.update(*(part[None, :, :length] for part in pair), layer)
    coding = RowCoder(rows, settings, rule, [0, 1], [1], seed=5, rotary=lambda: {0: TURN, 1: TURN})
    coding.fill(prompt, tail, Ranks(lambda label: None))
    for place in range(length, TOKENS):
        coding.close()
        for layer, pair in enumerate(states):
            rows.update(
                *(part[None, :, place : place + 1].expand(len(settings), -1, -1, -1) for part in pair), layer
            )
    coding.close()
    return [rows.layers[layer].stored() for layer in range(2)]


def _states(seed=70):
    positions = torch.arange(TOKENS)
    return [(TURN.apply(keys.double(), positions).float(), values) for keys, values in layers(TOKENS, seed)]


def test_a_row_predicts_from_what_it_gives_back_itself(sides):
    states, settings = _states(), [FULL, *uniform_settings(*sides, [16, 2])]
    held = _rows(settings, states)
    here, positions = slice(4, 260), torch.arange(4, 260)
    for row, levels in ((1, 16), (2, 2)):
        (below_keys, below_values), (own_keys, own_values) = [[part[row] for part in pair] for pair in held]
        count = torch.tensor([[levels]])

        def plain(keys):
            return TURN.undo(keys[:, here].double(), positions).float()

        for side, told, found in (
            (0, [plain(below_keys)], own_keys),
            (1, [plain(own_keys), below_values[:, here]], own_values),
        ):
            coder = sides[side].coder(HEAD_DIM).at(Place(1, ("keys", "values")[side], TURN)).placed(4)
            expected = coder.beside(told).quantize_dequantize(states[1][side][:, here], count)[0]
            torch.testing.assert_close(found[:, here], expected, atol=1e-5, rtol=1e-5)
        # Sinks and the unfilled block stay.
        for part, whole in zip((own_keys, own_values), states[1], strict=True):
            assert torch.equal(part[:, :4], whole[:, :4]) and torch.equal(part[:, 260:], whole[:, 260:])
    errors = [(held[1][0][row] - states[1][0]).square().mean() for row in (0, 1, 2)]
    assert errors[0] == 0 < errors[1] < errors[2]


def test_blocks_of_the_tail_are_as_those_of_the_prompt(sides):
    settings, states = [FULL, *uniform_settings(*sides, [4])], _states()
    whole, tail = _rows(settings, states), _rows(settings, states, CodingRule("both", 32), tail=200)
    for one, other in zip(whole, tail, strict=True):
        for side in range(2):
            torch.testing.assert_close(other[side], one[side], atol=1e-4, rtol=1e-4)


def test_the_lowest_layer_is_coded_as_it_is(sides):
    state = {"transform.1:weights": torch.zeros(0, HEADS * HEAD_DIM)}
    x = normal(HEADS, 50, HEAD_DIM)
    low, none = (sides[0].bound(Place(0, "keys", TURN), state).transform[1], Predict())
    assert torch.equal(low.apply(x[None])[0], x[None])
    with pytest.raises(SemkvError, match="fitted to a model"):
        none.apply(x[None])
    with pytest.raises(SemkvError, match="what the layer below gives back is not known"):
        sides[0].coder(HEAD_DIM).at(Place(1, "keys", TURN)).quantize_dequantize(x, torch.tensor([[4]]))


@pytest.mark.parametrize(("points", "error"), [(4, 0.36338), (16, 0.10755), (64, 0.02956)])
def test_pairs_of_normal_values_are_near_the_best_points(points, error):
    """Four points are two scalar ones a side (J. Max, 1960); of more, AQUA-KV's own tables miss as much a value."""
    x = torch.randn(1, 1, 40_000, 2, generator=torch.Generator().manual_seed(3))
    missed = VectorCode(dim=2, most=16, signs=False).quantize_dequantize(x, round(points**0.5)) - x
    assert float(missed.square().mean()) == pytest.approx(error, rel=0.03)
