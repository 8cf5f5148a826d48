"""Codes and groups that a calibration decides, against what they are by definition."""

import itertools

import pytest
import torch
from fitted import fitted, rotary
from test_methods import method

from semkv_bench.errors import MissingError, UsageError
from semkv_bench.quantizers import Coupled, Group, NonUniform, Permute, Thresholds
from semkv_bench.quantizers.clustered import best_points
from semkv_bench.quantizers.parts import Place

PLACE = Place(0, "keys")


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def bound(part, y, weights=None):
    return part.bound(PLACE, part.fit(y, weights))


@pytest.mark.parametrize("levels", [2, 3, 4])
def test_the_points_of_a_line_are_the_best_of_all(levels):
    generator = torch.Generator().manual_seed(levels)
    weight = torch.rand(9, generator=generator, dtype=torch.float64)
    weight[4] = 0
    values = torch.linspace(-0.9, 0.9, 9, dtype=torch.float64)
    found = best_points(weight, weight * values, levels)

    def missed(points):
        return float((weight * (values[:, None] - points).square().amin(1)).sum())

    every = []
    for cuts in itertools.combinations(range(1, 9), levels - 1):
        parts = [slice(*pair) for pair in itertools.pairwise((0, *cuts, 9))]
        means = [(weight[p] * values[p]).sum() / weight[p].sum() for p in parts if weight[p].sum() > 0]
        every.append(missed(torch.stack(means)))
    assert missed(found) == pytest.approx(min(every), abs=1e-12)
    assert len(found) == levels


def test_levels_lie_where_values_are():
    """Two thirds of the values near -0.5 and one near 0.75: two levels find both places."""
    values = torch.cat([torch.full((200,), -0.5), torch.full((100,), 0.75)]) + 0.001 * normal(300)
    code = bound(NonUniform(weights="none"), values.view(1, 1, 300, 1))
    back = code.quantize_dequantize(torch.tensor([[-0.4, 0.6, -1.0, 5.0]]), 2)
    torch.testing.assert_close(back, torch.tensor([[-0.5, 0.75, -0.5, 0.75]]), atol=2e-3, rtol=0)


def test_weights_pull_levels_to_what_matters():
    values = torch.linspace(-1, 1, 2001).view(1, 1, -1, 1)
    heavy = torch.where(values > 0.5, 1000.0, 1.0)
    plain, weighed = (bound(NonUniform(), values, w)._points(4)[0] for w in (torch.ones_like(values), heavy))
    torch.testing.assert_close(plain, torch.tensor([-0.75, -0.25, 0.25, 0.75]).double(), atol=2e-3, rtol=0)
    assert (weighed > 0.5).sum() == 3


def test_q_norm_gives_mean_and_deviation_back():
    values = normal(1, 1, 4000, 1).clamp(-3, 3) / 3
    code = bound(NonUniform(weights="none", q_norm=True), values)
    back = code.quantize_dequantize(values, 3)
    assert float(back.mean()) == pytest.approx(float(values.mean()), abs=2e-3)
    assert float(back.std()) == pytest.approx(float(values.std()), rel=2e-3)


def test_thresholds_are_the_quantiles_of_each_channel():
    y = normal(1, 2, 1001, 3) * torch.tensor([1.0, 10.0, 100.0])
    step = bound(Thresholds(share=0.01), y)
    scaled, _ = step.apply(y)
    beyond = (scaled.abs() > 1 + 1e-3).float().mean(2)
    assert ((beyond > 0.006) & (beyond < 0.012)).all()
    torch.testing.assert_close(step.undo(scaled, ()), y, rtol=1e-5, atol=1e-4)


def test_outliers_of_kvquant_are_exact_and_no_more_than_are_priced():
    side = fitted(method("kvquant").keys, 64, heads=2)
    x = normal(2, 40, 64, seed=4)
    x[:, 7, 5] = 500.0
    back = side.coder(64).placed(3).quantize_dequantize(x, torch.tensor([[3]]))[0]
    assert torch.isfinite(back).all()
    plain = rotary(64).undo(x.double(), torch.arange(3, 43)).float()[None]
    steps = [step for step in side.transform if not step.positional]
    scaled, _ = steps[0].apply(plain)
    filled, mask = side.outliers.take(scaled)
    assert mask.sum((1, 3)).max() <= max(1, round(0.01 * 128)) and mask[0, :, 7].any()
    assert (scaled[mask].abs() > 1).all() and (filled[mask].abs() == 1).all()
    assert torch.equal(filled[~mask], scaled[~mask])


def test_clusters_hold_channels_that_are_alike():
    """Channels around three values, mixed: every group holds those around one, and splitting loses nothing."""
    y = normal(1, 2, 500, 24) + torch.tensor([0.0, 100.0, -300.0]).repeat(16).view(2, 1, 24)
    group = bound(Group(channels=16, heads="all", clusters=True), y)
    parts = group.split(y)
    assert parts.shape == (1, 500, 3, 16)
    assert (parts.amax(-1) - parts.amin(-1)).max() < 12
    assert torch.equal(group.join(parts, 2), y)
    # Of unequal clusters each is filled up, and nothing is lost either.
    uneven = y.clone()
    uneven[..., 0] += 1000
    group = bound(Group(channels=16, heads="all", clusters=True), uneven)
    assert torch.equal(group.join(group.split(uneven), 2), uneven)


def test_channels_are_put_in_the_order_of_their_means():
    y = normal(1, 2, 50, 4) * 0.1 + torch.tensor([[3.0, -1.0, 7.0, 0.0], [5.0, -4.0, 1.0, 2.0]]).view(
        1, 2, 1, 4
    )
    step = bound(Permute(), y)
    ordered, _ = step.apply(y)
    lines = ordered.transpose(1, 2).flatten(2).mean((0, 1))
    assert (lines[1:] > lines[:-1]).all()
    assert torch.equal(step.undo(ordered, ()), y)


@pytest.mark.parametrize("levels", [2, 3, 4])
def test_neighbours_come_back_as_their_nearest_point(levels):
    y = normal(1, 2, 700, 1, 8)
    code = bound(Coupled(dim=4, weights="none"), y)
    points = code.fitted(f"points{levels}").float()
    assert points.shape == (4, levels**4, 4)
    back = code.quantize_dequantize(y[:, :, :20], levels)
    for head, part, token in itertools.product(range(2), range(2), (0, 7, 19)):
        vector = y[0, head, token, 0, 4 * part : 4 * part + 4]
        book = points[2 * head + part]
        nearest = book[(book - vector).square().sum(-1).argmin()]
        torch.testing.assert_close(back[0, head, token, 0, 4 * part : 4 * part + 4], nearest)
    wider = ((code.quantize_dequantize(y, 4) - y).square().mean(), (back - y[:, :, :20]).square().mean())
    assert wider[0] <= wider[1] * 1.2


def test_more_levels_of_neighbours_are_refused_in_one_line():
    with pytest.raises(UsageError, match=r"at most 4 levels, not 5: grid.levels=\[4,3,2\]"):
        method("cq").keys.check_levels(5)
    with pytest.raises(UsageError, match=r"code.dim=4 does not divide the 18 channels"):
        method("cq").keys.check_heads(2, 18)


def test_a_method_that_is_not_fitted_names_the_command():
    for name in ("kvquant", "skvq", "rotatekv", "wkvquant_lite", "cq", "aquakv"):
        side = method(name).keys
        assert side.calibrated and side.positional
        with pytest.raises(MissingError, match=f"semkv-bench calibrate model=... quantizer={name}"):
            side.coder(64).at(PLACE)


def test_keys_are_coded_as_before_the_rotary_embedding():
    """Wherever the tokens stand, the same keys before the embedding become the same values before it."""
    side = fitted(method("wkvquant_lite").keys, 64)
    plain, turn = normal(2, 9, 64, seed=8), rotary(64)
    levels, found = torch.tensor([[5]]), []
    for start in (0, 100):
        places = torch.arange(start, start + 9)
        keys = turn.apply(plain.double(), places).float()
        back = side.coder(64).placed(start).quantize_dequantize(keys, levels)[0]
        found.append(turn.undo(back.double(), places).float())
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)


def test_smoothing_by_a_calibration_is_the_models_and_costs_nothing():
    step = {
        "_target_": "semkv_bench.quantizers.Smooth",
        "alpha": 0.5,
        "source": "calibration",
        "tie_rope": True,
    }
    side = method("qserve", keys={"transform": [step]}).keys
    assert side.calibrated and not side.positional and side.granularity.tokens == 1
    assert side.storage(16, 128, 8).effective_bits == 4.25
    seen = normal(2, 200, 64, seed=1)
    seen[:, :, 3] *= 100
    made = side.bound(PLACE, side.fit(seen))
    factor = made.transform[0].apply(normal(1, 2, 5, 64))[1][0]
    largest = seen.abs().amax(1)
    paired = torch.maximum(largest, largest.roll(32, -1))  # channels c and c + 32 share the larger
    torch.testing.assert_close(factor[0, :, 0].float(), paired.sqrt(), rtol=1e-3, atol=0)
    # Another prompt's own largest values decide nothing.
    x = normal(2, 30, 64, seed=2)
    parts = [made.coder(64).quantize_dequantize(part, torch.tensor([[8]]))[0] for part in x.split([1, 29], 1)]
    assert torch.equal(torch.cat(parts, 1), made.coder(64).quantize_dequantize(x, torch.tensor([[8]]))[0])
